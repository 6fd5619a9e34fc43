"""Files into a store: lines, texts and arrays of ids, a few megabytes at a time.

[Note: long texts]
A `.txt` file is one document, and is encoded in stretches that begin with a line break. A stretch
but the first is read as if a text began there, for which SentencePiece puts a space first; its
tokens are those of an encoded line break but the last one, and are left out. So the ids are those
of the whole text at once, unless a tokenizer has pieces that reach across a line break.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from llama.chat import Segment, join
from llama.finetune.data.formats import Text, parse, record_of
from llama.finetune.data.store import Writer
from llama.finetune.data.templates import check_untagged, segments_of
from llama.tokenizer import Tokenizer

SUFFIXES = (".jsonl", ".txt", ".npy")
BATCH_BYTES = 2**20  # of lines encoded at once: their ids take ten times that as Python's ints
STRETCH_BYTES = 2**18  # of a text that a thread encodes at once
BATCH_TOKENS = 2**20  # of an array read at once


def read(path: Path, writer: Writer, tokenizer: Tokenizer, template: str, threads: int) -> None:
    """Tokenise the file `path` into `writer`; what cannot be trained on is refused there.

    `.txt` and `.npy` files are told by their names, any other is read as JSONL.
    """
    if path.suffix.lower() == ".npy":
        _read_array(path, writer)
        return
    with path.open("rb") as file:
        if path.suffix.lower() == ".txt":
            _read_text(file, writer, tokenizer, threads)
        else:
            _read_lines(file, writer, tokenizer, template, threads)


# ---- JSONL ----------------------------------------------------------------------------------


def _read_lines(
    file: BinaryIO, writer: Writer, tokenizer: Tokenizer, template: str, threads: int
) -> None:
    batch: list[tuple[int, list[Segment], bool]] = []  # line, segments, whether it is a text
    batch_bytes = 0
    for number, line in enumerate(file, start=1):
        line = line.strip()
        if not line:
            continue
        try:
            record = record_of(parse(line, number == 1))
            batch.append((number, segments_of(record, template), isinstance(record, Text)))
        except ValueError as reason:
            writer.refuse(number, str(reason))
        batch_bytes += len(line)
        if batch_bytes >= BATCH_BYTES:
            _encode(batch, writer, tokenizer, threads)
            batch, batch_bytes = [], 0
    _encode(batch, writer, tokenizer, threads)


def _encode(
    batch: list[tuple[int, list[Segment], bool]],
    writer: Writer,
    tokenizer: Tokenizer,
    threads: int,
) -> None:
    texts = [text for _, segments, _ in batch for s in segments for text in (s.prompt, s.text)]
    encoded = iter(tokenizer.encode_batch(texts, threads))
    for line, segments, is_text in batch:
        ids: list[int] = []
        learnt: list[int] = []
        for segment in segments:
            segment_ids, mask = join(tokenizer, segment, next(encoded), next(encoded))
            ids += segment_ids
            learnt += mask
        if is_text:
            writer.extend(ids)
            writer.end_text(line)
        else:
            writer.add(line, ids, learnt)


# ---- Texts ----------------------------------------------------------------------------------


def _read_text(file: BinaryIO, writer: Writer, tokenizer: Tokenizer, threads: int) -> None:
    line_break = tokenizer.encode("\n")
    before_break = line_break[:-1]
    blank, begun = True, False
    writer.extend([tokenizer.bos_id])
    try:
        for stretches in _stretches(file, threads):
            blank = blank and not any(stretch.strip() for stretch in stretches)
            for ids in tokenizer.encode_batch(stretches, threads):
                has_more = begun and ids[: len(before_break)] == before_break
                writer.extend(ids[len(before_break) * has_more :])
                begun = begun or bool(ids)
    except _BadLine as bad:
        writer.refuse(bad.line, bad.reason)
        return
    if not blank:
        writer.extend([tokenizer.eos_id])
        writer.end_text(1)


class _BadLine(Exception):
    def __init__(self, line: int, reason: str) -> None:
        super().__init__(line, reason)
        self.line, self.reason = line, reason


def _stretches(file: BinaryIO, count: int) -> Iterator[list[str]]:
    """Up to `count` stretches at a time, each but the first beginning with a line break."""
    stretches: list[str] = []
    lines: list[str] = []
    size = 0
    for number, line in enumerate(file, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            check_untagged(text)
        except UnicodeDecodeError as error:
            byte = f"byte {error.start + 1} is 0x{line[error.start]:02x}"
            raise _BadLine(number, f"not UTF-8 text ({byte}): save the file as UTF-8") from None
        except ValueError as error:
            raise _BadLine(number, str(error)) from None
        lines.append(text.removesuffix("\r\n") + "\n" if text.endswith("\r\n") else text)
        size += len(line)
        if size >= STRETCH_BYTES and lines[-1].endswith("\n"):
            lines[-1] = lines[-1].removesuffix("\n")
            stretches.append("".join(lines))
            lines, size = ["\n"], 0
            if len(stretches) == count:
                yield stretches
                stretches = []
    yield [*stretches, "".join(lines)]


# ---- Arrays of ids --------------------------------------------------------------------------


def _read_array(path: Path, writer: Writer) -> None:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        writer.refuse(0, f"not an array of numpy's: {error}")
        return
    if not isinstance(array, np.ndarray):
        writer.refuse(0, "is an archive: save each array in a file of its own, with numpy.save")
    elif array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        about = f"{array.ndim}-D {array.dtype}"
        writer.refuse(0, f"must hold token ids, 1-D or 2-D whole numbers, not {about}")
    elif array.ndim == 1:
        _read_stream(array, writer)
    elif array.shape[1] < 2:
        writer.refuse(0, f"rows of {array.shape[1]} tokens have nothing to learn")
    else:
        _read_rows(array, writer)


def _read_stream(array: np.ndarray, writer: Writer) -> None:
    if len(array) == 1:
        writer.refuse(0, "a single token has nothing to learn")
        return
    for start in range(0, len(array), BATCH_TOKENS):
        ids = np.asarray(array[start : start + BATCH_TOKENS])
        bad = _foreign(ids, writer.vocab_size)
        if bad.any():
            at = int(bad.argmax())
            writer.refuse(0, f"token {start + at + 1} is {_foreign_reason(ids[at], writer)}")
            return
        writer.extend(ids)
    if len(array):
        writer.end_text(0)


def _read_rows(array: np.ndarray, writer: Writer) -> None:
    rows_at_once = max(1, BATCH_TOKENS // array.shape[1])
    for start in range(0, len(array), rows_at_once):
        rows = np.asarray(array[start : start + rows_at_once])
        bad = _foreign(rows, writer.vocab_size)
        for number, (ids, bad_ids) in enumerate(zip(rows, bad, strict=True), start=start + 1):
            if bad_ids.any():
                at = int(bad_ids.argmax())
                writer.refuse(number, f"token {at + 1} is {_foreign_reason(ids[at], writer)}")
            else:
                writer.extend(ids)
                writer.end_text(number)


def _foreign(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    return (ids < 0) | (ids >= vocab_size)


def _foreign_reason(value: np.integer, writer: Writer) -> str:
    return f"{value}, not an id of the tokenizer's (0 to {writer.vocab_size - 1})"

"""Examples from JSONL files, and the batches that a run makes of them.

[Note: the order of the data]
Every epoch has its own permutation of the examples, drawn from (seed, epoch). The epochs one after
another make one endless stream, and step s takes the examples at s * global_batch and onwards. So a
batch is a function of the step alone: a resumed run needs no state but its step, nothing is dropped
at the end of an epoch, and any number of ranks share out the same global batch.
"""

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from llama.chat import encode_dialog
from llama.tokenizer import Tokenizer

NO_LOSS = -100  # the target that torch's cross_entropy leaves out by default
WIDTH_MULTIPLE = 8  # batches come in few widths, and those suit matrix units


class Example(NamedTuple):
    """One training sequence: token ids, and 1 for every token that is to be learnt, else 0."""

    ids: list[int]
    loss_mask: list[int]


class Batch(NamedTuple):
    """`tokens` and `targets`, both (batch, seq) int64, right-padded.

    A target is the token that follows, or -100 where there is no loss: logits and targets align.
    """

    tokens: Tensor
    targets: Tensor


# ---- Files ----------------------------------------------------------------------------------


def load_jsonl(path: str | Path, tokenizer: Tokenizer, seq_len: int) -> list[Example]:
    """Read `{"text": ...}` and `{"messages": [...]}` lines into examples of at most `seq_len` ids.

    A text is begin token, text, end token, all learnt but the first token. A longer one is cut so
    that each piece begins with the last token of the piece before: every token is learnt just once.
    Dialogs are in Llama 2's chat format, only answers learnt; blank lines are skipped. Raises
    FileNotFoundError, or ValueError as "file:line: reason" for what is not such a line, for a
    dialog without an answer, and for one longer than `seq_len`, which a cut would falsify.
    """
    path = Path(path)
    if seq_len < 2:
        raise ValueError(f"a sequence length of {seq_len} has nothing to learn: use 2 or more")
    if not path.is_file():
        reason = "is a folder, not a JSONL file" if path.is_dir() else "no such file"
        raise FileNotFoundError(f"{path}: {reason}")
    examples: list[Example] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                examples += _examples(_parse(line.strip(), number == 1), tokenizer, seq_len)
            except ValueError as reason:
                raise ValueError(f"{path}:{number}: {reason}") from None
    if not examples:
        raise ValueError(f"{path}: the file is empty: it needs a JSON object a line")
    return examples


def _parse(line: bytes, first: bool) -> dict[str, Any]:
    try:
        text = line.decode("utf-8-sig" if first else "utf-8")  # editors may begin a file with a BOM
    except UnicodeDecodeError as error:
        byte = f"byte {error.start + 1} is 0x{line[error.start]:02x}"
        raise ValueError(f"not UTF-8 text ({byte}): save the file as UTF-8") from None
    try:
        content = json.loads(text)
        # JSON can spell half of a surrogate pair, which is no character.
        json.dumps(content, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise ValueError(
            f"malformed JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        ) from None
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(f"{half} is half of a surrogate pair, not a character") from None
    except (RecursionError, ValueError) as error:  # nested, or numbers, beyond Python's limits
        raise ValueError(f"malformed JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"must be a JSON object, not {_json_type(content)}")
    return content


def _examples(content: dict[str, Any], tokenizer: Tokenizer, seq_len: int) -> list[Example]:
    if ("text" in content) == ("messages" in content):
        found = ", ".join(repr(key) for key in content) or "none"
        raise ValueError(f"needs either 'text' or 'messages'; its keys: {found}")
    if "text" in content:
        return _text_examples(content["text"], tokenizer, seq_len)
    return [_dialog_example(content["messages"], tokenizer, seq_len)]


def _text_examples(text: Any, tokenizer: Tokenizer, seq_len: int) -> list[Example]:
    if not isinstance(text, str):
        raise ValueError(f"'text' must be a string, not {_json_type(text)}")
    if not text.strip():
        raise ValueError("'text' is blank: remove the line")
    ids = tokenizer.encode(text, bos=True, eos=True)
    pieces = [ids[start : start + seq_len] for start in range(0, len(ids) - 1, seq_len - 1)]
    return [Example(piece, [0] + [1] * (len(piece) - 1)) for piece in pieces]


def _dialog_example(messages: Any, tokenizer: Tokenizer, seq_len: int) -> Example:
    if not isinstance(messages, list):
        raise ValueError(f"'messages' must be a list, not {_json_type(messages)}")
    example = Example(*encode_dialog(tokenizer, messages))
    if not any(example.loss_mask):
        raise ValueError("nothing to learn: the dialog has no answer by the assistant")
    if len(example.ids) > seq_len:
        raise ValueError(
            f"the dialog has {len(example.ids)} tokens, more than the sequence length {seq_len}: "
            "raise --seq-len, or split or shorten the dialog"
        )
    return example


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


# ---- Batches --------------------------------------------------------------------------------


def collate(examples: Sequence[Example], pad_id: int, width: int | None = None) -> Batch:
    """One row an example, padded to `width` positions, by default those of the longest example."""
    width = width or max(_positions(example) for example in examples)
    tokens = torch.full((len(examples), width), pad_id)
    targets = torch.full((len(examples), width), NO_LOSS)
    for row, (ids, loss_mask) in enumerate(examples):
        following = [i if learnt else NO_LOSS for i, learnt in zip(ids, loss_mask, strict=True)]
        tokens[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        targets[row, : len(ids) - 1] = torch.tensor(following[1:])
    return Batch(tokens, targets)


class Batches:
    """One rank's share of every optimizer step's global batch (see [Note: the order of the data]).

    Rank r of W takes rows r, r + W, r + 2W ... of `global_batch` rows. Raises ValueError if W does
    not divide `global_batch`, or there are no examples.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        global_batch: int,
        seed: int,
        pad_id: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _check_rank(rank, world_size)
        if not examples:
            raise ValueError("there are no examples to make batches of")
        if global_batch < 1 or global_batch % world_size:
            raise ValueError(
                f"a global batch of {global_batch} sequences cannot be shared evenly by "
                f"{world_size} ranks: use a multiple of {world_size}"
            )
        self.examples = examples
        self.global_batch = global_batch
        self.seed = seed
        self.pad_id = pad_id
        self.rank, self.world_size = rank, world_size
        self._widest = max(_positions(example) for example in examples)

    def batch(self, step: int) -> Batch:
        """This rank's (global_batch / world_size, seq) share of step `step`, counted from 0.

        `seq` is the same on every rank: the longest row of the global batch, rounded up to 8 but no
        further than the longest of all examples, so that it never exceeds what the model takes.
        """
        rows = self._rows(step)
        longest = max(_positions(example) for example in rows)
        rounded = -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        width = min(rounded, self._widest)
        return collate(rows[self.rank :: self.world_size], self.pad_id, width)

    def target_tokens(self, step: int) -> int:
        """Tokens that bear loss in the whole global batch: what a summed loss is divided by."""
        return sum(sum(example.loss_mask[1:]) for example in self._rows(step))

    def _rows(self, step: int) -> list[Example]:
        if step < 0:
            raise ValueError(f"step {step} is negative: steps count from 0")
        count, begin = len(self.examples), step * self.global_batch
        places = (divmod(at, count) for at in range(begin, begin + self.global_batch))
        return [self.examples[_permutation(count, self.seed, epoch)[at]] for epoch, at in places]


@functools.lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    entropy = np.random.SeedSequence(seed % 2**64, spawn_key=(epoch,))  # it takes no negative seed
    # The generator that numpy has frozen: a run may be resumed under another version of it.
    return np.random.RandomState(np.random.MT19937(entropy)).permutation(count)


def eval_batches(
    examples: Sequence[Example], batch_size: int, pad_id: int, rank: int = 0, world_size: int = 1
) -> Iterator[Batch]:
    """Every example once over all ranks, at most `batch_size` rows a rank at a time.

    All ranks get equally many batches, of the same shapes, as a sharded model hangs otherwise: a
    rank that runs short gets rows without targets. So sum losses and targets over the ranks before
    dividing; a mean of one batch may be 0 / 0. Raises ValueError for a `batch_size` below 1.
    """
    _check_rank(rank, world_size)
    if batch_size < 1:
        raise ValueError(f"a batch size of {batch_size} makes no batch: use 1 or more")
    return _eval_batches(examples, batch_size, pad_id, rank, world_size)


def _eval_batches(
    examples: Sequence[Example], batch_size: int, pad_id: int, rank: int, world_size: int
) -> Iterator[Batch]:
    blank = Example([pad_id, pad_id], [0, 0])
    for begin in range(0, len(examples), batch_size * world_size):
        rows = examples[begin : begin + batch_size * world_size]
        share = -(-len(rows) // world_size)
        mine = list(rows[rank::world_size])
        mine += [blank] * (share - len(mine))
        yield collate(mine, pad_id, max(_positions(example) for example in rows))


def _positions(example: Example) -> int:
    """Positions a model sees: all tokens but the last, which nothing follows."""
    return max(1, len(example.ids) - 1)


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size} ranks, counted from 0")

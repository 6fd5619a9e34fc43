"""Tokenised documents as arrays in files: written once, front to back, then memory-mapped.

A folder holds `ids.bin` (the documents one after another), `learnt.bin` (a byte for each token of a
document that says so; texts, learnt whole, take none), arrays with a number a document, and
`about.json`, which says how long each file is.
"""

import contextlib
import json
import os
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llama.weights.publish import sync

ABOUT = "about.json"
SMALL_BYTES = 2**16  # of a file that is read: a process can map some 65,000 files, and no more


class Refused(NamedTuple):
    """A line that cannot be trained on; `line` counts from 1, 0 is the file as a whole."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else self.path
        return f"{place}: {self.reason}"


class Store(NamedTuple):
    """Documents: the tokens of number d are `ids[offsets[d] : offsets[d + 1]]`.

    One with `flagged[d]` is not to be cut and has its loss mask in `learnt`; any other is a text.
    """

    ids: np.ndarray
    learnt: np.ndarray  # uint8, the flagged documents' alone
    offsets: np.ndarray  # int64, (documents + 1,)
    lines: np.ndarray  # int64: where a document begins in its file, counted from 1
    learnt_counts: np.ndarray  # int64: tokens that bear loss
    flagged: np.ndarray  # bool
    refused: list[tuple[int, str]]  # line and reason
    made_of: str = ""  # a SHA-256, the same for the same documents; "" where none is known


class Writer:
    """Writes a store into a new folder; it is one only after `finish`."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self.vocab_size = vocab_size
        self._dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.int32)
        self._files = contextlib.ExitStack()
        paths = (folder / "ids.bin", folder / "learnt.bin")
        self._ids, self._learnt = (self._files.enter_context(p.open("wb")) for p in paths)
        self._open = 0  # tokens of the document that is being extended
        self._offsets, self._lines, self._learnt_counts = array("q", [0]), array("q"), array("q")
        self._flagged = bytearray()
        self.refused: list[tuple[int, str]] = []

    @property
    def documents(self) -> int:
        """How many have been written."""
        return len(self._lines)

    def extend(self, ids: np.ndarray | list[int]) -> None:
        """Write tokens of a text, which `end_text` ends."""
        self._ids.write(np.asarray(ids, self._dtype).tobytes())
        self._open += len(ids)

    def end_text(self, line: int) -> None:
        """End the text written since the last document; every token but its first is learnt."""
        self._end(line, self._open - 1, flagged=False)

    def add(self, line: int, ids: list[int], learnt: list[int]) -> None:
        """Write a whole document, with 1 for each token that is learnt and 0 for the others."""
        self.extend(ids)
        self._learnt.write(bytes(learnt))
        self._end(line, sum(learnt), flagged=True)

    def refuse(self, line: int, reason: str) -> None:
        """Note a line that cannot be trained on, whose tokens so far, if any, do not count."""
        self._ids.seek(self._offsets[-1] * self._dtype.itemsize)
        self._open = 0
        self.refused.append((line, reason))

    def finish(self) -> None:
        """Write what is left, and wait until all of it is on the disk."""
        self._ids.truncate(self._offsets[-1] * self._dtype.itemsize)
        arrays = {
            "offsets": self._offsets,
            "lines": self._lines,
            "learnt_counts": self._learnt_counts,
            "flagged": self._flagged,
        }
        for file in (self._ids, self._learnt):
            file.flush()
            os.fsync(file.fileno())
        self.close()
        for name, numbers in arrays.items():
            _write(self._folder / f"{name}.bin", bytes(numbers))
        sizes = {path.name: path.stat().st_size for path in self._folder.iterdir()}
        about = {"dtype": self._dtype.name, "bytes": sizes, "refused": self.refused}
        _write(self._folder / ABOUT, json.dumps(about).encode())
        sync(self._folder)

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _end(self, line: int, learnt_count: int, flagged: bool) -> None:
        self._offsets.append(self._offsets[-1] + self._open)
        self._lines.append(line)
        self._learnt_counts.append(learnt_count)
        self._flagged.append(flagged)
        self._open = 0


def open_store(folder: Path, made_of: str = "") -> Store | None:
    """The store in a folder, mapped and not read; None where there is none or a part is missing."""
    try:
        about = json.loads((folder / ABOUT).read_bytes())
        sizes: dict[str, int] = about["bytes"]
        if any((folder / name).stat().st_size != size for name, size in sizes.items()):
            return None
        refused = [(line, reason) for line, reason in about["refused"]]
        arrays = [
            _map(folder / "ids.bin", about["dtype"]),
            _map(folder / "learnt.bin", np.uint8),
            _map(folder / "offsets.bin", np.int64),
            _map(folder / "lines.bin", np.int64),
            _map(folder / "learnt_counts.bin", np.int64),
            _map(folder / "flagged.bin", np.bool_),
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Store(*arrays, refused, made_of)


def _map(path: Path, dtype: Any) -> np.ndarray:
    if path.stat().st_size <= SMALL_BYTES:
        return np.fromfile(path, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())

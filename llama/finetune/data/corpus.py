"""Examples: spans of tokenised documents, read when they are asked for."""

import bisect
import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple, overload

import numpy as np

from llama.finetune.data.store import Refused, Store


class Example(NamedTuple):
    """One training sequence: token ids, and 1 for every token that is to be learnt, else 0."""

    ids: Sequence[int] | np.ndarray
    loss_mask: Sequence[int] | np.ndarray


class Part(NamedTuple):
    """The examples of one source: `count` from `first` on, each seen `weight` times an epoch."""

    name: str
    first: int
    count: int
    weight: float


class Spans(NamedTuple):
    """The examples that a store's documents make, an array each."""

    begins: np.ndarray  # int64: where they begin in the store's ids
    lengths: np.ndarray  # int64: tokens
    learnt: np.ndarray  # int64: tokens that bear loss, which the first never does
    documents: np.ndarray  # int64: the document they are of


def cut(store: Store, seq_len: int) -> tuple[Spans, list[tuple[int, str]]]:
    """A store's documents in spans of at most `seq_len` tokens, and the lines that are too long.

    A text is cut so that each piece begins with the last token of the piece before: every token is
    learnt just once. A dialog is never cut, which would falsify it.
    """
    sizes = np.diff(store.offsets)
    fits = ~store.flagged | (sizes <= seq_len)
    refused = [
        (int(store.lines[document]), _too_long(int(sizes[document]), seq_len))
        for document in np.flatnonzero(~fits)
    ]
    pieces = np.where(store.flagged, 1, -(-(sizes - 1) // (seq_len - 1))) * fits
    documents = np.repeat(np.arange(len(sizes)), pieces)
    number = np.arange(len(documents)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    skipped = number * (seq_len - 1)
    lengths = np.minimum(seq_len, sizes[documents] - skipped)
    learnt = np.where(store.flagged[documents], store.learnt_counts[documents], lengths - 1)
    return Spans(store.offsets[documents] + skipped, lengths, learnt, documents), refused


def _too_long(size: int, seq_len: int) -> str:
    return (
        f"the dialog has {size} tokens, more than the sequence length {seq_len}: "
        "raise --seq-len, or split or shorten the dialog"
    )


class Piece:
    """Part of a corpus: the examples of one file."""

    def __init__(self, path: str, store: Store, spans: Spans) -> None:
        self.path, self.store, self.spans = path, store, spans
        mask_lengths = np.diff(store.offsets) * store.flagged
        self.mask_begins = np.concatenate([[0], np.cumsum(mask_lengths)])  # in `store.learnt`

    @cached_property
    def made_of(self) -> str:
        """SHA-256 of what the documents were made of, or of the documents themselves."""
        if self.store.made_of:
            return self.store.made_of
        content = hashlib.sha256()
        for array in (self.store.offsets, self.store.flagged, self.store.ids, self.store.learnt):
            content.update(np.ascontiguousarray(array).data)
        return content.hexdigest()


class Corpus(Sequence[Example]):
    """Examples in order, each read from its store only when it is asked for.

    `lengths` and `learnt` are int64 arrays with a number an example: its tokens, and those of them
    that bear loss. `parts` are the sources they came from, `refused` the lines left out.
    """

    def __init__(self, examples: Sequence[Example]) -> None:
        """Copy examples at hand, none of which is cut."""
        sizes = np.array([len(ids) for ids, _ in examples], np.int64)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        total = int(offsets[-1])
        ids = np.fromiter(chain.from_iterable(e.ids for e in examples), np.int64, total)
        learnt = np.fromiter(chain.from_iterable(e.loss_mask for e in examples), np.uint8, total)
        before = np.concatenate([[0], np.cumsum(learnt, dtype=np.int64)])
        after_first = np.minimum(offsets[:-1] + 1, offsets[1:])
        counts = before[offsets[1:]] - before[after_first]
        lines = np.arange(1, len(examples) + 1)
        store = Store(ids, learnt, offsets, lines, counts, np.ones(len(examples), np.bool_), [])
        spans = cut(store, int(sizes.max(initial=2)))[0]
        self._join([Piece("", store, spans)], [Part("", 0, len(examples), 1.0)], [])

    @classmethod
    def of(cls, examples: Sequence[Example]) -> "Corpus":
        """Examples as a corpus, which they may be already."""
        return examples if isinstance(examples, cls) else cls(examples)

    @classmethod
    def joined(
        cls, pieces: Sequence[Piece], parts: Sequence[Part], refused: Sequence[Refused]
    ) -> "Corpus":
        """The examples of several files, one file's after another's."""
        corpus = cls.__new__(cls)
        corpus._join(pieces, parts, refused)
        return corpus

    def _join(
        self, pieces: Sequence[Piece], parts: Sequence[Part], refused: Sequence[Refused]
    ) -> None:
        self.lengths = np.concatenate([piece.spans.lengths for piece in pieces])
        self.learnt = np.concatenate([piece.spans.learnt for piece in pieces])
        self.parts, self.refused = list(parts), list(refused)
        self._pieces = list(pieces)
        counts = [len(piece.spans.lengths) for piece in pieces]
        self._firsts = list(accumulate(counts, initial=0))[:-1]

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        piece, at = self._find(index)
        store, spans = piece.store, piece.spans
        begin, length, document = spans.begins[at], spans.lengths[at], spans.documents[at]
        ids = store.ids[begin : begin + length]
        if not store.flagged[document]:
            mask = np.ones(length, np.uint8)
            mask[:1] = 0
            return Example(ids, mask)
        begin = piece.mask_begins[document]
        return Example(ids, store.learnt[begin : begin + length])

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))

    def place(self, index: int) -> str:
        """Where an example was read, as "file:line"."""
        piece, at = self._find(index)
        line = piece.store.lines[piece.spans.documents[at]]
        return f"{piece.path}:{line}" if line else piece.path

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what the examples and their order depend on: files, lengths and weights.

        Names of files are not among it: one that is moved is the same.
        """
        parts = [(part.first, part.count, float(part.weight)) for part in self.parts]
        about = repr((parts, [piece.made_of for piece in self._pieces]))
        return hashlib.sha256(about.encode() + self.lengths.tobytes()).hexdigest()

    def _find(self, index: int) -> tuple[Piece, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        index %= len(self)
        number = bisect.bisect_right(self._firsts, index) - 1
        return self._pieces[number], index - self._firsts[number]

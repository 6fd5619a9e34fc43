"""How a message is cut into chunks, and where each chunk lies in the mailboxes.

A gather's chunk fills a half, for all peers to read. A reduction's is one lane of it: each peer has
a lane, with the rows that it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from .mailbox import Mailboxes


@dataclass(frozen=True, eq=False)
class Cut:
    """What of each slot lies in one chunk of a piece. Told apart by identity, so as to be a key."""

    start: int
    stop: int
    sizes: tuple[int, ...]
    """Elements of each span, in order."""
    spans: tuple[tuple[int, int, int], ...]
    """(slot, start, stop) inside the slot."""
    is_whole: bool
    """Whether the chunk is the whole piece."""


@lru_cache(maxsize=4096)
def cuts(slots: tuple[int, ...], capacity: int) -> tuple[Cut, ...]:
    """Cut a piece, slots side by side, into chunks of at most `capacity` elements."""
    result, total = [], sum(slots)
    for first in range(0, total, capacity):
        last, spans, position = min(total, first + capacity), [], 0
        for index, slot in enumerate(slots):
            start, stop = max(first, position), min(last, position + slot)
            if start < stop:
                spans.append((index, start - position, stop - position))
            position += slot
        sizes = tuple(stop - start for _, start, stop in spans)
        result.append(Cut(first, last, sizes, tuple(spans), last - first == total))
    return tuple(result)


class Lanes:
    """Where chunks lie in the mailboxes of a group."""

    def __init__(self, mailboxes: Mailboxes) -> None:
        self.mailboxes = mailboxes
        self.lane_bytes = mailboxes.half_bytes // (mailboxes.size - 1) // 16 * 16
        self._divisors: dict[torch.dtype, torch.Tensor] = {}
        self._views: dict[Any, tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = {}

    def divisor(self, dtype: torch.dtype) -> torch.Tensor:
        """The number of ranks, 0-d: of a plain number torch would make one at each division."""
        if dtype not in self._divisors:
            with torch.inference_mode(False):
                self._divisors[dtype] = torch.tensor(self.mailboxes.size, dtype=dtype)
        return self._divisors[dtype]

    def of(
        self, rank: int, half: int, lane: int, cut: Cut, dtype: torch.dtype
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """A chunk in a lane of `rank`'s half: flat, and by spans.

        Kept for pieces of one chunk: small units spend more on making views than on copying.
        """
        key = (rank, half, lane, cut, dtype)
        found = self._views.get(key)
        if found is None:
            start, nbytes = lane * self.lane_bytes, (cut.stop - cut.start) * dtype.itemsize
            with torch.inference_mode(False):  # what is kept is used in training too
                flat = self.mailboxes.half(rank, half)[start : start + nbytes].view(dtype)
                found = flat, torch.split_with_sizes(flat, cut.sizes)
            if cut.is_whole:
                self._views[key] = found
        return found

    def exchange(
        self,
        chunks: Sequence[Cut],
        number: int,
        write: Callable[[Cut, int], None],
        read: Callable[[Cut, int], None],
    ) -> None:
        """Write and read every chunk, one ahead of the peers' reading."""
        mailboxes = self.mailboxes
        for index in range(len(chunks) + 1):
            if index < len(chunks):
                write(chunks[index], mailboxes.write())
                mailboxes.publish(number)
            if index > 0:
                read(chunks[index - 1], mailboxes.read(number))
                mailboxes.release()

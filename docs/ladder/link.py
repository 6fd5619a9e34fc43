"""Messages between ranks, over plain `isend` and `irecv`, on a line whose speed is pretended.

torch.distributed has both collectives ready-made. They are written out here so that every byte they
hold is in view, so that sums are taken in one known order, and so that messages can be slowed: on
one machine they would be there at once, and no rung could show that it hides them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_isend, _irecv = dist.isend, dist.irecv


class Message:
    """A message under way."""

    def __init__(self, works: list[Any], sent: object, finish: Callable[[], Tensor]) -> None:
        self._works, self._sent, self._finish = works, sent, finish

    def wait(self) -> Tensor:
        """What has arrived."""
        for work in self._works:
            work.wait()
        return self._finish()


class Link:
    """This rank's line to all others.

    mbit_per_second: what the line is pretended to carry to this rank, one message after the other;
        0 for as fast as the machine is.
    """

    def __init__(self, mbit_per_second: float = 0) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.sent_bytes, self.waited_seconds = 0, 0.0
        self._seconds_a_byte = 8 / (mbit_per_second * 1e6) if mbit_per_second else 0.0
        self._free_at = 0.0

    def all_gather(self, shard: Tensor) -> Message:
        """Start sending `shard`, (numel,), to all; every rank's arrives as (world size, numel)."""
        gathered = torch.empty(self.world_size, *shard.shape, dtype=shard.dtype)
        gathered[self.rank] = shard
        works = self._exchange([shard] * self.world_size, gathered)
        return Message(works, shard, lambda: gathered)

    def reduce_scatter(self, message: Tensor) -> Message:
        """Start sending row r of `message`, (world size, numel), to rank r; the sum of what all
        send to this rank arrives as (numel,)."""
        pieces = [torch.empty_like(row) if r != self.rank else row for r, row in enumerate(message)]
        works = self._exchange(message, pieces)
        return Message(works, message, lambda: self._sum(pieces))

    def _sum(self, pieces: list[Tensor]) -> Tensor:
        """Ranks counted down from the one before this, this one last: so a ring adds, gloo's too
        (where a row has an even number of elements and the message less than 2 MiB a rank)."""
        total, *rest = [pieces[self.rank - back] for back in range(1, self.world_size + 1)]
        for piece in rest:
            total += piece
        return total

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[Any]:
        works = []
        for distance in range(1, self.world_size):
            source, target = self.rank - distance, self.rank + distance
            source, target = source % self.world_size, target % self.world_size
            works.append(self.irecv(incoming[source], src=source))
            works.append(self.isend(outgoing[target], dst=target))
        return works

    def isend(self, tensor: Tensor, *args: Any, **to: Any) -> Any:
        self.sent_bytes += tensor.nbytes
        return _isend(tensor, *args, **to)

    def irecv(self, tensor: Tensor, *args: Any, **origin: Any) -> Arrival:
        began = max(time.perf_counter(), self._free_at)
        self._free_at = began + tensor.nbytes * self._seconds_a_byte
        return Arrival(_irecv(tensor, *args, **origin), self._free_at, self)

    @contextmanager
    def carries_all(self) -> Iterator[None]:
        """Whatever calls `dist.isend` and `dist.irecv` meanwhile uses this line."""
        dist.isend, dist.irecv = self.isend, self.irecv
        try:
            yield
        finally:
            dist.isend, dist.irecv = _isend, _irecv


class Arrival:
    """A piece that is there once it has really come and its time on the line is over."""

    def __init__(self, work: Any, due: float, link: Link) -> None:
        self._work, self._due, self._link = work, due, link

    def wait(self) -> None:
        began = time.perf_counter()
        self._work.wait()
        time.sleep(max(0.0, self._due - time.perf_counter()))
        self._link.waited_seconds += time.perf_counter() - began

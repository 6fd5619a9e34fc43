"""What every collective that goes through a packed message shares: buffers, copy-in, copy-out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

_ALIGNMENT = 16  # bytes, between parts of different dtypes


@dataclass(frozen=True)
class Peers:
    """The ranks one message travels between."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Peers:
        return cls(group, dist.get_rank(group), dist.get_world_size(group))


class Part(Protocol):
    """Parameters of one dtype that travel side by side in a unit's message."""

    message_dtype: torch.dtype
    slots: tuple[int, ...]  # elements of each parameter's slot

    def source(self) -> torch.Tensor:
        """This rank's flat rows, (piece_numel,), in any dtype and on any device."""


class Pool:
    """Byte buffers that are leased and given back, because fresh CPU pages are slow to touch.

    On accelerators the caching allocator does this already, so buffers come from it.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def lease(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """A uint8 tensor of exactly `nbytes`, holding anything."""
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        fitting = [b for b in self._free if nbytes <= b.untyped_storage().nbytes() <= 2 * nbytes]
        if not fitting:
            return torch.empty(nbytes, dtype=torch.uint8)
        best = min(fitting, key=lambda b: b.untyped_storage().nbytes())
        self._free = [b for b in self._free if b is not best]
        return torch.empty(0, dtype=torch.uint8).set_(best.untyped_storage(), 0, (nbytes,))

    def give_back(self, buffer: torch.Tensor) -> None:
        if buffer.device.type == "cpu":
            self._free.append(buffer)


class Work(Protocol):
    def wait(self) -> object: ...


class PackedGather:
    """An all-gather under way: every rank's piece lands in one (world_size, bytes) message."""

    def __init__(self, parts: Sequence[Part], peers: Peers, device: torch.device, pool: Pool):
        self._pool = pool
        self._places: list[tuple[Part, int, int]] = []
        end = 0
        for part in parts:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + sum(part.slots) * part.message_dtype.itemsize
            self._places.append((part, start, end))
        if len(parts) > 1:  # so that every rank's row is aligned for every part
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = end * peers.size
        self._buffer = pool.lease(self.nbytes, device)
        self.message = self._buffer.view(peers.size, end)
        self.works: list[Work] = []
        if not self.nbytes:
            return  # there is nothing to view as a dtype
        for part, start, stop in self._places:
            slot = self.message[peers.rank, start:stop].view(part.message_dtype)
            slot.copy_(part.source(), non_blocking=True)

    def wait(self, outputs: Sequence[Sequence[torch.Tensor]]) -> None:
        """Copy what arrived into `outputs`: for each part, a (world_size, slot) a parameter."""
        self.finish()
        places = self._places if self.nbytes else []
        for (part, start, stop), outs in zip(places, outputs, strict=bool(places)):
            columns = self.message[:, start:stop].view(part.message_dtype)
            torch.split_with_sizes_copy(columns, list(part.slots), dim=1, out=list(outs))
        self.discard()

    def finish(self) -> None:
        """Block until the message is complete, in and out."""
        for work in self.works:
            work.wait()
        self.works = []

    def discard(self) -> None:
        """Give the buffer back. The message must be complete."""
        self._pool.give_back(self._buffer)
        del self._buffer, self.message


class PackedReduction:
    """A reduce-scatter that is being filled (`message`), then under way, then waited for."""

    def __init__(self, numel: int, dtype: torch.dtype, peers: Peers, device: torch.device, pool):
        self.numel, self.dtype, self.peers, self._pool = numel, dtype, peers, pool
        self.nbytes = numel * peers.size * dtype.itemsize
        self._buffer = pool.lease(self.nbytes, device)
        self.message = self._buffer.view(dtype).view(peers.size, numel)
        """(world_size, numel): row r is what rank r will own. The caller writes every element."""

    def start(self, average: bool) -> None:
        """Send the filled message on its way; the mean over ranks if `average`, else the sum."""
        raise NotImplementedError

    def wait(self) -> torch.Tensor:
        """This rank's reduced piece, (numel,), in a tensor of its own."""
        raise NotImplementedError

    def discard(self) -> None:
        """Give the message buffer back."""
        self._pool.give_back(self._buffer)
        del self._buffer, self.message

"""What every collective that goes through a packed message shares: buffers, copy-in, copy-out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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
    number: int  # of the unit, the same on all ranks

    def source(self) -> torch.Tensor:
        """This rank's flat rows, (piece_numel,), in any dtype and on any device."""

    def copy_into(self, slot: torch.Tensor) -> None:
        """Write them into `slot`, (piece_numel,), in the message's dtype and on its device."""


class Gradients(NamedTuple):
    """A unit's whole gradients, on their way to the ranks that own their rows."""

    full: list[torch.Tensor]
    """Each flat, (numel,). The list is emptied once they have been read, to free them."""
    slots: tuple[int, ...]
    """Elements of each one's slot in a rank's piece, padding included."""
    dtype: torch.dtype
    """What they are reduced in."""
    factor: float = 1.0
    """They are multiplied by it before they are added,"""
    divisor: float = 1.0
    """or divided by this."""
    average: bool = False
    """Whether the sum is divided by the number of ranks."""
    number: int = 0
    """The unit's, the same on all ranks."""

    def scale(self, message: torch.Tensor) -> None:
        """What is due before the sum, on any part of the message."""
        if self.divisor != 1:
            message.div_(self.divisor)
        if self.factor != 1:
            message.mul_(self.factor)


def place_rows(columns: torch.Tensor, rows: torch.Tensor) -> None:
    """Write a flat gradient (numel,) into its (world_size, slot) columns, zeros where rows end."""
    slot = columns.shape[1]
    if slot == 0:
        return
    whole, rest = divmod(rows.numel(), slot)
    if whole:
        columns[:whole].copy_(rows[: whole * slot].view(whole, slot))
    if whole < len(columns):
        columns[whole, :rest].copy_(rows[whole * slot :])
        columns[whole, rest:].zero_()
        columns[whole + 1 :].zero_()


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

    def nbytes(self) -> int:
        """Of the buffers that nobody has leased."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._free)

    def give_back(self, buffer: torch.Tensor) -> None:
        if buffer.device.type == "cpu":
            self._free.append(buffer)


class Work(Protocol):
    def wait(self) -> object: ...


class PackedGather:
    """An all-gather under way: every rank's piece lands in one (world_size, bytes) message."""

    is_deferred = False

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
        self.nbytes = self.held = end * peers.size
        self._buffer = pool.lease(self.nbytes, device)
        self.message = self._buffer.view(peers.size, end)
        self.works: list[Work] = []
        if not self.nbytes:
            return  # there is nothing to view as a dtype
        for part, start, stop in self._places:
            part.copy_into(self.message[peers.rank, start:stop].view(part.message_dtype))

    def wait(self, outputs: Sequence[Sequence[Sequence[torch.Tensor]]]) -> None:
        """Copy what arrived into `outputs`: for each part and rank, one (slot,) a parameter."""
        self.finish()
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        places = self._places if self.nbytes else []
        for (part, start, stop), of_ranks in zip(places, outputs, strict=bool(places)):
            columns = self.message[:, start:stop].view(part.message_dtype)
            for piece, slots in zip(columns, of_ranks, strict=True):
                sources += torch.split_with_sizes(piece, part.slots)
                targets += slots
        if targets:
            torch._foreach_copy_(targets, sources)
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
    """A reduce-scatter under way, from a packed message of all gradients."""

    is_complete = False

    def __init__(self, grads: Gradients, peers: Peers, device: torch.device, pool: Pool) -> None:
        self.peers, self._pool = peers, pool
        self.average, self.dtype = grads.average, grads.dtype
        self.numel = sum(grads.slots)
        nbytes = self.numel * peers.size * grads.dtype.itemsize
        self.held = nbytes
        self._buffer = pool.lease(nbytes, device)
        self.message = self._buffer.view(grads.dtype).view(peers.size, self.numel)
        """(world_size, numel): row r is what rank r will own."""
        columns = torch.split_with_sizes(self.message, grads.slots, dim=1)
        for index, column in enumerate(columns):
            place_rows(column, grads.full[index])
            grads.full[index] = None  # free it
        grads.full.clear()
        grads.scale(self.message)

    def wait(self) -> torch.Tensor:
        """This rank's reduced piece, (numel,), in a tensor of its own."""
        raise NotImplementedError

    def discard(self) -> None:
        """Give the message buffer back."""
        self._pool.give_back(self._buffer)
        del self._buffer, self.message

"""Collectives through shared memory, for CPU ranks on one host (see `mailbox`).

[Note: nothing is sent ahead]
Between hosts a message sent early hides behind computing, because somebody else carries it. On one
host the ranks' own cores copy it, whenever that is. So a gather only begins when it is waited for:
the parameters of the next unit take no memory before, and a chunk goes from core to core through
the cache. A reduction is over when its start returns.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from . import ring
from .direct import DirectCollectives
from .lanes import Cut, Lanes, cuts
from .mailbox import DifferentHosts, Mailboxes, Unavailable, label
from .packed import Gradients, Part, Peers


class SharedGather:
    """An all-gather that begins when it is waited for."""

    is_deferred = True

    def __init__(self, parts: Sequence[Part], lanes: Lanes) -> None:
        self._parts, self._lanes = parts, lanes
        self._rank, self._size = lanes.mailboxes.rank, lanes.mailboxes.size
        piece_bytes = sum(sum(part.slots) * part.message_dtype.itemsize for part in parts)
        self.nbytes = piece_bytes * self._size
        self.held = 0  # it goes through mailboxes, which are always there

    def wait(self, outputs: Sequence[Sequence[Sequence[torch.Tensor]]]) -> None:
        """Fill `outputs`: for each part and rank, one (slot,) a parameter."""
        for part, of_ranks in zip(self._parts, outputs, strict=True):
            self._gather(part, of_ranks)

    def _gather(self, part: Part, of_ranks: Sequence[Sequence[torch.Tensor]]) -> None:
        dtype, lanes, rank = part.message_dtype, self._lanes, self._rank
        source = part.source()
        chunks = cuts(part.slots, lanes.mailboxes.half_bytes // dtype.itemsize)

        def own(cut: Cut) -> torch.Tensor:
            return source if cut.is_whole else source[cut.start : cut.stop]

        def write(cut: Cut, half: int) -> None:
            lanes.of(rank, half, 0, cut, dtype)[0].copy_(own(cut))

        def read(cut: Cut, half: int) -> None:
            targets = _spans(of_ranks[rank], cut)
            sources = list(torch.split_with_sizes(own(cut), cut.sizes))
            for r in range(self._size):
                if r != rank:
                    targets += _spans(of_ranks[r], cut)
                    sources += lanes.of(r, half, 0, cut, dtype)[1]
            torch._foreach_copy_(targets, sources)

        lanes.exchange(chunks, label("all-gather", part.number, self.nbytes), write, read)

    def finish(self) -> None:
        """Nothing is under way."""

    def discard(self) -> None:
        """Nothing has arrived."""


class SharedReduction:
    """A reduce-scatter, over when it has been made."""

    is_complete = True

    def __init__(self, grads: Gradients, lanes: Lanes) -> None:
        self._grads, self._lanes = grads, lanes
        self._rank, self._size = lanes.mailboxes.rank, lanes.mailboxes.size
        size, itemsize = self._size, grads.dtype.itemsize
        numel = sum(grads.slots)
        self._rows = [
            _rows_by_rank(grad, slot, size)
            for grad, slot in zip(grads.full, grads.slots, strict=True)
        ]
        self._output = torch.empty(numel, dtype=grads.dtype)
        self.held = self._output.nbytes
        number = label("reduce-scatter", grads.number, numel * size * itemsize)
        chunks = cuts(grads.slots, lanes.lane_bytes // itemsize)
        lanes.exchange(chunks, number, self._write, self._read)
        grads.full.clear()
        del self._rows, self._lanes

    def wait(self) -> torch.Tensor:
        """This rank's reduced piece, (numel,), in a tensor of its own."""
        return self._output

    def _lane(self, owner: int, half: int, reader: int, cut: Cut):
        """`owner`'s chunk for `reader`."""
        lane = reader - (reader > owner)
        return self._lanes.of(owner, half, lane, cut, self._grads.dtype)

    def _write(self, cut: Cut, half: int) -> None:
        rank = self._rank
        for reader in range(self._size):
            if reader != rank:
                self._place(cut, reader, *self._lane(rank, half, reader, cut))

    def _place(
        self, cut: Cut, rank: int, target: torch.Tensor, views: Sequence[torch.Tensor]
    ) -> None:
        """Write what `rank` owns of the gradients, scaled, zeros where rows end."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for view, (index, start, stop) in zip(views, cut.spans, strict=True):
            rows = self._rows[index][rank]
            there = max(start, min(stop, rows.numel()))
            if there < stop:
                view[there - start :].zero_()
                view = view[: there - start]
            if start < there:
                targets.append(view)
                sources.append(rows if there - start == rows.numel() else rows[start:there])
        if targets:
            torch._foreach_copy_(targets, sources)
        self._grads.scale(target)

    def _read(self, cut: Cut, half: int) -> None:
        """Add the peers' rows to this rank's, in gloo's order."""
        size, rank = self._size, self._rank
        mine = self._output if cut.is_whole else self._output[cut.start : cut.stop]
        self._place(cut, rank, mine, torch.split_with_sizes(mine, cut.sizes))
        lanes = [mine if r == rank else self._lane(r, half, rank, cut)[0] for r in range(size)]
        if size == 2:  # both orders round alike
            mine.add_(lanes[1 - rank])
        else:
            numel, itemsize = self._output.numel(), self._grads.dtype.itemsize
            for start, stop, owner in ring.spans(numel, size, itemsize, rank):
                first, last = max(start, cut.start) - cut.start, min(stop, cut.stop) - cut.start
                if first < last:
                    values = [lane[first:last] for lane in lanes]
                    order = ring.summation_order(owner, size)
                    _add_up(values, rank, order, self._scratch(last - first))
        if self._grads.average:
            mine.div_(self._lanes.divisor(self._grads.dtype))

    def _scratch(self, numel: int) -> torch.Tensor:
        dtype = self._grads.dtype
        return self._lanes.mailboxes.scratch[: numel * dtype.itemsize].view(dtype)


def _rows_by_rank(grad: torch.Tensor, slot: int, size: int) -> Sequence[torch.Tensor]:
    """A flat gradient's rows by the rank that owns them; fewer or none on the last ranks."""
    if grad.numel() == slot * size and slot:
        return grad.view(size, slot).unbind()
    rows = grad.split(slot) if slot else ()
    return (*rows, *[grad[:0]] * (size - len(rows)))


def _spans(slots: Sequence[torch.Tensor], cut: Cut) -> list[torch.Tensor]:
    if cut.is_whole and len(slots) == len(cut.spans):
        return list(slots)
    return [
        slots[index] if stop - start == slots[index].numel() else slots[index][start:stop]
        for index, start, stop in cut.spans
    ]


def _add_up(
    values: Sequence[torch.Tensor], rank: int, order: Sequence[int], scratch: torch.Tensor
) -> None:
    """Add all values in `order` into `values[rank]`."""
    mine, at = values[rank], order.index(rank)
    if at < 2:
        mine.add_(values[order[1 - at]])
        later = order[2:]
    else:
        torch.add(values[order[0]], values[order[1]], out=scratch)
        for r in order[2:at]:
            scratch.add_(values[r])
        torch.add(scratch, mine, out=mine)
        later = order[at + 1 :]
    for r in later:
        mine.add_(values[r])


class SharedCollectives:
    """Mailboxes in shared memory; *direct* for groups that cannot have them."""

    name = "shared"

    def __init__(self, direct: DirectCollectives) -> None:
        self._direct = direct
        self._of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, Lanes | None]
        self._of_group = weakref.WeakKeyDictionary()

    def _lanes(self, peers: Peers) -> Lanes | None:
        """The group's mailboxes, made at its first message; None if it cannot have any."""
        if peers.group not in self._of_group:
            lanes: Lanes | None = None
            try:
                with torch.inference_mode(False):  # the first message may be of an evaluation
                    lanes = Lanes(Mailboxes(peers))
            except DifferentHosts:
                pass
            except Unavailable as why:
                if peers.rank == 0:
                    warnings.warn(
                        f"ranks of one host cannot share memory ({why}), so they send messages "
                        "through sockets, which is slower: make room in it, or choose "
                        'use_collectives("direct")',
                        RuntimeWarning,
                        stacklevel=2,
                    )
            self._of_group[peers.group] = lanes
        return self._of_group[peers.group]

    def mapped_nbytes(self) -> int:
        """Memory mapped for the mailboxes of all groups that this process has used."""
        return sum(lanes.mailboxes.nbytes for lanes in self._of_group.values() if lanes)

    def all_gather(self, parts: Sequence[Part], peers: Peers, device: torch.device):
        """Prepare to gather every rank's `parts`."""
        lanes = self._lanes(peers)
        if lanes is None:
            return self._direct.all_gather(parts, peers, device)
        return SharedGather(parts, lanes)

    def reduce_scatter(self, grads: Gradients, peers: Peers, device: torch.device):
        """Reduce every rank's `grads`."""
        lanes = self._lanes(peers)
        if lanes is None:
            return self._direct.reduce_scatter(grads, peers, device)
        return SharedReduction(grads, lanes)

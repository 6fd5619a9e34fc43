"""The flat shard: one buffer that holds this rank's rows of several parameters side by side.

Beside it, while the unit computes, lies one storage with the parameters in full.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .layout import PieceLayout, RowLayout
from .offload import bring_up
from .pages import prefer_huge
from .param import ShardedParam

_ALIGNMENT = 64  # bytes, between full parameters: what torch's allocators give each tensor


class FlatShard:
    """Rows of parameters of one dtype, in slots of equal size on every rank (see `layout`).

    It is what `collectives` calls a part: it knows what it sends and in which dtype.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        layouts: Sequence[RowLayout],
        rank: int,
        message_dtype: torch.dtype,
        staged: bool = False,
    ) -> None:
        self.params = list(params)
        self.layouts = list(layouts)
        self.rank = rank
        self.message_dtype = message_dtype
        self.staged = staged
        self.number = 0
        self.piece = PieceLayout.of(layouts)
        self.slots = self.piece.slots
        self.flat: torch.Tensor | None = None
        self.full: torch.Tensor | None = None
        """All parameters in full, flat; None before the first unshard, or if the shard is whole."""
        self._full_slots: list[tuple[torch.Tensor, ...]] = []

    def source(self) -> torch.Tensor:
        """This rank's piece, (numel,), as it is kept."""
        return self.flat

    def copy_into(self, slot: torch.Tensor) -> None:
        """Write this rank's piece into its `slot` of a message, in the message's dtype."""
        if self.staged and (self.flat.dtype != slot.dtype or not self.flat.is_pinned()):
            bring_up(self.flat, slot)
        else:
            slot.copy_(self.flat, non_blocking=True)

    def fill(self, rows: Sequence[torch.Tensor], device: torch.device, pinned: bool) -> None:
        """Allocate the buffer on `device` and copy each parameter's local rows into its slot."""
        dtype = rows[0].dtype
        self.flat = torch.zeros(self.piece.numel, dtype=dtype, device=device, pin_memory=pinned)
        if not self.flat.is_meta:
            for view, local in zip(self.views(), rows, strict=True):
                view.copy_(local)

    def views(self) -> list[torch.Tensor]:
        """Each parameter's local rows, (rows here, *shape[1:]), inside the shard.

        Each has a storage object of its own, a slice of the shard's memory: saving or copying one
        then takes its own bytes alone, and torch can pickle it (it cannot pickle a DTensor whose
        rows begin in the middle of a storage).
        """
        views = []
        for param, layout, start in zip(self.params, self.layouts, self.piece.offsets, strict=True):
            shape = (len(layout.rows_of(self.rank)), *param.shape[1:])
            stop = start + layout.numel_of(self.rank)
            if self.flat.is_meta or start == stop:
                views.append(self.flat[start:stop].view(shape))
                continue
            size = self.flat.element_size()
            memory = self.flat.untyped_storage()[start * size : stop * size]
            views.append(self.flat.new_empty(0).set_(memory).view(shape))
        return views

    # Full parameters

    def make_full(self, device: torch.device) -> None:
        """Create the full parameters; the storage under them holds nothing yet."""
        step = max(1, _ALIGNMENT // self.message_dtype.itemsize)
        starts, end = [], 0
        for layout in self.layouts:
            starts.append(end)
            end += -(-layout.padded_numel // step) * step
        self.full = torch.empty(end, dtype=self.message_dtype, device=device)
        for param, layout, start in zip(self.params, self.layouts, starts, strict=True):
            param.padded = self.full[start : start + layout.padded_numel]
            param.make_unsharded(self.full, start)
        self._full_nbytes = self.full.nbytes
        prefer_huge(self.full.untyped_storage())
        self._full_slots = self.full_slots()

    def full_slots(self) -> list[tuple[torch.Tensor, ...]]:
        """For each rank, where its slot of every parameter lies in the full ones."""
        if self._full_slots:
            return self._full_slots
        slots = [p.slots(layout) for p, layout in zip(self.params, self.layouts, strict=True)]
        return list(zip(*slots, strict=True))

    def grow_full(self) -> None:
        """Give the full parameters memory, if they have none."""
        storage = self.full.untyped_storage()
        if storage.nbytes() != self._full_nbytes:
            storage.resize_(self._full_nbytes)
            prefer_huge(storage)

    def free_full(self) -> None:
        """Take the full parameters' memory. Harmless when it is gone, or is the shard's."""
        if self.full is not None:
            self.full.untyped_storage().resize_(0)

    def forget_full(self) -> None:
        """Drop the full parameters for good, because the shard was moved, cast or replaced."""
        self.free_full()
        for param in self.params:
            param.forget_unsharded()

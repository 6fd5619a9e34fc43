"""The flat shard: one buffer that holds this rank's rows of several parameters side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .layout import PieceLayout, RowLayout
from .param import ShardedParam


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
    ) -> None:
        self.params = list(params)
        self.layouts = list(layouts)
        self.rank = rank
        self.message_dtype = message_dtype
        self.piece = PieceLayout.of(layouts)
        self.slots = self.piece.slots
        self.flat: torch.Tensor | None = None

    def source(self) -> torch.Tensor:
        """This rank's piece, (numel,), as it is kept."""
        return self.flat

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

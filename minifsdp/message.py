"""The messages of one rank, which go nowhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .collectives import Gradients
from .flat import FlatShard


class LocalGather:
    """The gather of a unit on one rank: nothing travels, rows are copied (cast) at most."""

    nbytes = held = 0
    is_deferred = False

    def __init__(self, parts: Sequence[FlatShard]) -> None:
        self._parts = parts

    def wait(self, outputs: Sequence[Sequence[Sequence[torch.Tensor]]]) -> None:
        for part, of_ranks in zip(self._parts, outputs, strict=True):
            piece = part.source()
            if part.staged or piece.device != part.full.device:  # offloaded: it goes up in one
                piece = torch.empty_like(piece, dtype=part.message_dtype, device=part.full.device)
                part.copy_into(piece)
            torch._foreach_copy_(of_ranks[0], piece.split(part.slots))

    def finish(self) -> None: ...

    def discard(self) -> None: ...


class LocalReduction:
    """The reduction of a unit on one rank: its gradients, scaled, side by side."""

    is_complete = True

    def __init__(self, grads: Gradients, device: torch.device) -> None:
        self._output = torch.empty(sum(grads.slots), dtype=grads.dtype, device=device)
        self.held = self._output.nbytes
        torch._foreach_copy_(self._output.split(grads.slots), grads.full)
        grads.full.clear()
        grads.scale(self._output)

    def wait(self) -> torch.Tensor:
        return self._output

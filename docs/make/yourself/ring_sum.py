"""The order in which ranks' values are added."""

from __future__ import annotations

import torch


def ring_sum(values: list[torch.Tensor], owner: int) -> torch.Tensor:
    """The sum of one tensor of each rank, added as gloo's ring adds what belongs to `owner`.

    The first is that of the rank before the owner, then the one before that, and so on round the
    ring; the owner's own comes last: ((v[o-1] + v[o-2]) + ...) + v[o], indices modulo the number of
    ranks. `values` must be left as they are.
    """
    raise NotImplementedError

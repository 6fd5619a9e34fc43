"""This rank's rows of a parameter or gradient, however an engine holds it."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard

from ..layout import RowLayout
from .observation import copy_of


def own_rows(
    tensor: torch.Tensor, shape: tuple[int, ...], rank: int, world_size: int, what: str
) -> tuple[torch.Tensor, int]:
    """A copy of rows `rank` has by dim-0 `torch.chunk`, and the number of the first.

    tensor: a DTensor, of which all ranks call (it may be gathered), or of the whole `shape`.
    Raises ValueError, naming `what`, for a tensor of another shape.
    """
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{what} has shape {tuple(tensor.shape)} and was built with {shape}: an engine whose "
            "parameters are neither DTensors nor whole overrides Engine.tensors"
        )
    mine = RowLayout(shape[0] if shape else 1, 1, world_size).rows_of(rank)
    if isinstance(tensor, DTensor):
        by_rows = tensor.device_mesh.ndim == 1 and tensor.placements == (Shard(0),)
        if by_rows and tensor.device_mesh.size() == world_size:
            return copy_of(tensor.to_local()), mine.start
        tensor = tensor.full_tensor()
    if not shape:
        return copy_of(tensor).view(1), 0
    return copy_of(tensor[mine.start : mine.stop]), mine.start

"""A whole gradient, written into the message that brings each rank its rows."""

from __future__ import annotations

import torch


def place_rows(columns: torch.Tensor, rows: torch.Tensor) -> None:
    """Write the flat gradient `rows`, (numel,), into `columns`, (world_size, slot).

    columns: a parameter's slot in each rank's piece of the message, holding anything. Rank 0's slot
        takes the first elements, and so on. The gradient may end anywhere: behind its end there
        must be zeros in each slot. A slot may have no elements.
    """
    raise NotImplementedError

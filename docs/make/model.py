"""The model of the guide: four blocks and a head, small enough to be printed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minifsdp import fully_shard


class Block(nn.Module):
    """Up, a nonlinearity, down, added to what came in."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Blocks, and a head that is the root's own."""

    def __init__(self, dim: int = 4, hidden: int = 7, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(dim, hidden) for _ in range(blocks)])
        self.head = nn.Linear(dim, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shard(model: Model, **settings: Any) -> Model:
    """Each block a unit, and the root the rest."""
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def build(**settings: Any) -> Model:
    """The guide's model, sharded; equal on all ranks."""
    torch.manual_seed(0)
    return shard(Model(), **settings)


def batch(seed: int = 0, dim: int = 4) -> torch.Tensor:
    """Three rows of input."""
    return torch.randn(3, dim, generator=torch.Generator().manual_seed(seed))

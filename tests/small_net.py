"""A small model that tests shard, and its gradients computed without sharding."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn

import minifsdp


class Net(nn.Module):
    """Two linear blocks and a head."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(dim, dim), nn.Linear(dim, dim)])
        self.head = nn.Linear(dim, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def build(engine: ModuleType = minifsdp, **settings) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        engine.fully_shard(block, **settings)
    return engine.fully_shard(model, **settings)


def data(step: int = 0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def whole_gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.full_tensor() for p in model.parameters()]


def reference_gradients(steps: int = 1) -> list[torch.Tensor]:
    """The mean over ranks of a plain model's gradients, summed over `steps` micro-batches."""
    torch.manual_seed(0)
    model = Net()
    for step in range(steps):
        model(data(step)).square().mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return [p.grad for p in model.parameters()]

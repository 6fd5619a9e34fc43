"""A small model whose messages are easy to count: a root with layers of its own, three blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

import minifsdp
from minifsdp import events

DIM = 6
NAMES = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR"}


class Block(nn.Module):
    """A residual block of two linear layers, with 7 rows and 6."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 7)
        self.down = nn.Linear(7, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """`front`, three blocks, `back`: the first and last layers are the root's own."""

    def __init__(self, make_block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.front = nn.Linear(3, DIM)
        self.layers = nn.ModuleList(make_block() for _ in range(3))
        self.back = nn.Linear(DIM, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.front(x)
        for layer in self.layers:
            x = layer(x)
        return self.back(x)


def build(make_block: Callable[[], nn.Module] = Block, seed: int = 0) -> Stack:
    """A stack with the same numbers on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Stack(make_block)


def shard(model: Stack, engine: ModuleType = minifsdp, **settings: Any) -> Stack:
    """Each block a unit, and the root the rest."""
    for layer in model.layers:
        engine.fully_shard(layer, **settings)
    return engine.fully_shard(model, **settings)


def batch(seed: int = 0) -> torch.Tensor:
    """Inputs (5, 3); the same on every rank that asks for the same seed."""
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, seed: int = 0) -> torch.Tensor:
    """Forward and backward on `batch(seed)`; returns the loss."""
    loss = model(batch(seed)).float().square().mean()
    loss.backward()
    return loss.detach()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows, or the tensor itself if it is not sharded."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All rows of a sharded tensor, on every rank, or the tensor itself if it is not sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(model: nn.Module, steps: int = 3, seed: int = 0) -> list[torch.Tensor]:
    """Losses, then this rank's rows of gradients and parameters, of every step with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for i in range(steps):
        seen.append(step(model, seed + i))
        seen += [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        seen += [local(p).clone() for p in model.parameters()]
    return seen


def same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal in number, dtypes, shapes and bits."""
    return len(a) == len(b) and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


@contextmanager
def messages() -> Iterator[list[str]]:
    """Lists what is sent inside the block, as "AG root", "RS layers.0"."""
    seen: list[str] = []

    def note(event: events.Event) -> None:
        if event.kind in NAMES:
            seen.append(f"{NAMES[event.kind]} {event.unit}")

    with events.listening(note):
        yield seen

"""What every rung trains: six equal blocks that learn to sort random points into classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS, DIM, HIDDEN = 6, 384, 768
BATCH = 192  # points a rank and step
BLOCK_NUMEL = 2 * DIM * HIDDEN + DIM + HIDDEN


class Block(nn.Module):
    """x + down(relu(up(x))), (points, DIM) to (points, DIM)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


def build() -> list[Block]:
    """The blocks, the same on every rank."""
    torch.manual_seed(0)
    return [Block() for _ in range(BLOCKS)]


def batches(rank: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each step this rank's points, (BATCH, DIM), and their classes, (BATCH,): which of a
    point's first eight coordinates is the largest."""
    random = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        x = torch.randn(BATCH, DIM, generator=random)
        yield x, x[:, :8].argmax(dim=1)


def loss_of(scores: Tensor, target: Tensor) -> Tensor:
    """These points' share of the mean cross-entropy over BATCH points, 0-d, float32."""
    return F.cross_entropy(scores.float(), target, reduction="sum") / BATCH


class Ending(NamedTuple):
    """Where forward turns into backward."""

    loss: Tensor  # 0-d, float32
    grad: Tensor  # d loss / d scores, in their shape and dtype


def turn(scores: Tensor, target: Tensor) -> Ending:
    """The loss of the last unit's output, and the gradient that backward begins with."""
    scores = scores.detach().requires_grad_()
    loss = loss_of(scores, target)
    (grad,) = torch.autograd.grad(loss, scores)
    return Ending(loss.detach(), grad)

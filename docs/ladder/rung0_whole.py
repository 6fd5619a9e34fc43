"""Rung 0: every rank holds the whole model; the mean of all ranks' gradients travels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from link import Link
from task import batches, build, turn
from torch import Tensor, nn
from trial import Seen, run


class Unit:
    """One module and its parameters, whose gradients travel in one message."""

    def __init__(self, module: nn.Module, link: Link) -> None:
        self.link, self.module = link, module
        self.whole = dict(module.named_parameters())

    def forward(self, x: Tensor) -> Tensor:
        self.x = x.detach().requires_grad_()
        self.y = self.module(self.x)
        return self.y.detach()

    def backward(self, grad_y: Tensor) -> Tensor:
        inputs = [self.x, *self.whole.values()]
        grad_x, *self.grads = torch.autograd.grad(self.y, inputs, grad_y)
        del self.x, self.y
        return grad_x

    def reduce(self) -> None:
        """An all-reduce: each rank sums its rows of every gradient, then all gather the sums."""
        world_size = self.link.world_size
        message = torch.cat([grad.view(world_size, -1) for grad in self.grads], dim=1)
        del self.grads
        mean = self.link.reduce_scatter(message).wait() / world_size
        gathered = self.link.all_gather(mean).wait()
        numels = [param.numel() // world_size for param in self.whole.values()]
        for param, columns in zip(self.whole.values(), gathered.split(numels, dim=1), strict=True):
            param.grad = columns.reshape(param.shape)


def step(units: list[Unit], x: Tensor, target: Tensor) -> Tensor:
    for unit in units:
        x = unit.forward(x)
    loss, grad = turn(x, target)
    for unit in reversed(units):
        grad = unit.backward(grad)
    for unit in units:
        unit.reduce()
    return loss


def train(link: Link, steps: int) -> Iterator[Seen]:
    units = [Unit(module, link) for module in build()]
    params = [param for unit in units for param in unit.whole.values()]
    optimizer = torch.optim.AdamW(params, lr=3e-4)
    for x, target in batches(link.rank, steps):
        loss = step(units, x, target)
        optimizer.step()
        yield Seen(loss, params)
        optimizer.zero_grad()


if __name__ == "__main__":
    run(train)

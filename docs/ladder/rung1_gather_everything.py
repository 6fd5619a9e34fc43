"""Rung 1: a rank keeps its rows only; all ranks' are gathered before forward, freed after backward.

The all-gather has moved from the gradients to the parameters: as many bytes travel as before.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from link import Link
from task import batches, build, turn
from torch import Tensor, nn
from torch.func import functional_call
from trial import Seen, run


class Unit:
    """One module and its parameters, which travel in one message, as do their gradients.

    whole: all rows of each parameter; their memory is there from `gather` to `free`.
    shard: this rank's rows of all parameters, one after the other.
    rows: the same memory, a parameter for each; what the optimizer steps.
    """

    def __init__(self, module: nn.Module, link: Link) -> None:
        self.link = link
        params = dict(module.named_parameters())
        mine = [p.detach().chunk(link.world_size)[link.rank] for p in params.values()]
        self.numels = [rows.numel() for rows in mine]
        self.shard = torch.cat([rows.flatten() for rows in mine])
        flat_rows = self.shard.split(self.numels)
        self.rows = [nn.Parameter(f.view_as(rows)) for f, rows in zip(flat_rows, mine, strict=True)]
        self.whole = {n: torch.empty_like(p, requires_grad=True) for n, p in params.items()}
        self.free()
        self.module = module.to("meta")  # it lends its forward only

    def gather(self) -> None:
        message = self.link.all_gather(self.shard).wait()
        columns = message.split(self.numels, dim=1)
        for whole, rows in zip(self.whole.values(), columns, strict=True):
            whole.untyped_storage().resize_(whole.nbytes)
            # Filled behind autograd's back (.data), which still refers to it from forward.
            whole.data.view(self.link.world_size, -1).copy_(rows)

    def free(self) -> None:
        for whole in self.whole.values():
            whole.untyped_storage().resize_(0)

    def forward(self, x: Tensor) -> Tensor:
        self.x = x.detach().requires_grad_()
        self.y = functional_call(self.module, self.whole, self.x)
        return self.y.detach()

    def backward(self, grad_y: Tensor) -> Tensor:
        inputs = [self.x, *self.whole.values()]
        grad_x, *self.grads = torch.autograd.grad(self.y, inputs, grad_y)
        del self.x, self.y
        return grad_x

    def reduce(self) -> None:
        """A reduce-scatter: each rank gets the mean of its rows of every gradient."""
        world_size = self.link.world_size
        message = torch.cat([grad.view(world_size, -1) for grad in self.grads], dim=1)
        del self.grads
        mean = self.link.reduce_scatter(message).wait() / world_size
        for rows, grad in zip(self.rows, mean.split(self.numels), strict=True):
            rows.grad = grad.view_as(rows)


def step(units: list[Unit], x: Tensor, target: Tensor) -> Tensor:
    for unit in units:
        unit.gather()
    for unit in units:
        x = unit.forward(x)
    loss, grad = turn(x, target)
    for unit in reversed(units):
        grad = unit.backward(grad)
    for unit in units:
        unit.free()
        unit.reduce()
    return loss


def train(link: Link, steps: int) -> Iterator[Seen]:
    units = [Unit(module, link) for module in build()]
    params = [rows for unit in units for rows in unit.rows]
    optimizer = torch.optim.AdamW(params, lr=3e-4)
    for x, target in batches(link.rank, steps):
        loss = step(units, x, target)
        optimizer.step()
        yield Seen(loss, params)
        optimizer.zero_grad()


if __name__ == "__main__":
    run(train)

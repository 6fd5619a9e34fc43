"""Rung 6: rows, their gradients and the optimizer's moments lie on the host and are stepped there.

The device holds what is on its way or in use. Here both are the same memory, which `host_bytes`
tells apart; a pair of copies stands where a bus would be.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from link import Link
from task import batches, build, turn
from torch import Tensor, nn
from torch.func import functional_call
from trial import Seen, run

DEVICE = "cpu"  # with a GPU each, and over NCCL, it would be "cuda"


class Dtypes(NamedTuple):
    param: torch.dtype  # of parameters under way and in use, and of activations
    reduce: torch.dtype  # of gradients under way


MIXED = Dtypes(torch.bfloat16, torch.float32)


class Unit:
    """One module and its parameters, which travel in one message, as do their gradients.

    whole: all rows of each parameter, in `dtypes.param`; their memory is there from
        `finish_gather` to `free`.
    shard: this rank's rows of all parameters, one after the other, on the host.
    rows: the same memory, a parameter for each; what the optimizer steps.
    shard_grad: gradients of `shard`, on the host too.
    """

    def __init__(self, module: nn.Module, link: Link, dtypes: Dtypes) -> None:
        self.link, self.dtypes = link, dtypes
        params = dict(module.named_parameters())
        mine = [p.detach().chunk(link.world_size)[link.rank] for p in params.values()]
        self.numels = [rows.numel() for rows in mine]
        self.shard = torch.cat([rows.flatten() for rows in mine])
        self.shard_grad = torch.zeros_like(self.shard)
        flat_rows = self.shard.split(self.numels)
        self.rows = [nn.Parameter(f.view_as(rows)) for f, rows in zip(flat_rows, mine, strict=True)]
        like = {"dtype": dtypes.param, "requires_grad": True}
        self.whole = {n: torch.empty_like(p, **like) for n, p in params.items()}
        self.free()
        self.grads: list[Tensor] = []
        self.module = module.to("meta")  # it lends its forward only

    def start_gather(self) -> None:
        up = self.shard.to(DEVICE, self.dtypes.param, copy=True)
        self.gathering = self.link.all_gather(up)

    def finish_gather(self) -> None:
        message = self.gathering.wait()
        del self.gathering
        columns = message.split(self.numels, dim=1)
        for whole, rows in zip(self.whole.values(), columns, strict=True):
            whole.untyped_storage().resize_(whole.nbytes)
            # Filled behind autograd's back (.data), which still refers to it from forward.
            whole.data.view(self.link.world_size, -1).copy_(rows)

    def free(self) -> None:
        for whole in self.whole.values():
            whole.untyped_storage().resize_(0)

    def forward(self, x: Tensor) -> Tensor:
        self.x = x.detach().to(self.dtypes.param).requires_grad_()
        self.y = functional_call(self.module, self.whole, self.x)
        return self.y.detach()

    def backward(self, grad_y: Tensor) -> Tensor:
        inputs = [self.x, *self.whole.values()]
        grad_x, *fresh = torch.autograd.grad(self.y, inputs, grad_y)
        del self.x, self.y
        if self.grads:
            for kept, grad in zip(self.grads, fresh, strict=True):
                kept.add_(grad)
        else:
            self.grads = [grad.to(self.dtypes.reduce) for grad in fresh]
        return grad_x

    def start_reduce(self) -> None:
        """A reduce-scatter: each rank gets the mean of its rows of every gradient."""
        world_size = self.link.world_size
        message = torch.cat([grad.view(world_size, -1) for grad in self.grads], dim=1)
        self.grads = []
        self.reducing = self.link.reduce_scatter(message)

    def finish_reduce(self) -> None:
        down = self.shard_grad.copy_(self.reducing.wait() / self.link.world_size)
        del self.reducing
        for rows, grad in zip(self.rows, down.split(self.numels), strict=True):
            rows.grad = grad.view_as(rows)


def step(units: list[Unit], x: Tensor, target: Tensor, is_last: bool) -> Tensor:
    units[0].start_gather()
    for unit, after in pairwise([*units, None]):
        unit.finish_gather()
        if after:
            after.start_gather()
        x = unit.forward(x)
        unit.free()
    loss, grad = turn(x, target)
    units[-1].start_gather()
    reducing = None
    for unit, before in pairwise([*reversed(units), None]):
        unit.finish_gather()
        if before:
            before.start_gather()
        grad = unit.backward(grad)
        unit.free()
        if not is_last:
            continue
        if reducing:
            reducing.finish_reduce()
        unit.start_reduce()
        reducing = unit
    if reducing:
        reducing.finish_reduce()
    return loss


def train(link: Link, steps: int, dtypes: Dtypes = MIXED, micro_batches: int = 2) -> Iterator[Seen]:
    units = [Unit(module, link, dtypes) for module in build()]
    params = [rows for unit in units for rows in unit.rows]
    host_bytes = 4 * sum(unit.shard.nbytes for unit in units)  # with gradients and two moments
    optimizer = torch.optim.AdamW(params, lr=3e-4)
    for x, target in batches(link.rank, steps):
        loss = torch.zeros(())
        parts = zip(x.chunk(micro_batches), target.chunk(micro_batches), strict=True)
        for at, part in enumerate(parts, start=1):
            loss += step(units, *part, is_last=at == micro_batches)
        optimizer.step()
        yield Seen(loss, params, host_bytes)
        optimizer.zero_grad()


if __name__ == "__main__":
    run(train)

"""Zeros for what gets no gradient: in the dtype of the others, once, and not for frozen ones."""

from __future__ import annotations

import stack
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import MixedPrecisionPolicy, events, fully_shard


class Unused(nn.Module):
    """Three layers: one that odd ranks leave out, one that is frozen, and one that all use."""

    def __init__(self) -> None:
        super().__init__()
        self.seldom, self.frozen, self.used = (nn.Linear(4, 4) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() % 2 == 0:
            x = torch.tanh(self.seldom(x))
        return self.used(x)


def _filled() -> None:
    torch.manual_seed(0)
    model, plain = nn.Sequential(Unused()), nn.Sequential(Unused())
    plain.load_state_dict(model.state_dict())
    fully_shard(model[0], mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    fully_shard(model).set_reduce_scatter_unused_params(True)
    sent: list[events.Event] = []
    x = torch.ones(2, 4, requires_grad=True)  # so that the unit is over before the whole is
    with events.listening(lambda e: sent.append(e) if e.kind == "reduce_scatter" else None):
        model(x).float().sum().backward()
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert [e.nbytes for e in sent] == [2 * numel]  # of bf16, in one message
    assert all(p.grad is None for p in model[0].frozen.parameters())
    plain(x).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if theirs.requires_grad:
            grad = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            dist.all_reduce(grad)
            mean = grad / dist.get_world_size()
            torch.testing.assert_close(stack.whole(ours.grad), mean, rtol=0.05, atol=0.02)


def test_unused_parameters_get_zeros_in_the_dtype_of_the_others_and_frozen_ones_none(run_ranks):
    run_ranks(2, _filled)

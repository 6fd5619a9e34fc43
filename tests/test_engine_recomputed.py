"""Recomputed forwards are told from new ones: they prefetch nothing and cast as the first did."""

from __future__ import annotations

import functools

import pytest
import stack
import torch
from test_stepping_ends import Log
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from minifsdp import MixedPrecisionPolicy, events, fully_shard

GATHERS = ["AG root", "AG layers.0", "AG layers.1", "AG layers.2"]
PREFETCHED = [*GATHERS[:3], "compute layers.0", "AG layers.2"]
PREFETCHED += ["compute layers.1", "compute layers.2"]


class Outside(stack.Stack):
    """Its blocks are recomputed, hooks and all."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.front(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.back(x)


def recomputing(where: str, reentrant: bool) -> stack.Stack:
    torch.manual_seed(0)
    if where == "outside":
        model = Outside()
        model.reentrant = reentrant
    else:
        model = stack.Stack()
        for layer in model.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=reentrant)
    return stack.shard(model)


def _gathered_ahead(where: str, reentrant: bool) -> None:
    model = recomputing(where, reentrant)
    model.set_reshard_after_forward(True, recurse=False)
    for index, layer in enumerate(model.layers):
        layer.up.register_forward_pre_hook(lambda *_, i=index: seen.append(f"compute layers.{i}"))
    seen: list[str] = []
    stack.step(model)
    for _ in range(2):
        with stack.messages() as messages:
            seen = messages
            loss = model(stack.batch()).sum()
            assert messages == PREFETCHED
            loss.backward()
        assert sorted(m for m in messages[len(PREFETCHED) :] if "AG" in m) == sorted(GATHERS)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_recomputation_does_not_disturb_what_is_gathered_ahead(run_ranks, where, reentrant):
    run_ranks(2, _gathered_ahead, where, reentrant)


class Headless(Outside):
    """A root whose own parameters backward does not need."""

    def __init__(self) -> None:
        super().__init__()
        del self.back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.front(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def _left_out_of_backward() -> None:
    model = stack.shard(Headless())
    model.set_reshard_after_forward(True, recurse=False)
    model.set_unshard_in_backward(False)
    for _ in range(2):
        loss = model(stack.batch()).sum()
        with stack.messages() as seen:
            loss.backward()
        assert sorted(m for m in seen if "AG" in m) == GATHERS[1:]


def test_recomputation_does_not_gather_a_root_that_backward_does_not_need(run_ranks):
    run_ranks(2, _left_out_of_backward)


class Both(nn.Module):
    """Two layers side by side, whose outputs both get gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sigmoid(self.left(x)), torch.sigmoid(self.right(x))


class RecomputedPair(nn.Module):
    """Recomputes a unit with two outputs, hooks and all."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Both()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with set_checkpoint_early_stop(False):  # else recomputing ends inside the block
            left, right = checkpoint(self.block, torch.tanh(x), use_reentrant=False)
        return left * right


def _told_of_once() -> tuple[list[str], list[str]]:
    """What listeners hear of the unit in backward, and what a tracer hears all along."""
    model = RecomputedPair()
    fully_shard(model.block)
    fully_shard(model)
    heard: list[str] = []
    events.tracer = log = Log()
    try:
        loss = model(torch.ones(2, 3, requires_grad=True)).sum()
        with events.listening(lambda e: heard.append(e.kind) if e.unit == "block" else None):
            loss.backward()
    finally:
        events.tracer = None
    return heard, [kind for kind in log.kinds if kind.endswith("ward")]


def test_a_recomputed_forward_is_part_of_the_units_one_backward(run_ranks):
    heard = ["all_gather", "unshard", "backward", "reshard", "reduce_scatter", "reduced"]
    once = ["forward", "forward", "end of forward", "end of forward"]  # of the root and the unit
    again = ["backward", "backward", "forward", "end of forward"]
    traced = [*once, *again, "end of backward", "end of backward"]
    assert run_ranks(2, _told_of_once) == [(heard, traced)] * 2


class Cast(nn.Module):
    """Gives its unit inputs that need a cast, and notes in which dtype it gets them."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = nn.Linear(3, 3), reentrant
        self.seen: list[torch.dtype] = []
        self.block.register_forward_pre_hook(lambda _, args: self.seen.append(args[0].dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, torch.tanh(x), use_reentrant=self.reentrant).float()


def _cast_again(reentrant: bool) -> list[torch.dtype]:
    model = Cast(reentrant)
    fully_shard(model.block, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    fully_shard(model)
    model(torch.ones(2, 3, requires_grad=True)).sum().backward()
    return model.seen


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_inputs_are_cast_as_the_first_were(run_ranks, reentrant):
    assert run_ranks(2, _cast_again, reentrant) == [[torch.bfloat16] * 2] * 2

"""Activation checkpointing, inside or outside units, adds no message and changes no bit."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import stack
import torch
from test_engine_schedule import BACKWARD, GATHERS, REDUCTIONS
from torch.utils.checkpoint import checkpoint

import minifsdp


class InnerCheckpoint(stack.Block):
    """Checkpoints its own forward: recomputation happens inside the unit."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class InnerReentrantCheckpoint(InnerCheckpoint):
    reentrant = True


class OuterCheckpoint(stack.Stack):
    """Checkpoints each block from outside: the unit's forward itself runs again."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.front(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.back(x)


class OuterReentrantCheckpoint(OuterCheckpoint):
    reentrant = True


CHECKPOINTED = {
    "inside": partial(stack.Stack, InnerCheckpoint),
    "inside reentrant": partial(stack.Stack, InnerReentrantCheckpoint),
    "outside": OuterCheckpoint,
    "outside reentrant": OuterReentrantCheckpoint,
}


def _checkpointed(kind: str, settings: dict[str, Any]) -> tuple[list[Counter], bool]:
    """Messages of each iteration, and whether all bits equal those without checkpointing."""
    model, without = CHECKPOINTED[kind](), stack.build()
    model.load_state_dict(without.state_dict())
    stack.shard(model, **settings)
    stack.shard(without, **settings)
    counts = []
    for seed in range(3):
        with stack.messages() as seen:
            stack.step(model, seed)
        stack.step(without, seed)
        counts.append(Counter(seen))
    ours, theirs = ([p.grad.to_local() for p in m.parameters()] for m in (model, without))
    return counts, stack.same_bits(ours, theirs)


@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_activation_checkpointing_adds_no_message_and_changes_no_bit(run_ranks, kind):
    expected = Counter(GATHERS + BACKWARD)
    for counts, equal in run_ranks(2, _checkpointed, kind, {}):
        assert counts == [expected] * 3
        assert equal


@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_checkpointing_gathers_nothing_again_that_was_kept_whole(run_ranks, kind):
    expected = Counter(GATHERS + REDUCTIONS)
    for counts, equal in run_ranks(2, _checkpointed, kind, {"reshard_after_forward": False}):
        assert counts == [expected] * 3
        assert equal


def _with_casts(kind: str) -> bool:
    policy = minifsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return _checkpointed(kind, {"mp_policy": policy})[1]


@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_recomputation_casts_as_the_forward_did(run_ranks, kind):
    assert run_ranks(2, _with_casts, kind) == [True, True]

"""torch.compile of each block, before and after sharding, trains to upstream's bits."""

from __future__ import annotations

import functools

import parity
import pytest
import torch
import torch.distributed.fsdp as upstream
from parity import Case, train, unequal
from torch import nn

import minifsdp


def _compiled_differences(case: Case, when: str) -> list[str]:
    shard = parity.shard

    def compiling(model: nn.Module, engine, case: Case) -> nn.Module:
        compile_ = functools.partial(torch.nn.Module.compile, backend="aot_eager")
        if when == "before":
            for block in model.units():
                compile_(block)
        model = shard(model, engine, case)
        if when == "after":
            for block in model.units():
                compile_(block)
        return model

    parity.shard = compiling
    try:
        torch._dynamo.reset()
        ours = train(minifsdp, case, steps=3)
        torch._dynamo.reset()
        return unequal(ours, train(upstream, case, steps=3))
    finally:
        parity.shard = shard


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("precision", ["fp32", "bf16/fp32"])
def test_compiled_blocks_train_to_the_same_bits(run_ranks, when, precision):
    case = Case(precision=precision)
    assert run_ranks(2, _compiled_differences, case, when) == [[], []]

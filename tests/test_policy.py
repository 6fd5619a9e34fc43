"""Policies have upstream's fields, and upstream's objects are accepted in their place."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as upstream

import minifsdp
from minifsdp.policy import as_mixed_precision, as_offload

POLICIES = ["MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"]


@pytest.mark.parametrize("name", POLICIES)
def test_fields_and_defaults_are_upstreams(name):
    def fields(engine):
        return [(f.name, f.default) for f in dataclasses.fields(getattr(engine, name))]

    assert fields(minifsdp) == fields(upstream)


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_frozen_and_compare_by_value(name):
    policy_type = getattr(minifsdp, name)
    assert policy_type() == policy_type()
    assert hash(policy_type()) == hash(policy_type())
    for field in dataclasses.fields(policy_type):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(policy_type(), field.name, None)


def test_upstreams_mixed_precision_becomes_ours_field_by_field():
    theirs = upstream.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        output_dtype=torch.float16,
        cast_forward_inputs=False,
    )
    assert as_mixed_precision(theirs) == minifsdp.MixedPrecisionPolicy(
        torch.bfloat16, torch.float32, torch.float16, False
    )


def test_upstreams_offloading_becomes_ours():
    assert as_offload(upstream.CPUOffloadPolicy(pin_memory=False)) == minifsdp.CPUOffloadPolicy(
        pin_memory=False
    )
    assert type(as_offload(upstream.OffloadPolicy())) is minifsdp.OffloadPolicy


def test_our_policies_are_kept_as_they_are():
    precision, offload = minifsdp.MixedPrecisionPolicy(), minifsdp.CPUOffloadPolicy()
    assert as_mixed_precision(precision) is precision
    assert as_offload(offload) is offload


@pytest.mark.parametrize("policy", [torch.bfloat16, "bf16", minifsdp.OffloadPolicy()])
def test_anything_else_is_no_precision(policy):
    with pytest.raises(ValueError, match="mp_policy must be a MixedPrecisionPolicy"):
        as_mixed_precision(policy)


@pytest.mark.parametrize("policy", [True, "cpu", minifsdp.MixedPrecisionPolicy()])
def test_anything_else_is_no_offloading(policy):
    with pytest.raises(ValueError, match="offload_policy must be an OffloadPolicy"):
        as_offload(policy)


def _dtypes_under_upstreams_policies() -> dict[str, torch.dtype]:
    seen = {}

    class Spy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.update(input=x.dtype, weight=self.weight.dtype)
            return super().forward(x)

    model = minifsdp.fully_shard(
        Spy(3, 5),
        mp_policy=upstream.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64),
        offload_policy=upstream.CPUOffloadPolicy(pin_memory=False),
    )
    output = model(torch.ones(2, 3))
    output.sum().backward()
    return seen | {
        "output": output.dtype,
        "gradient": model.weight.grad.dtype,
        "sharded": next(model.parameters()).dtype,
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_upstreams_policies_take_effect(run_ranks, world_size):
    bf16, fp32, fp64 = torch.bfloat16, torch.float32, torch.float64
    expected = {"input": bf16, "weight": bf16, "output": fp64, "gradient": fp32, "sharded": fp32}
    assert run_ranks(world_size, _dtypes_under_upstreams_policies) == [expected] * world_size

"""A mean of gradients is split into factors as upstream splits it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as upstream

from minifsdp.scaling import Scaling, scaling

ROOMY = [torch.float32, torch.bfloat16]
NARROW = [torch.float16, torch.float64]
SIZES = st.integers(1, 64)


@pytest.mark.parametrize("dtype", ROOMY, ids=str)
def test_fp32_and_bf16_are_averaged_while_they_are_reduced(dtype):
    assert scaling(dtype, 4, 1) == Scaling(average_shards=True)
    assert scaling(dtype, 4, 2) == Scaling(average_shards=True, average_replicas=True)
    assert scaling(dtype, 1, 1) == Scaling()


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize(
    ("ranks", "before", "after"),
    [(1, 1, 1), (2, 2, 1), (3, 2, 1.5), (4, 2, 2), (6, 4, 1.5), (8, 4, 2)],
)
def test_fp16_and_fp64_are_divided_before_and_after(dtype, ranks, before, after):
    assert scaling(dtype, ranks, 1) == Scaling(divide_before=before, divide_after=after)


@given(dtype=st.sampled_from(NARROW), shards=SIZES, replicas=SIZES)
def test_what_divides_before_is_near_the_root_and_both_make_the_mean(dtype, shards, replicas):
    scale, ranks = scaling(dtype, shards, replicas), shards * replicas
    assert scale.divide_before * scale.divide_after == ranks
    assert scale.divide_before**2 <= 4 * ranks
    assert not (scale.average_shards or scale.average_replicas)
    assert scale.multiply_before == 1


@given(
    dtype=st.sampled_from(ROOMY + NARROW),
    shards=st.integers(2, 64),
    replicas=SIZES,
    factor=st.one_of(st.none(), st.integers(1, 100).map(float), st.floats(0.25, 100)),
    force_sum=st.booleans(),
)
def test_factors_are_upstreams(dtype, shards, replicas, factor, force_sum):
    group, replica_group = (SimpleNamespace(size=lambda n=n: n) for n in (shards, replicas))
    before, after, shard_op, replica_op = upstream._get_gradient_divide_factors(
        group, replica_group if replicas > 1 else None, dtype, "cpu", factor, force_sum
    )
    scale = scaling(dtype, shards, replicas, factor, force_sum)
    assert scale.divide_before == (before or 1)
    assert scale.divide_after == (after or 1)
    average = dist.ReduceOp.AVG
    assert scale.average_shards == (shard_op == average)
    if replicas > 1:
        assert scale.average_replicas == (replica_op == average)
    premultiplied = shard_op not in (average, dist.ReduceOp.SUM)
    assert scale.multiply_before == (1 / factor if premultiplied else 1)


@pytest.mark.parametrize("dtype", ROOMY, ids=str)
def test_a_factor_that_is_the_number_of_shards_averages_over_them_only(dtype):
    assert scaling(dtype, 4, 1, factor=4.0) == Scaling(average_shards=True)
    assert scaling(dtype, 3, 2, factor=3) == Scaling(average_shards=True)


@given(dtype=st.sampled_from(ROOMY + NARROW), factor=st.floats(0.5, 64), force_sum=st.booleans())
def test_on_one_rank_a_factor_divides_once(dtype, factor, force_sum):
    scale = scaling(dtype, 1, 1, factor, force_sum)
    assert scale.divide_before * scale.divide_after / scale.multiply_before == pytest.approx(factor)

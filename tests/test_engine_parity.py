"""The engine computes upstream's bits: losses, gradients, norms and parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from parity import Case, differences, train

import minifsdp

BASE = [
    Case(precision=precision, accumulation=accumulation, reshard=reshard, clip=clip)
    for precision, accumulation, reshard, clip in [
        ("fp32", "plain", "auto", "none"),
        ("fp32", "mixed", "True", "clip"),
        ("bf16/fp32", "plain", "True", "clip"),
        ("bf16/fp32", "mixed", "auto", "none"),
        ("bf16/fp32", "synced", "False", "none"),
        ("fp32/bf16", "unsynced", "False", "clip"),
    ]
]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", BASE, ids=str)
def test_bits_equal_upstream(run_ranks, world_size, case):
    assert run_ranks(world_size, differences, case) == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_bits_equal_upstream_through_the_backend(run_ranks, world_size):
    case = replace(BASE[2], collectives="backend")
    assert run_ranks(world_size, differences, case) == [[]] * world_size


@pytest.mark.parametrize("world_size", [3, 4])
def test_bits_equal_upstream_with_fewer_rows_than_ranks(run_ranks, world_size):
    case = replace(BASE[1], rows="few")
    assert run_ranks(world_size, differences, case) == [[]] * world_size


def _gradients_before_reduction(case: Case) -> float:
    """The first loss of this rank: ranks see different data."""
    return float(train(minifsdp, case, steps=1)[0][1])


def test_ranks_train_on_different_data(run_ranks):
    losses = run_ranks(4, _gradients_before_reduction, Case())
    assert len(set(losses)) == 4


def _one_ulp_off(case: Case) -> list[str]:
    """`differences` with the engine made to add one ULP to one element of one reduction."""
    from minifsdp.collectives.direct import DirectReduction

    original = DirectReduction.wait

    def wait(self):
        rows = original(self)
        rows[-1] = torch.nextafter(rows[-1], rows.new_tensor(float("inf")))
        return rows

    DirectReduction.wait = wait
    try:
        return differences(case)
    finally:
        DirectReduction.wait = original


def test_one_ulp_is_found(run_ranks):
    found = run_ranks(2, _one_ulp_off, BASE[0])
    assert all(any("step 0 gradient" in name for name in names) for names in found)

"""The debug checks name what would hang, abort or crash without them; off, they do nothing."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from minifsdp import debug, fully_shard


class Branching(nn.Module):
    """Rank 1 can be told to leave out the block in the middle."""

    def __init__(self, odd_one_skips: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(6, 6) for _ in range(3))
        self.odd_one_skips = odd_one_skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if not (self.odd_one_skips and dist.get_rank() == 1):
            x = self.middle(x)
        return self.last(x)


def build(**settings) -> Branching:
    torch.manual_seed(0)
    model = Branching(**settings)
    for block in (model.first, model.middle, model.last):
        fully_shard(block)
    return fully_shard(model)


def _different_units() -> float:
    model = build(odd_one_skips=True)
    started = time.monotonic()
    with debug.checks(timeout_seconds=5), pytest.raises(RuntimeError) as error:
        model(torch.ones(2, 6))
    message = str(error.value)
    assert "ranks run different units" in message
    assert "unit 'middle'" in message
    assert "unit 'last'" in message
    assert f"rank {1 - dist.get_rank()}:" in message
    return time.monotonic() - started


def test_ranks_that_run_different_units_are_named_within_seconds(run_ranks):
    assert max(run_ranks(2, _different_units, spoils=True)) < 5


def _one_rank_stops() -> str:
    model = build()
    if dist.get_rank() == 1:
        return ""
    with debug.checks(timeout_seconds=2), pytest.raises(RuntimeError) as error:
        model(torch.ones(2, 6))
    return str(error.value)


def test_a_rank_that_does_not_come_is_named(run_ranks):
    message = run_ranks(2, _one_rank_stops, spoils=True)[0]
    assert "rank 1 did not come to all-gather of unit 'first'" in message
    assert "within 2 s" in message


class Keeping(nn.Module):
    """Keeps a view of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.linear.weight.detach()[:2]
        return self.linear(x)


def _alias() -> None:
    model = nn.Sequential(Keeping(), nn.Linear(6, 6))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    x = torch.ones(2, 6)
    with debug.checks(), pytest.raises(RuntimeError) as error:
        model(x)
    assert "'0.linear.weight' by a tensor of shape (2, 6)" in str(error.value)


def test_pytorch_173709_a_tensor_that_outlives_its_unit_is_named(run_ranks):
    run_ranks(2, _alias)


def _unequal_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(dist.get_rank() // 2)
    model = fully_shard(nn.Linear(6, 6), mesh=mesh)
    with debug.checks(), pytest.raises(RuntimeError, match="different parameters on ranks"):
        model(torch.ones(1, 6))
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(6, 6), mesh=mesh)
    with debug.checks():
        model(torch.ones(1, 6)).sum().backward()


def test_olmo_core_319_replicas_that_start_unequal_are_found(run_ranks):
    run_ranks(4, _unequal_replicas)


def _same_bits() -> None:
    results = []
    for checked in (False, True):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            x = torch.full((2, 6), float(step + dist.get_rank()))
            if checked:
                with debug.checks():
                    model(x).square().sum().backward()
            else:
                model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.to_local().clone() for p in model.parameters()])
    assert debug.active is None
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_training_with_checks_gives_the_same_bits(run_ranks):
    run_ranks(3, _same_bits)

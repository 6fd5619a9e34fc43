"""The debug checks: which are on, how long they wait, and whom and what they name."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import debug, fully_shard
from minifsdp.collectives import Peers, use_collectives


def _nested() -> None:
    assert debug.active is None
    with debug.checks() as outer:
        with debug.checks() as inner:
            assert debug.active is inner
        assert debug.active is outer
    assert debug.active is None


def test_inner_checks_give_way_to_outer_ones():
    _nested()


def _all_but_one() -> None:
    rank = dist.get_rank()
    unit = "another" if rank == 2 else "the same"
    with pytest.raises(RuntimeError, match=r"rank 2: all-gather of unit 'another', 4 bytes"):
        debug.checks().before_message("all-gather", unit, 4, Peers.of(dist.group.WORLD))
    debug.active = None


def test_one_rank_of_three_that_differs_is_named_on_all(run_ranks):
    run_ranks(3, _all_but_one)


def _no_order() -> None:
    checks = debug.checks(order=False)
    debug.active = None
    if dist.get_rank() == 0:  # nobody answers
        checks.before_message("all-gather", "any", 4, Peers.of(dist.group.WORLD))


def test_without_order_nothing_is_asked_before_a_message(run_ranks):
    run_ranks(2, _no_order)


def _late() -> float:
    """How long a rank that does not come was waited for, in a group that waits longer."""
    peers = Peers.of(dist.new_group(timeout=timedelta(seconds=9)))
    checks = debug.checks(timeout_seconds=0.5)
    debug.active = None
    began = time.monotonic()
    if peers.rank == 0:
        with pytest.raises(RuntimeError, match=r"rank 1 did not come .* within 0.5 s"):
            checks.before_message("all-gather", "any", 4, peers)
    return time.monotonic() - began


def test_a_late_rank_is_waited_for_as_long_as_the_checks_say(run_ranks):
    assert max(run_ranks(2, _late, spoils=True)) < 6


class Keeping(nn.Module):
    """Keeps what it is told to of its unit's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept += self.choose()
        return self.layer(x)

    def choose(self) -> list[torch.Tensor]:
        return []


def keeping(choose) -> nn.Sequential:
    model = nn.Sequential(Keeping(), nn.Linear(4, 4))
    model[0].choose = lambda: choose(model[0].layer)
    fully_shard(model[0])
    return fully_shard(model)


def _aliases() -> None:
    x = torch.ones(2, 4)
    for choose, name in (
        (lambda layer: [layer.bias.detach()[1:]], "0.layer.bias"),
        (lambda layer: [layer.weight[2]], "0.layer.weight"),
    ):
        model = keeping(choose)
        with debug.checks(), pytest.raises(RuntimeError, match="still aliases") as error:
            model(x)
        assert f"parameter {name!r} by a tensor" in str(error.value)
        model = keeping(choose)
        with debug.checks(aliases=False):
            model(x)
    for harmless in (lambda layer: [layer.weight], lambda layer: [layer.weight.detach().clone()]):
        model = keeping(harmless)
        with debug.checks():
            for _ in range(2):
                model(x).sum().backward()


def test_views_are_found_and_named_and_the_parameters_themselves_are_no_aliases(run_ranks):
    run_ranks(2, _aliases)


class Chain(nn.Module):
    """Three units, of which the second does not train on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        if dist.get_rank() == 1:
            self.b.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)))


def _reduced_by_some() -> None:
    use_collectives("direct")  # whose gathers do not wait for who runs something else
    model = Chain()
    for module in (model.a, model.b, model.c, model):
        fully_shard(module)
    loss = model(torch.ones(2, 4)).sum()
    with debug.checks(), pytest.raises(RuntimeError, match="ranks run different units") as error:
        loss.backward()
    assert "reduce-scatter of unit 'b'" in str(error.value)


def test_a_unit_that_only_some_ranks_reduce_is_named(run_ranks):
    run_ranks(2, _reduced_by_some, spoils=True)


class NoRows(nn.Module):
    """Has a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.nothing.sum()


def _no_memory() -> None:
    model = nn.Sequential(NoRows(), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    bystander = torch.empty(0)
    with debug.checks():
        model(torch.ones(2, 4)).sum().backward()
    assert bystander.numel() == 0


def test_what_has_no_memory_is_no_alias_of_what_has_none(run_ranks):
    run_ranks(2, _no_memory)

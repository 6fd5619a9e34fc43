"""Several modules as one unit: gathered once, reduced once, whichever of them run."""

from __future__ import annotations

import gc

import pytest
import stack
import torch
from torch import nn

from minifsdp import fully_shard


class Refused(Exception):
    """What a module of the group raises."""


class Grouped(nn.Module):
    """`a` and `b` are one unit, and run in the order that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.a, self.b, self.back = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: torch.Tensor, order: str) -> torch.Tensor:
        x = self.front(x)
        for name in order:
            try:
                x = torch.tanh(getattr(self, name)(x))
            except Refused:
                continue
        self.rows_afterwards = hasattr(self.a.weight, "to_local")
        return self.back(x)


def grouped() -> Grouped:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Grouped()
    fully_shard([model.a, model.b])
    return fully_shard(model)


def iteration(model: Grouped, order: str) -> tuple[list[str], list[str]]:
    """Messages of forward and of backward."""
    with stack.messages() as forward:
        loss = model(stack.batch(), order).sum()
    assert hasattr(model.b.weight, "to_local")
    with stack.messages() as backward:
        loss.backward()
    return forward, backward


USUAL = ["AG root", "AG a"], ["AG a", "RS a", "RS root"]


def _orders() -> None:
    model = grouped()
    for order in ("ab", "ab", "ba"):
        assert iteration(model, order) == USUAL, order
        assert model.rows_afterwards


def test_a_group_is_gathered_once_each_way_and_reduced_once_and_named_after_its_first(run_ranks):
    run_ranks(2, _orders)


def _as_they_were_given() -> list[str]:
    model = Grouped()
    fully_shard([model.b, model.a])
    params = [p.owners[0].module() for p in model.a._unit().params]
    return ["b" if module is model.b else "a" for module in params]


def test_a_groups_parameters_travel_in_the_order_that_its_modules_were_given_in(run_ranks):
    assert run_ranks(1, _as_they_were_given) == [["b", "b", "a", "a"]]


def _cut_short() -> None:
    model, plain = grouped(), Grouped()
    plain.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
    for order in ("a", "b", "ab"):
        assert iteration(model, order) == USUAL, order
        plain(stack.batch(), order).sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.allclose(stack.whole(a.grad), b.grad) for a, b in pairs)


def test_a_group_of_which_a_part_runs_is_freed_after_forward_and_reduced(run_ranks):
    run_ranks(2, _cut_short)


def _raises_and_is_passed_over() -> None:
    model = grouped()

    def refuse(*_: object) -> None:
        raise Refused

    handle = model.a.register_forward_pre_hook(refuse)
    forward, backward = iteration(model, "ab")
    assert forward == USUAL[0] and sorted(backward) == sorted(USUAL[1])
    assert model.rows_afterwards  # the one that raised is not waited for
    handle.remove()
    assert iteration(model, "ab") == USUAL


def test_a_module_of_a_group_that_raises_counts_as_run(run_ranks):
    run_ranks(2, _raises_and_is_passed_over)


def _deleted() -> None:
    model = grouped()
    iteration(model, "ab")
    del model.a
    gc.collect()
    with pytest.raises(RuntimeError, match="'weight' was deleted while its unit lives"):
        model.b(torch.ones(1, 3))


def test_a_module_of_a_group_that_was_deleted_is_told_of(run_ranks):
    run_ranks(2, _deleted)


def _given_up_in_between() -> None:
    model = grouped()
    iteration(model, "ab")
    with pytest.raises(AttributeError):
        model(stack.batch(), "a?")
    assert iteration(model, "ba") == USUAL


def test_a_forward_that_raised_between_modules_of_a_group_leaves_nothing_behind(run_ranks):
    run_ranks(2, _given_up_in_between)

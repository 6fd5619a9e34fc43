"""Which messages travel, in which order, and how many: what prefetching and resharding promise."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import stack
import torch
import torch.distributed as dist
from torch import nn

import minifsdp

GATHERS = ["AG root", "AG layers.0", "AG layers.1", "AG layers.2"]
REDUCTIONS = ["RS layers.2", "RS layers.1", "RS layers.0", "RS root"]
BACKWARD = ["AG layers.2", "AG layers.1", "RS layers.2", "AG layers.0", *REDUCTIONS[1:]]


def _messages_of_iterations(settings: dict[str, Any], iterations: int = 3) -> list[list[list[str]]]:
    """Messages in forward, and in backward, of each iteration."""
    model = stack.shard(stack.build(), **settings)
    seen = []
    for seed in range(iterations):
        with stack.messages() as forward:
            loss = model(stack.batch(seed)).sum()
        with stack.messages() as backward:
            loss.backward()
        seen.append([forward, backward])
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_come_in_the_same_order_in_first_and_later_iterations(run_ranks, world_size):
    answers = run_ranks(world_size, _messages_of_iterations, {})
    assert answers == [[[GATHERS, BACKWARD]] * 3] * world_size


@pytest.mark.parametrize("offload", [False, True])
def test_offloading_changes_no_message(run_ranks, offload):
    settings = {"offload_policy": minifsdp.CPUOffloadPolicy()} if offload else {}
    assert run_ranks(2, _messages_of_iterations, settings) == [[[GATHERS, BACKWARD]] * 3] * 2


def test_units_kept_whole_are_not_gathered_again_in_backward(run_ranks):
    answers = run_ranks(2, _messages_of_iterations, {"reshard_after_forward": False})
    assert answers == [[[GATHERS, REDUCTIONS]] * 3] * 2


def test_a_root_that_reshards_is_gathered_twice(run_ranks):
    for iterations in run_ranks(2, _messages_of_iterations, {"reshard_after_forward": True}):
        for forward, backward in iterations:
            assert forward == GATHERS
            assert Counter(backward) == Counter(["AG root", *BACKWARD])
            assert backward[0] == "AG root"


def _messages_under_evaluation() -> tuple[list[str], list[list[str]]]:
    """Messages of a forward without gradients, and of the training iteration after it."""
    model = stack.shard(stack.build())
    with torch.no_grad(), stack.messages() as evaluation:
        model(stack.batch())
    with stack.messages() as forward:
        loss = model(stack.batch()).sum()
    with stack.messages() as backward:
        loss.backward()
    return evaluation, [forward, backward]


def test_evaluation_gathers_each_unit_once_and_disturbs_no_training_after_it(run_ranks):
    assert run_ranks(2, _messages_under_evaluation) == [(GATHERS, [GATHERS, BACKWARD])] * 2


def _messages_of_two_forwards_then_two_backwards() -> tuple[Counter, bool]:
    model, plain = stack.shard(stack.build()), stack.build()
    with stack.messages() as seen:
        losses = [model(stack.batch(seed)).sum() for seed in (0, 1)]
        for loss in losses:
            loss.backward()
    for loss in [plain(stack.batch(seed)).sum() for seed in (0, 1)]:
        loss.backward()
    close = all(
        torch.allclose(a.grad.full_tensor(), b.grad, rtol=1e-5)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    return Counter(seen), close


def test_two_forwards_before_two_backwards_reduce_twice_and_sum(run_ranks):
    for counts, close in run_ranks(2, _messages_of_two_forwards_then_two_backwards):
        assert close
        assert [counts[reduction] for reduction in REDUCTIONS] == [2] * 4


class Twice(stack.Stack):
    """Its middle block runs twice in a forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, middle, last = self.layers
        return self.back(last(middle(middle(first(self.front(x))))))


def _messages_of_a_block_used_twice() -> tuple[Counter, Counter, bool]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Twice()
        plain = Twice()
    plain.load_state_dict(model.state_dict())
    stack.shard(model)
    counts = []
    for seed in range(2):
        with stack.messages() as seen:
            stack.step(model, seed)
        stack.step(plain, seed)
        counts.append(Counter(seen))
    close = all(
        torch.allclose(stack.whole(a.grad), b.grad, rtol=1e-4, atol=1e-7)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    return *counts, close


def test_a_block_used_twice_is_gathered_for_each_use_and_reduced_once(run_ranks):
    for first, later, close in run_ranks(2, _messages_of_a_block_used_twice):
        assert close
        assert first == later
        assert first["RS layers.1"] == 1
        assert first["AG layers.1"] == 4
        assert first["AG layers.0"] == first["AG layers.2"] == 2


def _gathers_and_computation(prefetch: bool) -> list[list[str]]:
    """In each of two forwards: gathers of units, and the root's and the blocks' first layers."""
    model = stack.shard(stack.build())
    layers = {"root": model.front} | {f"layers.{i}": b.up for i, b in enumerate(model.layers)}
    if prefetch:
        model.set_modules_to_forward_prefetch([model.layers[0], model.layers[1]])
    iterations = []
    for _ in range(2):
        with stack.messages() as seen:
            handles = [
                layer.register_forward_pre_hook(lambda *_, n=name, s=seen: s.append(f"compute {n}"))
                for name, layer in layers.items()
            ]
            loss = model(stack.batch()).sum()
        for handle in handles:
            handle.remove()
        loss.backward()
        iterations.append(seen)
    return iterations


def test_from_the_second_iteration_the_next_unit_is_gathered_while_this_one_computes(run_ranks):
    on_demand = ["AG root", "compute root"]
    on_demand += [f"{what} layers.{i}" for i in range(3) for what in ("AG", "compute")]
    ahead = ["AG root", "AG layers.0", "compute root", "AG layers.1", "compute layers.0"]
    ahead += ["AG layers.2", "compute layers.1", "compute layers.2"]
    assert run_ranks(2, _gathers_and_computation, False) == [[on_demand, ahead]] * 2


def test_units_named_for_prefetch_are_gathered_when_the_naming_one_starts_forward(run_ranks):
    for iterations in run_ranks(2, _gathers_and_computation, True):
        for seen in iterations:
            assert seen[:4] == ["AG root", "AG layers.0", "AG layers.1", "compute root"]
            assert Counter(seen)["AG layers.2"] == 1


def _backward_prefetch_by_name() -> list[str]:
    model = stack.shard(stack.build())
    model.layers[2].set_modules_to_backward_prefetch([model.layers[0], model.layers[1]])
    loss = model(stack.batch()).sum()
    with stack.messages() as backward:
        loss.backward()
    return backward


def test_units_named_for_prefetch_are_gathered_when_the_naming_one_starts_backward(run_ranks):
    for backward in run_ranks(2, _backward_prefetch_by_name):
        assert backward[:3] == ["AG layers.2", "AG layers.0", "AG layers.1"]
        assert Counter(backward) == Counter(BACKWARD)


def _unshard_and_reshard_by_hand() -> list[str]:
    model = stack.shard(stack.build())
    with stack.messages() as seen:
        handle = model.layers[1].unshard(async_op=True)
        handle.wait()
        handle.wait()
        model.layers[1].unshard()
        whole = model.layers[1].up.weight.shape == (7, stack.DIM)
        assert whole and not hasattr(model.layers[1].up.weight, "to_local")
        model.layers[1].reshard()
        model.layers[1].reshard()
        assert hasattr(model.layers[1].up.weight, "to_local")
    loss = model(stack.batch()).sum()
    model.reshard()
    model.reshard()
    loss.backward()
    return seen


def test_unsharding_and_resharding_twice_is_harmless(run_ranks):
    assert run_ranks(2, _unshard_and_reshard_by_hand) == [["AG ?"]] * 2


def _bytes_of_messages(dtype: torch.dtype | None) -> dict[str, int]:
    from minifsdp import events

    policy = minifsdp.MixedPrecisionPolicy(dtype, torch.float32)
    model = stack.shard(stack.build(), mp_policy=policy)
    sizes: dict[str, int] = {}
    with events.listening(lambda e: sizes.setdefault(f"{e.kind} {e.unit}", e.nbytes)):
        stack.step(model)
    return sizes


@pytest.mark.parametrize(("dtype", "width"), [(None, 4), (torch.bfloat16, 2)])
def test_messages_are_as_long_as_rows_padded_to_the_first_ranks(run_ranks, dtype, width):
    padded = sum(-(-rows // 3) * columns for rows, columns in [(7, 6), (7, 1), (6, 7), (6, 1)]) * 3
    for sizes in run_ranks(3, _bytes_of_messages, dtype):
        assert sizes["all_gather layers.1"] == padded * width
        assert sizes["reduce_scatter layers.1"] == padded * 4


def _frozen_units_are_not_reduced() -> Counter:
    model = stack.build()
    model.layers[1].requires_grad_(False)
    stack.shard(model)
    with stack.messages() as seen:
        stack.step(model, seed=dist.get_rank())
    return Counter(seen)


def test_a_frozen_unit_is_gathered_and_not_reduced(run_ranks):
    expected = Counter(GATHERS + BACKWARD)
    del expected["RS layers.1"]
    assert run_ranks(2, _frozen_units_are_not_reduced) == [expected] * 2


class Branch(nn.Module):
    """Two units that forward runs in an order that alternates."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        first, second = (self.a, self.b) if self.calls % 2 else (self.b, self.a)
        return second(torch.tanh(first(x)))


def _an_order_that_changes() -> bool:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, plain = Branch(), Branch()
    plain.load_state_dict(model.state_dict())
    for unit in (model.a, model.b, model):
        minifsdp.fully_shard(unit)
    for seed in range(4):
        stack.step(model, seed)
        stack.step(plain, seed)
    return all(
        torch.allclose(stack.whole(a.grad), b.grad, rtol=1e-5)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_units_may_run_in_another_order_than_last_time(run_ranks):
    assert run_ranks(2, _an_order_that_changes) == [True, True]

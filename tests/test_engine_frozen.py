"""Parameters that are not trained: ignored, frozen, or either for some of the time."""

from __future__ import annotations

import pytest
import stack
import torch
import torch.distributed as dist
from test_engine_schedule import BACKWARD, GATHERS
from torch import nn
from torch.distributed.tensor import DTensor

import minifsdp
from minifsdp import fully_shard


def _ignored() -> list[bool]:
    model = stack.build()
    weight = model.back.weight
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, ignored_params={weight})
    with stack.messages() as seen:
        stack.step(model, seed=dist.get_rank())
    plain = stack.build()
    stack.step(plain, seed=dist.get_rank())
    return [
        model.back.weight is weight and not isinstance(weight, DTensor),
        isinstance(model.back.bias, DTensor),
        torch.equal(weight.grad, plain.back.weight.grad),
        seen == GATHERS + BACKWARD,
    ]


def test_ignored_parameters_stay_whole_and_their_gradients_local(run_ranks):
    assert run_ranks(2, _ignored) == [[True] * 4] * 2


class Casting(stack.Block):
    """Computes in its input's dtype whatever dtypes its parameters have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = (
            {name: p.to(x.dtype) for name, p in layer.named_parameters()}
            for layer in (self.up, self.down)
        )
        hidden = torch.tanh(nn.functional.linear(x, **up))
        return x + nn.functional.linear(hidden, **down)


def _frozen(prefix: str, dtype: torch.dtype) -> list[str]:
    """What is wrong when parameters of a unit are frozen and have a dtype of their own."""
    model, plain = stack.build(Casting), stack.build(Casting)
    for each in (model, plain):
        for layer in each.layers:
            for name, param in layer.named_parameters():
                if name.startswith(prefix):
                    param.data = param.data.to(dtype)
                    param.requires_grad_(False)
    stack.shard(model)
    wrong = []
    for seed in range(2):
        if not torch.equal(stack.step(model, seed), stack.step(plain, seed)):
            wrong.append("loss")
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        if (a.grad is None) != (b.grad is None):
            wrong.append(f"{name} has a gradient, or lacks one")
        elif b.grad is not None and not torch.equal(stack.whole(a.grad), b.grad):
            wrong.append(f"gradient of {name}")
        if a.requires_grad != b.requires_grad or a.dtype != b.dtype:
            wrong.append(f"{name} changed")
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("prefix", ["up.weight", "down.bias", "down"])
def test_frozen_parameters_get_no_gradient_and_may_have_another_dtype(run_ranks, prefix, dtype):
    assert run_ranks(2, _frozen, prefix, dtype) == [[], []]


def _unfrozen_later() -> list[bool]:
    """All parameters frozen at the first forward, then trained, in two precisions."""
    policy = minifsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = stack.build().requires_grad_(False)
    stack.shard(model, mp_policy=policy)
    model(stack.batch())
    model.requires_grad_(True)
    other = stack.shard(stack.build(), mp_policy=policy)
    stack.step(model)
    stack.step(other)
    return [
        torch.equal(a.grad.to_local(), b.grad.to_local())
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    ]


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_frozen_at_the_first_forward_may_be_trained_later(run_ranks, world_size):
    assert all(all(equal) for equal in run_ranks(world_size, _unfrozen_later))


def _frozen_between_forward_and_backward() -> list[bool]:
    """Which gradients are right in a step, and of the next, with a block frozen after forward."""
    model, plain = stack.shard(stack.build()), stack.build()
    for each in (model, plain):
        loss = each(stack.batch()).sum()
        each.layers[1].requires_grad_(False)
        loss.backward()
        each.layers[1].requires_grad_(True)
        stack.step(each)
    return [
        torch.allclose(stack.whole(a.grad), b.grad, rtol=1e-4, atol=1e-7)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    ]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_block_may_be_frozen_between_forward_and_backward(run_ranks, world_size):
    for equal in run_ranks(world_size, _frozen_between_forward_and_backward):
        assert all(equal)


def _frozen_in_turns() -> bool:
    model, plain = stack.shard(stack.build()), stack.build()
    for each in (model, plain):
        for seed, frozen in enumerate([None, 0, 1, None]):
            for i, layer in enumerate(each.layers):
                layer.requires_grad_(i != frozen)
            stack.step(each, seed)
    return all(
        torch.allclose(stack.whole(a.grad), b.grad, rtol=1e-4, atol=1e-7)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_blocks_may_be_frozen_in_turns(run_ranks):
    assert run_ranks(2, _frozen_in_turns) == [True, True]


class WithCounter(nn.Module):
    """Has a parameter of integers, which cannot be trained or cast."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(3, 3, bias=False)
        self.table = nn.Parameter(torch.arange(5, dtype=torch.int8), requires_grad=False)
        self.back = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.front(x) * self.table.sum())


def _integers() -> tuple[list[int], torch.dtype, bool]:
    model = fully_shard(WithCounter(), mp_policy=minifsdp.MixedPrecisionPolicy(torch.bfloat16))
    stack.step(model)
    table = stack.whole(model.table)
    return table.tolist(), table.dtype, model.front.weight.grad is not None


@pytest.mark.parametrize("world_size", [1, 2])
def test_integer_parameters_are_sharded_and_never_cast(run_ranks, world_size):
    expected = ([0, 1, 2, 3, 4], torch.int8, True)
    assert run_ranks(world_size, _integers) == [expected] * world_size

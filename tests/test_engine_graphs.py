"""Whatever a training script does with the graph, gradients are those of the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import stack
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import minifsdp


def train_once(model: nn.Module) -> None:
    model(stack.batch()).sum().backward()


def train_three_times(model: nn.Module) -> None:
    for seed in range(3):
        model(stack.batch(seed)).sum().backward()


def backward_twice_through_one_graph(model: nn.Module) -> None:
    loss = model(stack.batch()).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def zero_gradients_instead_of_dropping_them(model: nn.Module) -> None:
    train_once(model)
    model.zero_grad(set_to_none=False)
    train_once(model)


def one_loss_of_two_forwards(model: nn.Module) -> None:
    (model(stack.batch(0)).sum() * model(stack.batch(1)).sum()).backward()


def backward_in_the_other_order(model: nn.Module) -> None:
    first, second = model(stack.batch(0)).sum(), model(stack.batch(1)).sum()
    second.backward()
    first.backward()


def forwards_without_backward(model: nn.Module) -> None:
    model(stack.batch(0))
    model(stack.batch(1))
    train_once(model)


def gradient_of_the_input(model: nn.Module) -> torch.Tensor:
    x = stack.batch().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    train_once(model)
    return gradient


def input_that_requires_grad(model: nn.Module) -> torch.Tensor:
    x = stack.batch().requires_grad_()
    model(x).sum().backward()
    return x.grad


def a_block_alone_between_steps(model: nn.Module) -> torch.Tensor:
    train_once(model)
    x = torch.ones(2, stack.DIM, requires_grad=True)
    model.layers[1](x).sum().backward()
    train_once(model)
    return x.grad


def a_block_left_out_for_a_step(model: nn.Module) -> None:
    train_once(model)
    layers = model.layers
    model.layers = nn.ModuleList([layers[0], layers[2]])
    train_once(model)
    model.layers = layers
    train_once(model)


SCRIPTS = [
    train_three_times,
    backward_twice_through_one_graph,
    zero_gradients_instead_of_dropping_them,
    one_loss_of_two_forwards,
    backward_in_the_other_order,
    forwards_without_backward,
    gradient_of_the_input,
    input_that_requires_grad,
    a_block_alone_between_steps,
    a_block_left_out_for_a_step,
]


class OneCheckpointForTwoBlocks(stack.Stack):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def both(x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x))

        x = checkpoint(both, self.front(x), use_reentrant=self.reentrant)
        return self.back(self.layers[2](x))


class OneReentrantCheckpointForTwoBlocks(OneCheckpointForTwoBlocks):
    reentrant = True


class InPlaceAfterBlocks(stack.Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.front(x)
        for layer in self.layers:
            x = layer(x)
            x += 1
        return self.back(x)


class CutInTheMiddle(stack.Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](self.front(x)))
        return self.back(self.layers[2](x.detach()))


class SumOfBranches(stack.Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.front(x)
        return self.back(sum(layer(x) for layer in self.layers))


class OnlySomeBranches(stack.Stack):
    """Which branch its output depends on changes from call to call."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        outputs = [layer(self.front(x)) for layer in self.layers]
        return self.back(outputs[self.calls % 3])


MODELS = [
    OneCheckpointForTwoBlocks,
    OneReentrantCheckpointForTwoBlocks,
    InPlaceAfterBlocks,
    CutInTheMiddle,
    SumOfBranches,
    OnlySomeBranches,
]


def _differs(
    make: Callable[[], nn.Module],
    shard: Callable[[nn.Module], Any],
    script: Callable[[nn.Module], torch.Tensor | None],
) -> list[str]:
    """Which results of a script differ between a model and its sharded copy."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = make()
    model = copy.deepcopy(plain)
    shard(model)
    results = [script(each) for each in (model, plain)]
    found = []
    if results[0] is not None and not torch.allclose(*results, rtol=1e-4, atol=1e-6):
        found.append("result")
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        present = [grad for grad in (a.grad, b.grad) if grad is not None]
        if len(present) < 2:
            found += [f"{name}: only one has a gradient" for g in present if stack.whole(g).any()]
        elif not torch.allclose(stack.whole(a.grad), b.grad, rtol=1e-4, atol=1e-6):
            found.append(name)
    assert any(p.grad is not None and p.grad.any() for p in plain.parameters())
    return found


def _scripts_that_differ(reshard_after_forward: bool | None) -> list[tuple[str, list[str]]]:
    def shard(model: stack.Stack) -> None:
        stack.shard(model, reshard_after_forward=reshard_after_forward)

    answers = [(script.__name__, _differs(stack.Stack, shard, script)) for script in SCRIPTS]
    answers += [(make.__name__, _differs(make, shard, train_three_times)) for make in MODELS]
    return [(name, found) for name, found in answers if found]


@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_are_the_unsharded_models(run_ranks, world_size, reshard_after_forward):
    answers = run_ranks(world_size, _scripts_that_differ, reshard_after_forward)
    assert answers == [[]] * world_size


def _only_blocks(model: stack.Stack) -> None:
    for layer in model.layers:
        minifsdp.fully_shard(layer)


def _three_levels(model: stack.Stack) -> None:
    for layer in model.layers:
        minifsdp.fully_shard(layer.up)
    stack.shard(model)


def _one_unit(model: stack.Stack) -> None:
    minifsdp.fully_shard(model)


def _nothing_left_for_the_root(model: stack.Stack) -> None:
    minifsdp.fully_shard(model.front)
    minifsdp.fully_shard(model.back)
    stack.shard(model)


def _units_that_differ() -> list[tuple[str, list[str]]]:
    ways = [_only_blocks, _three_levels, _one_unit, _nothing_left_for_the_root]
    answers = [(way.__name__, _differs(stack.Stack, way, train_three_times)) for way in ways]
    return [(name, found) for name, found in answers if found]


@pytest.mark.parametrize("world_size", [1, 2])
def test_any_choice_of_units_gives_the_same_gradients(run_ranks, world_size):
    assert run_ranks(world_size, _units_that_differ) == [[]] * world_size


def _hooks_called() -> list[str]:
    """Names of parameters whose post-accumulate hooks ran, in order, each with its gradient."""
    model, called = stack.shard(stack.build()), []

    def hook(name: str, param: torch.Tensor) -> None:
        assert param.grad is not None
        called.append(name)

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: hook(name, p))
    train_once(model)
    return called


@pytest.mark.parametrize("world_size", [1, 2])
def test_hooks_on_sharded_gradients_run_once_each(run_ranks, world_size):
    names = sorted(name for name, _ in stack.build().named_parameters())
    for called in run_ranks(world_size, _hooks_called):
        assert sorted(called) == names
        assert called[-1].startswith(("front", "back"))

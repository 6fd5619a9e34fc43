"""Steps behind the forward: who waits for them, once, and what is listed of them."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future
from typing import Any

import pytest
import stack
import torch
from test_stepping import Watched, adamw, backward, settings_of
from torch import nn

from minifsdp import clip_grad_norm_, events, fully_shard, step_in_backward


def stepped(result: object = None) -> Future:
    """A step that is over, with an error if that is what `result` is."""
    future: Future = Future()
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


def _two_begun() -> None:
    unit = fully_shard(nn.Linear(2, 2))._unit()
    unit.begin_step(stepped(ArithmeticError("the first")))
    with pytest.raises(ArithmeticError, match="the first"):
        unit.begin_step(stepped())
    unit.settle()  # it has been told once


def test_of_two_steps_begun_the_first_is_waited_for_and_its_error_told_once(run_ranks):
    run_ranks(1, _two_begun)


def _told_once() -> None:
    model = stack.shard(stack.build(), **settings_of("offload"))
    optimizer = step_in_backward(
        model, lambda params: Watched(params, [], fails=True), max_norm=1.0
    )
    backward(model, 0)
    optimizer.step(wait=False)
    for _ in range(4):  # units
        with pytest.raises(ArithmeticError, match="no step today"):
            optimizer.wait()
    optimizer.wait()


def test_what_a_step_behind_the_forward_raises_is_told_once(run_ranks):
    run_ranks(1, _told_once)


def _at_rest() -> None:
    log: list[str] = []
    model = stack.shard(stack.build(), **settings_of("offload"))
    optimizer = step_in_backward(model, lambda params: Watched(params, log), max_norm=1.0)
    backward(model, 0)
    optimizer.step(wait=False)
    assert len(optimizer.optimizers) == 4 and len(log) == 4
    backward(model, 1)
    optimizer.step()  # waits
    assert len(log) == 8


def test_optimizers_are_at_rest_when_they_are_handed_out_and_after_a_step_that_waits(run_ranks):
    run_ranks(1, _at_rest)


def _stepped_behind(wait: bool) -> list[torch.Tensor]:
    """Outputs of forwards that begin while slow optimizers step, or after."""
    model = stack.shard(stack.build(), **settings_of("offload"))
    optimizer = step_in_backward(model, lambda params: Watched(params, []), max_norm=1.0)
    outputs = []
    for step in range(3):
        out = model(stack.batch(step))
        outputs.append(out.detach())
        out.square().mean().backward()
        optimizer.step(wait=wait)
    optimizer.wait()
    return outputs


def _gathered_after_the_step() -> None:
    pairs = zip(_stepped_behind(False), _stepped_behind(True), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_unit_is_gathered_after_it_has_stepped(run_ranks):
    for world_size in (1, 2):
        run_ranks(world_size, _gathered_after_the_step)


class Log:
    """A tracer that keeps what it hears."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.names: list[str] = []

    def begin(self, kind: str, actor: Any) -> None:
        self.kinds.append(kind)
        self.names.append(actor.name)

    def end(self, kind: str, actor: Any) -> None:
        self.kinds.append(f"end of {kind}")


def _waits_are_told() -> None:
    model = stack.shard(stack.build(), **settings_of("offload"))
    optimizer = step_in_backward(model, lambda params: Watched(params, []), max_norm=1.0)
    backward(model, 0)
    log = events.tracer = Log()
    try:
        optimizer.step(wait=False)
        optimizer.wait()
    finally:
        events.tracer = None
    waits = [kind for kind in log.kinds if "wait" in kind]
    assert waits == ["optimizer_wait", "end of optimizer_wait"] * 4
    assert log.kinds.count("optimizer") == log.kinds.count("end of optimizer") == 4


def test_a_tracer_hears_of_each_wait_for_an_optimizer(run_ranks):
    run_ranks(1, _waits_are_told)


class WithIgnored(nn.Module):
    """Two units, and a parameter of none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x)) * self.scale


def _listed() -> None:
    model = WithIgnored()
    fully_shard(model.inner)
    fully_shard(model, ignored_params={model.scale})
    optimizer = step_in_backward(model, adamw)
    assert len(optimizer.optimizers) == 3
    groups = [group for each in optimizer.optimizers for group in each.param_groups]
    assert [id(group) for group in optimizer.param_groups] == [id(group) for group in groups]
    params = [p for group in groups for p in group["params"]]
    assert {id(p) for p in params} == {id(p) for p in model.parameters()}


def _named() -> list[str]:
    model = WithIgnored()
    fully_shard(model.inner)
    fully_shard(model, ignored_params={model.scale})
    optimizer = step_in_backward(model, adamw, max_norm=1.0)
    model(torch.ones(2, 3)).sum().backward()
    log = events.tracer = Log()
    try:
        optimizer.step()
    finally:
        events.tracer = None
    return [
        name for kind, name in zip(log.kinds[::2], log.names, strict=True) if kind == "optimizer"
    ]


def test_a_tracer_is_told_whose_optimizer_steps(run_ranks):
    assert run_ranks(2, _named) == [["ignored parameters", "root", "inner"]] * 2


def test_the_optimizers_of_all_units_and_of_ignored_parameters_are_listed(run_ranks):
    run_ranks(2, _listed)


def _while_whole() -> None:
    """Made while the root is whole, after a forward, and clipped in the model's order."""
    model, plain = (stack.shard(stack.build()) for _ in range(2))
    model(stack.batch())
    optimizer = step_in_backward(model, adamw, max_norm=0.05)
    after = adamw(plain.parameters())
    for step in range(3):
        backward(model, step)
        optimizer.step()
        backward(plain, step)
        norm = clip_grad_norm_(plain.parameters(), 0.05)
        after.step()
        after.zero_grad()
        assert torch.equal(norm, optimizer.norm)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(stack.local(a), stack.local(b)) for a, b in pairs)


def test_optimizers_may_be_made_while_the_root_is_whole(run_ranks):
    run_ranks(2, _while_whole)


def _frozen_while_whole() -> None:
    model = stack.shard(stack.build())
    model(stack.batch())
    model.front.bias.requires_grad_(False)
    stepped = [
        p
        for o in step_in_backward(model, adamw).optimizers
        for g in o.param_groups
        for p in g["params"]
    ]
    model.reshard()
    frozen = model.front.bias
    assert not any(p is frozen for p in stepped)
    assert len(stepped) == len(list(model.parameters())) - 1


def test_a_parameter_that_was_frozen_while_it_was_whole_is_not_stepped(run_ranks):
    for world_size in (1, 2):
        run_ranks(world_size, _frozen_while_whole)


def _frees_itself() -> bool:
    gc.collect()
    gc.disable()
    try:
        model = stack.shard(stack.build())
        optimizer = step_in_backward(model, adamw)
        backward(model, 0)
        unit = weakref.ref(model.layers[0]._unit())
        del model, optimizer
        return unit() is None
    finally:
        gc.enable()


def test_a_model_that_steps_in_backward_frees_itself(run_ranks):
    assert run_ranks(2, _frees_itself) == [True, True]

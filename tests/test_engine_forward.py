"""Forwards of many shapes: nested values, evaluation, other methods, and ones that raise."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import stack
import torch
import torch.distributed.fsdp as upstream
from test_engine_schedule import BACKWARD, GATHERS
from torch.distributed.tensor import DTensor

import minifsdp


@dataclass
class State:
    """What nested blocks pass on."""

    x: torch.Tensor
    step: int


class Pair(NamedTuple):
    state: State
    extra: dict[str, Any]


class NestedBlock(stack.Block):
    """Takes and returns its tensors in a dataclass inside a namedtuple, and in a dict of lists."""

    def forward(self, pair: Pair, *, tags: list[str]) -> Pair:
        assert tags == ["kept"]
        old = pair.extra["history"][-1]
        x = super().forward(pair.state.x) + 0.5 * old
        extra = {**pair.extra, "history": [*pair.extra["history"], x * 2]}
        return Pair(State(x, pair.state.step + 1), extra)


class NestedStack(stack.Stack):
    """A stack that takes a dict and returns a dict."""

    def __init__(self) -> None:
        super().__init__(NestedBlock)

    def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        x = self.front(inputs["x"])
        pair = Pair(State(x, 0), {"history": [x], "mask": torch.tensor([True]), "none": None})
        for layer in self.layers:
            pair = layer(pair, tags=["kept"])
        assert pair.state.step == 3
        return {"out": (self.back(pair.state.x), pair.extra["history"]), "steps": pair.state.step}


def _nested() -> tuple[list[list[str]], bool, bool]:
    """Messages of an iteration, and whether its gradients are upstream's and a plain model's."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = NestedStack()
    ours, theirs = (stack.shard(copy.deepcopy(plain), e) for e in (minifsdp, upstream))
    seen = []
    for model in (ours, theirs, plain):
        with stack.messages() as forward:
            out, history = model({"x": stack.batch()})["out"]
            loss = out.square().sum() + sum(h.mean() for h in history)
        with stack.messages() as backward:
            loss.backward()
        seen.append([forward, backward])
    grads = [[stack.whole(p.grad) for p in m.parameters()] for m in (ours, theirs, plain)]
    close = all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(grads[0], grads[2], strict=True))
    return seen[0], stack.same_bits(grads[0], grads[1]), close


def test_nested_inputs_and_outputs_carry_gradients_and_keep_the_schedule(run_ranks):
    assert run_ranks(2, _nested) == [([GATHERS, BACKWARD], True, True)] * 2


def _evaluation(mode: str, order: list[str]) -> list[str]:
    """What differs from the plain model, or is left whole, in rounds of evaluation and training."""
    model, plain = stack.shard(stack.build()), stack.build()
    wrong = []
    for round_, what in enumerate(order):
        if what == "evaluate":
            with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
                if not torch.equal(model.eval()(stack.batch()), plain(stack.batch())):
                    wrong.append(f"outputs differ in round {round_}")
            if not all(isinstance(p, DTensor) for p in model.parameters()):
                wrong.append(f"a unit was left whole in round {round_}")
            continue
        model.train()
        stack.step(model, round_)
        stack.step(plain, round_)
        if not all(
            torch.equal(stack.whole(a.grad), b.grad)
            for a, b in zip(model.parameters(), plain.parameters(), strict=True)
        ):
            wrong.append(f"gradients differ in round {round_}")
    return wrong


@pytest.mark.parametrize("first", ["train", "evaluate"])
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_evaluation_leaves_rows_and_training_goes_on_after_it(run_ranks, world_size, mode, first):
    second = "evaluate" if first == "train" else "train"
    order = [first, second] * 2
    assert run_ranks(world_size, _evaluation, mode, order) == [[]] * world_size


class Encoder(stack.Stack):
    """Has a second method that computes with its parameters."""

    def encode(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return self.layers[0](self.front(x)) * scale


def _other_method() -> list[bool]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Encoder()
    plain = copy.deepcopy(model)
    stack.shard(model)
    minifsdp.register_fsdp_forward_method(model, "encode")
    minifsdp.register_fsdp_forward_method(plain, "encode")
    results = []
    for _ in range(2):
        outputs = [m.encode(stack.batch(), scale=0.5) for m in (model, plain)]
        results.append(torch.equal(*outputs))
        for output in outputs:
            output.sum().backward()
        stack.step(model)
        stack.step(plain)
    grads = [[stack.whole(p.grad) for p in m.parameters()] for m in (model, plain)]
    results.append(all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(*grads, strict=True)))
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_registered_method_is_a_forward(run_ranks, world_size):
    assert run_ranks(world_size, _other_method) == [[True] * 3] * world_size


class Failing(stack.Block):
    """Raises on demand, in forward or in backward."""

    fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.fails == "backward":
            x.register_hook(self.fail)
        elif self.fails == "forward":
            self.fail(x)
        return x

    def fail(self, _: torch.Tensor) -> None:
        raise KeyError("on purpose")


def _after_an_exception(where: str, reset: bool) -> bool:
    """Whether gradients are right after an iteration that raised."""
    model, plain = stack.shard(stack.build(Failing)), stack.build(Failing)
    optimizer = torch.optim.SGD(model.parameters())
    stack.step(model)
    model.layers[1].fails = where
    with pytest.raises(KeyError, match="on purpose"):
        stack.step(model)
    model.layers[1].fails = ""
    if reset:
        model.reset_iter_state()
    optimizer.zero_grad()
    stack.step(model)
    stack.step(plain)
    return all(
        torch.equal(stack.whole(a.grad), b.grad)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.parametrize("reset", [True, False], ids=["reset by hand", "not reset"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_iteration_that_raised_does_not_spoil_the_next(run_ranks, where, reset):
    assert run_ranks(2, _after_an_exception, where, reset) == [True, True]

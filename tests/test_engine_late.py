"""Gradients that come late, twice or by keyword are all counted, and each thing is told once."""

from __future__ import annotations

import gc

import stack
import torch
import torch.distributed as dist
from test_stepping import Watched, backward, settings_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import linear

from minifsdp import MixedPrecisionPolicy, events, fully_shard, step_in_backward
from minifsdp.collectives import use_collectives


class Early(nn.Module):
    """Uses a unit's weight before the unit itself, so that its gradient comes after."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(3, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(torch.tanh(linear(x, self.block.weight)))


def _after_the_units_backward() -> None:
    torch.manual_seed(0)
    model, plain = Early(), Early()
    plain.load_state_dict(model.state_dict())
    fully_shard(model.block)
    fully_shard(model)
    model.block.unshard()
    for either in (model, plain):
        either(torch.ones(2, 3)).sum().backward()
    torch.testing.assert_close(stack.whole(model.block.weight.grad), plain.block.weight.grad)


def test_gradients_that_come_after_the_units_backward_are_reduced(run_ranks):
    run_ranks(2, _after_the_units_backward)


class Sometimes(nn.Module):
    """Two units, of which the second runs when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.second(x) if both else x


def _of_an_earlier_micro_batch_only() -> None:
    torch.manual_seed(0)
    model, plain = Sometimes(), Sometimes()
    plain.load_state_dict(model.state_dict())
    for module in (model.first, model.second, model):
        fully_shard(module)
    for syncs in (False, True):
        model.set_requires_gradient_sync(syncs)
        for either in (model, plain):
            either(torch.ones(2, 3), both=not syncs).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(stack.whole(ours.grad), theirs.grad)


def test_a_unit_with_gradients_of_an_earlier_micro_batch_only_is_reduced(run_ranks):
    run_ranks(2, _of_an_earlier_micro_batch_only)


def _two_under_way() -> None:
    use_collectives("direct")  # whose reductions can be left under way
    model, reference = stack.shard(stack.build()), stack.shard(stack.build())
    model.set_reduce_scatter_max_input_buffers(100)
    model.set_is_last_backward(False)
    stack.step(model, dist.get_rank())
    assert all(p.grad is None for p in model.parameters())
    model.set_is_last_backward(True)
    stack.step(model, 2 + dist.get_rank())
    for step in (0, 2):
        stack.step(reference, step + dist.get_rank())
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(stack.local(ours.grad), stack.local(theirs.grad))


def test_a_second_reduction_of_a_unit_takes_the_first_one_in(run_ranks):
    run_ranks(2, _two_under_way)


def _over_replicas(how: str) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with use_collectives(how):
        model = stack.shard(stack.build(), mesh=mesh)
        stack.step(model, dist.get_rank())
    return [stack.local(p.grad) for p in model.parameters()]


def _every_stage_is_waited_for() -> None:
    pairs = zip(_over_replicas("direct"), _over_replicas("shared"), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_reduction_of_several_stages_is_over_when_backward_is(run_ranks):
    run_ranks(4, _every_stage_is_waited_for)


def _at_rest_after_backward() -> None:
    model = stack.shard(stack.build(), **settings_of("offload"))
    optimizer = step_in_backward(model, lambda params: Watched(params, []))
    backward(model, 0)
    early = [stack.local(p).clone() for p in model.parameters()]
    optimizer.wait()
    now = [stack.local(p) for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(early, now, strict=True))


def test_parameters_are_at_rest_when_backward_returns(run_ranks):
    run_ranks(1, _at_rest_after_backward)


class Ordered(nn.Module):
    """Three units that run in the order that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, order: str) -> torch.Tensor:
        for name in order:
            x = torch.tanh(getattr(self, name)(x))
        return x


def _another_order() -> list[str]:
    model = Ordered()
    for module in (model.a, model.b, model.c, model):
        fully_shard(module)
    x = torch.ones(2, 3)
    model(x, "abc").sum().backward()
    with stack.messages() as seen:
        model(x, "cab")
    return sorted(seen)


def test_in_another_order_each_unit_is_still_gathered_once(run_ranks):
    assert run_ranks(2, _another_order) == [["AG a", "AG b", "AG c"]] * 2


def _gone() -> list[str]:
    model = Ordered()
    for module in (model.a, model.b, model.c, model):
        fully_shard(module)
    x = torch.ones(2, 3)
    for _ in range(2):
        model(x, "abc").sum().backward()
    del model.b
    gc.collect()
    with stack.messages() as seen:
        model(x, "ac").sum().backward()
    return seen


def test_a_unit_whose_module_was_deleted_is_passed_over(run_ranks):
    assert run_ranks(2, _gone) == [["AG a", "AG c", "AG c", "AG a", "RS c", "RS a"]] * 2


def _heard() -> list[str]:
    model = stack.shard(stack.build())
    stack.step(model)
    seen: list[events.Event] = []
    with events.listening(lambda _: None), events.listening(seen.append):
        stack.step(model)
    heard = [e.kind for e in seen if e.unit == "layers.1"]
    stack.step(model)
    assert heard == [e.kind for e in seen if e.unit == "layers.1"]
    return heard


def test_every_listener_hears_what_a_unit_does_in_order_while_it_listens(run_ranks):
    heard = ["all_gather", "unshard", "forward", "reshard"]
    heard += ["all_gather", "unshard", "backward", "reshard", "reduce_scatter", "reduced"]
    assert run_ranks(2, _heard) == [heard] * 2
    heard.remove("reduce_scatter")  # one rank has no message to make
    assert run_ranks(1, _heard) == [heard]


def _reduced_at_once() -> list[str]:
    """What follows each reduction through shared memory, which is over when it has begun."""
    model = stack.shard(stack.build())
    seen: list[str] = []
    with events.listening(lambda e: seen.append(f"{e.kind} {e.unit}")):
        stack.step(model)
    return [seen[i + 1] for i, told in enumerate(seen) if told.startswith("reduce_scatter")]


def test_a_reduction_that_is_over_is_handed_out_at_once(run_ranks):
    handed_out = [f"reduced {unit}" for unit in ("layers.2", "layers.1", "layers.0", "root")]
    assert run_ranks(2, _reduced_at_once) == [handed_out] * 2


class ByKeyword(stack.Stack):
    """Gives its blocks their input by keyword."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.front(x)
        for layer in self.layers:
            x = layer(x=x)
        return self.back(x)


def _by_keyword() -> None:
    model = stack.shard(ByKeyword())
    stack.step(model)
    loss = model(stack.batch()).sum()
    with stack.messages() as seen:
        loss.backward()
    assert seen[:3] == ["AG layers.2", "AG layers.1", "RS layers.2"]  # before the whole is over
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    model = ByKeyword()
    dtypes: list[torch.dtype] = []
    for layer in model.layers:
        layer.up.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
        fully_shard(layer, mp_policy=policy)
    stack.step(fully_shard(model))
    assert dtypes == [torch.bfloat16] * 3


def test_inputs_by_keyword_are_cast_and_end_their_units_backward(run_ranks):
    run_ranks(2, _by_keyword)


class TwoOutputs(nn.Module):
    """A unit, used twice, whose two outputs both get gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Both()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.stack(self.block(x)).sum(0)
        return x


class Both(nn.Module):
    """Two layers side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.left(x)), torch.tanh(self.right(x))


def _two_outputs() -> list[str]:
    model = TwoOutputs()
    fully_shard(model.block)
    fully_shard(model)
    seen: list[str] = []
    loss = model(torch.ones(2, 3)).sum()
    with events.listening(lambda e: seen.append(e.kind) if e.unit == "block" else None):
        loss.backward()
    return seen


def test_two_outputs_of_one_use_begin_one_backward(run_ranks):
    use = ["all_gather", "unshard", "backward", "reshard"]
    assert run_ranks(2, _two_outputs) == [[*use, *use, "reduce_scatter", "reduced"]] * 2

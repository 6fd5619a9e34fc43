"""After an error, and after a forward of a part, messages and prefetching are as ever."""

from __future__ import annotations

import gc
import weakref

import pytest
import stack
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from minifsdp import collectives, fully_shard
from minifsdp.collectives import use_collectives


class Refused(Exception):
    """What tests raise in the middle of an iteration."""


def refuse(*_: object) -> None:
    raise Refused


def iteration(model: stack.Stack) -> list[str]:
    """Messages of an iteration, and in forward where blocks compute."""
    marks = {f"layers.{i}": block.up for i, block in enumerate(model.layers)}
    with stack.messages() as seen:
        handles = [
            layer.register_forward_pre_hook(lambda *_, n=name: seen.append(f"compute {n}"))
            for name, layer in marks.items()
        ]
        loss = model(stack.batch()).sum()
        seen.append("backward")
        loss.backward()
    for handle in handles:
        handle.remove()
    return seen


def fail(model: stack.Stack, where: str) -> None:
    """Raise in an iteration, in a block."""
    block = model.layers[1]
    if where == "backward":
        handle = block.down.register_full_backward_pre_hook(refuse)
    else:
        handle = block.register_forward_pre_hook(refuse)  # once the block has been entered
    with pytest.raises(Refused):
        if where == "the forward of a part":
            block(torch.ones(5, stack.DIM))
        else:
            model(stack.batch()).sum().backward()
    handle.remove()


def _as_ever(where: str, how: str) -> None:
    use_collectives(how)
    model = stack.shard(stack.build())
    iteration(model)
    usual = iteration(model)
    for _ in range(2):
        fail(model, where)
        assert iteration(model) == usual
    model.layers[2](torch.ones(5, stack.DIM))  # alone, and without an error
    begun = usual.index("backward")
    assert iteration(model)[begun:] == usual[begun:]
    iteration(model)  # a forward prefetches what followed in the last one
    fail(model, where)
    model.reset_iter_state()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert iteration(model) == usual


@pytest.mark.parametrize("how", ["shared", "direct"])
@pytest.mark.parametrize("where", ["forward", "backward", "the forward of a part"])
def test_after_an_error_messages_and_prefetching_are_as_ever(run_ranks, where, how):
    run_ranks(2, _as_ever, where, how)


def _frees_itself() -> list[bool]:
    """Whether units are gone with the model, without the garbage collector, after an error."""
    use_collectives("direct")  # whose reductions can be under way when backward raises
    gc.collect()
    gc.disable()
    try:
        model = stack.shard(stack.build())
        iteration(model)
        kept = collectives.idle_nbytes()
        handle = model.layers[0].down.register_full_backward_pre_hook(refuse)
        with pytest.raises(Refused):
            model(stack.batch()).sum().backward()
        handle.remove()
        del handle
        for _ in range(2):
            model.reset_iter_state()
            units = [layer._unit() for layer in model.layers]
            assert not any(unit.reducer.held()["reducing"] for unit in units)
        assert collectives.idle_nbytes() == kept  # no message is left on its way
        refs = [weakref.ref(unit) for unit in units]
        del model, units
        return [ref() is None for ref in refs]
    finally:
        gc.enable()


def test_a_model_that_was_deleted_after_an_error_frees_itself(run_ranks):
    assert run_ranks(2, _frees_itself) == [[True] * 3] * 2


def _partial_sums_are_lost() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, reference = (stack.shard(stack.build(), mesh=mesh) for _ in range(2))
    model.set_requires_all_reduce(False)
    stack.step(model, seed=1)
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    for either in (model, reference):
        stack.step(either, seed=2)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    assert all(torch.equal(stack.local(a.grad), stack.local(b.grad)) for a, b in pairs)


def test_resetting_an_iteration_forgets_sums_that_were_not_all_reduced(run_ranks):
    run_ranks(4, _partial_sums_are_lost)


class Body(nn.Module):
    """Two blocks in a body that can be run on its own, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def whole_iteration(model: nn.Module, x: torch.Tensor) -> list[str]:
    """Messages, after an iteration as always."""
    model(x).sum().backward()
    with stack.messages() as seen:
        loss = model(x).sum()
        seen.append("backward")
        loss.backward()
    return seen


def of_the_body(model: nn.Module, x: torch.Tensor) -> list[str]:
    """Messages of the body's forward, and when its first block computes."""
    with stack.messages() as seen:
        handle = model.body[0].register_forward_pre_hook(lambda *_: seen.append("compute"))
        model.body(x)
    handle.remove()
    return seen


def _a_part_alone() -> None:
    model = Body()
    for module in (*model.body, model.body, model):
        fully_shard(module)
    x = torch.ones(2, 3)
    usual = whole_iteration(model, x)
    model.body(x)
    assert of_the_body(model, x) == ["AG body.0", "AG body.1", "compute"]
    handle = model.body[1].register_forward_pre_hook(refuse)
    with pytest.raises(Refused):
        model.body(x)
    handle.remove()
    assert of_the_body(model, x) == ["AG body.0", "AG body.1", "compute"]
    assert whole_iteration(model, x) == usual


def test_a_part_that_runs_on_its_own_prefetches_and_does_not_disturb_the_whole(run_ranks):
    run_ranks(2, _a_part_alone)


class Skipping(nn.Module):
    """A second unit that forward runs only if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if both else x


def _gathered_for_nothing(how: str) -> None:
    use_collectives(how)
    model = Skipping()
    for module in (model.first, model.second, model):
        fully_shard(module)
    x = torch.ones(2, 3)
    model(x, both=True).sum().backward()
    with stack.messages() as seen:
        model(x, both=False)
    assert seen == ["AG first", "AG second"]
    for module in (model.first, model.second):
        assert module._unit().held() == {"unsharded": 0, "gathering": 0}
    model.second.set_modules_to_backward_prefetch([model.first])
    loss = model.second(x).sum()
    loss.backward()  # gathers the first ahead, whose backward does not come
    assert model.first._unit().held() == {"unsharded": 0, "gathering": 0}
    model.first.set_modules_to_backward_prefetch([model.second])
    model(x, both=True).sum().backward()  # gathers the second ahead, whose backward is over
    assert model.second._unit().held() == {"unsharded": 0, "gathering": 0}


@pytest.mark.parametrize("how", ["shared", "direct"])
def test_what_was_gathered_ahead_for_nothing_is_dropped_when_the_pass_ends(run_ranks, how):
    run_ranks(2, _gathered_for_nothing, how)


def _hooks_see_whole_parameters() -> list[bool]:
    seen = []
    layer = nn.Linear(4, 6)
    layer.register_forward_pre_hook(
        lambda module, _: seen.append(isinstance(module.weight, DTensor))
    )
    fully_shard(layer)(torch.ones(1, 4))
    return seen


def test_hooks_that_were_there_before_see_whole_parameters(run_ranks):
    assert run_ranks(2, _hooks_see_whole_parameters) == [[False]] * 2

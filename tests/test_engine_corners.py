"""Corners that breaking the engine line by line has shown to need a test of their own."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as upstream
from parity import PRECISIONS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import minifsdp
from minifsdp import events, fully_shard
from minifsdp.collectives import use_collectives


def data(step: int = 0) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def layers(count: int = 3, dim: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(dim, dim), nn.Tanh()) for _ in range(count)])


def sharded(model: nn.Module, engine: ModuleType = minifsdp, **settings) -> nn.Module:
    for block in dict.fromkeys(model):
        engine.fully_shard(block, **settings)
    return engine.fully_shard(model, **settings)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# --- two contributions to one gradient before the unit's backward is over


class TwiceRecomputed(nn.Module):
    """Uses one layer in two segments that are recomputed one after the other in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(lambda t: torch.tanh(self.layer(t)), x, use_reentrant=True)
        return x


def _twice(engine: ModuleType, precision: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    policy = engine.MixedPrecisionPolicy(*PRECISIONS[precision])
    model = engine.fully_shard(TwiceRecomputed(), mp_policy=policy)
    for step in range(2):
        model(data(step).requires_grad_()).float().square().mean().backward()
    return gradients(model)


def _contributions(precision: str) -> None:
    assert equal(_twice(minifsdp, precision), _twice(upstream, precision))


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_contributions_are_added_before_they_are_rounded(run_ranks, precision):
    for world_size in (1, 3):
        run_ranks(world_size, _contributions, precision)


# --- parameters that no rank uses, inside a unit that is used


class Partial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def _partial(engine: ModuleType) -> tuple[list[str], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = engine.fully_shard(Partial())
    for step in range(2):
        model(data(step)).square().mean().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None]
    return without, gradients(model)


def _unused_everywhere() -> None:
    (without, ours), (_, theirs) = _partial(minifsdp), _partial(upstream)
    assert without == ["unused.weight", "unused.bias"]
    assert equal(ours, theirs)


def test_parameters_that_no_rank_uses_get_no_gradient_and_leave_the_others_bits(run_ranks):
    for world_size in (2, 3):
        run_ranks(world_size, _unused_everywhere)


class Ignoring(nn.Module):
    """Takes two inputs and uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, used: torch.Tensor, ignored: torch.Tensor) -> torch.Tensor:
        return self.layer(used)


def _ignored_input() -> None:
    model = fully_shard(Ignoring())
    used, ignored = data().requires_grad_(), data(1).requires_grad_()
    model(used, ignored).sum().backward()
    assert used.grad is not None
    assert ignored.grad is None  # as in a plain model: not zeros


def test_an_input_that_a_unit_ignores_gets_no_gradient(run_ranks):
    run_ranks(2, _ignored_input)


# --- a few neighbours


def _near() -> None:
    model = sharded(layers(), reshard_after_forward=2)
    reference = sharded(layers(), upstream, reshard_after_forward=2)
    model(data())
    reference(data())
    plain = layers().parameters()
    for ours, theirs, whole in zip(model.parameters(), reference.parameters(), plain, strict=True):
        assert torch.equal(ours.device_mesh.mesh, theirs.device_mesh.mesh)
        assert torch.equal(ours.full_tensor(), whole)
    model.reshard()
    for block in model:
        block.reshard()
        assert not block._unit()._near_parts  # nor is a byte kept
    reference = sharded(layers(), upstream)
    for either in (model, reference):
        either(data(1)).square().mean().backward()
    assert equal(gradients(model), gradients(reference))


def test_rows_are_kept_by_upstreams_neighbours_and_can_be_given_up(run_ranks):
    run_ranks(4, _near)


def _gathered_in_backward(model: nn.Module) -> list[int]:
    seen: list[events.Event] = []
    loss = model(data()).sum()
    with events.listening(seen.append):
        loss.backward()
    return [e.nbytes for e in seen if e.kind == "all_gather"]


def _near_no_more() -> None:
    model = sharded(layers(), reshard_after_forward=2)
    few = _gathered_in_backward(model)
    model.set_reshard_after_forward(True)
    everyone = _gathered_in_backward(model)
    assert few == [3 * 2 * 4 * 6] * 3 and everyone == [2 * 4 * 4 * 6] * 3


def test_set_reshard_after_forward_replaces_an_int(run_ranks):
    run_ranks(4, _near_no_more)


# --- schedules


def _order_of_a_unit_used_twice() -> list[str]:
    blocks = layers()
    model = sharded(nn.Sequential(blocks[0], blocks[1], blocks[1], blocks[2]))
    model(data()).sum().backward()
    seen: list[str] = []
    with events.listening(lambda e: seen.append(f"{e.kind} {e.unit}") if e.nbytes else None):
        loss = model(data()).sum()
        seen.append("backward")
        loss.backward()
    return seen


def test_a_unit_used_twice_is_gathered_for_each_use_and_reduced_once(run_ranks):
    assert run_ranks(2, _order_of_a_unit_used_twice)[0] == [
        "all_gather 0",
        "all_gather 1",
        "all_gather 1",
        "all_gather 3",
        "backward",
        "all_gather 3",
        "all_gather 1",
        "reduce_scatter 3",
        "all_gather 1",
        "all_gather 0",
        "reduce_scatter 1",
        "reduce_scatter 0",
    ]


def _sync_again(engine: ModuleType) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(layers(), engine, mesh=mesh)
    model.set_requires_all_reduce(False)
    model.set_requires_gradient_sync(True)
    model(data()).square().mean().backward()
    return gradients(model)


def _syncing_means_all_reducing_too() -> None:
    assert equal(_sync_again(minifsdp), _sync_again(upstream))


def test_requiring_gradient_sync_requires_the_all_reduce_again(run_ranks):
    run_ranks(4, _syncing_means_all_reducing_too)


def _last_backward_from_a_child() -> None:
    use_collectives("direct")  # whose reductions can be left under way
    model = sharded(layers())
    model(data())
    model[1].set_is_last_backward(False)
    model(data()).square().mean().backward()
    assert any(p.grad is None for p in model.parameters())
    model[2].set_is_last_backward(True)
    model(data(1)).square().mean().backward()
    reference = sharded(layers())
    for step in range(2):
        reference(data(step)).square().mean().backward()
    assert equal(gradients(model), gradients(reference))


def test_is_last_backward_may_be_said_on_any_unit(run_ranks):
    run_ranks(2, _last_backward_from_a_child)

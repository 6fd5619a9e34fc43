"""Replicas, partial resharding, offloading and odd precisions compute upstream's bits."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import stack
import torch
import torch.distributed as dist
import torch.distributed.fsdp as upstream
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import minifsdp

FLOAT = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


def _trained(engine: ModuleType, policy: tuple, micro_batches: list[dict], **settings: Any):
    """Rows of gradients and parameters over three steps of several micro-batches each."""
    precision = engine.MixedPrecisionPolicy(*(FLOAT.get(name) for name in policy))
    model = stack.shard(stack.build(), engine, mp_policy=precision, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for i in range(3):
        for micro, flags in enumerate(micro_batches):
            model.set_requires_gradient_sync(flags.get("sync", True))
            model.set_requires_all_reduce(flags.get("all_reduce", flags.get("sync", True)))
            model.set_is_last_backward(flags.get("last", True))
            model.set_reshard_after_backward(flags.get("reshard", True))
            seen.append(stack.step(model, seed=100 * i + 10 * micro + dist.get_rank()))
        seen += [stack.local(p.grad).clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        seen += [stack.local(p).clone() for p in model.parameters()]
    return seen


AXES = ("replicate", "shard")
MICRO_BATCHES = {
    "plain": [{}],
    "synced": [{}, {}],
    "unsynced": [{"sync": False}, {"sync": False}, {}],
    "shards only": [{"all_reduce": False}, {"all_reduce": False}, {}],
    "kept whole": [{"sync": False, "last": False, "reshard": False}, {}],
}


def _bits_equal_upstream(settings: dict[str, Any], policy: tuple, micro_batches: str) -> bool:
    if "mesh" in settings:
        settings = settings | {
            "mesh": init_device_mesh("cpu", settings["mesh"], mesh_dim_names=AXES)
        }
    batches = MICRO_BATCHES[micro_batches]
    ours = _trained(minifsdp, policy, batches, **settings)
    theirs = _trained(upstream, policy, batches, **settings)
    assert any(t.any() for t in theirs)
    return stack.same_bits(ours, theirs)


@pytest.mark.parametrize("micro_batches", ["plain", "synced", "unsynced", "shards only"])
@pytest.mark.parametrize("policy", [(), ("bfloat16", "float32")], ids=str)
def test_bits_equal_upstream_on_two_replicas_of_two_shards(run_ranks, policy, micro_batches):
    answers = run_ranks(4, _bits_equal_upstream, {"mesh": (2, 2)}, policy, micro_batches)
    assert answers == [True] * 4


@pytest.mark.parametrize("mesh", [(4, 1), (1, 4)])
def test_bits_equal_upstream_on_a_mesh_with_one_shard_or_one_replica(run_ranks, mesh):
    assert run_ranks(4, _bits_equal_upstream, {"mesh": mesh}, (), "plain") == [True] * 4


@pytest.mark.parametrize("micro_batches", ["plain", "unsynced", "kept whole"])
def test_bits_equal_upstream_when_resharding_to_two_neighbours_of_four(run_ranks, micro_batches):
    settings = {"reshard_after_forward": 2}
    assert run_ranks(4, _bits_equal_upstream, settings, (), micro_batches) == [True] * 4


def test_bits_equal_upstream_on_replicas_that_reshard_to_fewer(run_ranks):
    settings = {"mesh": (1, 4), "reshard_after_forward": 2}
    policy = ("bfloat16", "float32")
    assert run_ranks(4, _bits_equal_upstream, settings, policy, "plain") == [True] * 4


@pytest.mark.parametrize("policy", [("float32", "float16"), ("float16", None)], ids=str)
def test_bits_equal_upstream_where_the_mean_is_divided_before_and_after(run_ranks, policy):
    assert run_ranks(3, _bits_equal_upstream, {}, policy, "plain") == [True] * 3


@pytest.mark.parametrize("micro_batches", ["synced", "kept whole"])
def test_bits_equal_upstream_with_full_parameters_kept_between_micro_batches(
    run_ranks, micro_batches
):
    assert run_ranks(2, _bits_equal_upstream, {}, (), micro_batches) == [True] * 2


def _messages_when_resharding_to_two() -> list[tuple[str, int]]:
    from minifsdp import events

    model = stack.shard(stack.build(), reshard_after_forward=2)
    loss = model(stack.batch()).sum()
    seen = []
    with events.listening(lambda e: seen.append((e.kind, e.unit, e.nbytes))):
        loss.backward()
    return [nbytes for kind, unit, nbytes in seen if (kind, unit) == ("all_gather", "layers.1")]


def test_backward_then_gathers_from_two_neighbours_only(run_ranks):
    padded = sum(-(-rows // 2) * columns for rows, columns in [(7, 6), (7, 1), (6, 7), (6, 1)]) * 2
    assert run_ranks(4, _messages_when_resharding_to_two) == [[padded * 4]] * 4


def _offloaded_and_not(pin_memory: bool, policy: tuple) -> list[bool]:
    """Whether offloading changes a bit, on the CPU, and where things are kept."""
    offload = minifsdp.CPUOffloadPolicy(pin_memory=pin_memory)
    precision = minifsdp.MixedPrecisionPolicy(*(FLOAT.get(name) for name in policy))
    model = stack.shard(stack.build(), mp_policy=precision, offload_policy=offload)
    without = stack.shard(stack.build(), mp_policy=precision)
    seed = 50 * dist.get_rank()
    equal = stack.same_bits(stack.train(model, seed=seed), stack.train(without, seed=seed))
    return [equal, all(p.device.type == "cpu" for p in model.parameters())]


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("policy", [(), ("bfloat16", "float32")], ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_offloading_without_a_gpu_trains_to_the_same_bits(
    run_ranks, world_size, policy, pin_memory
):
    answers = run_ranks(world_size, _offloaded_and_not, pin_memory, policy)
    assert answers == [[True, True]] * world_size


def _bits_of_fp64(engine: ModuleType) -> list[torch.Tensor]:
    model = stack.shard(stack.build().double(), engine)
    model(stack.batch(dist.get_rank()).double()).square().mean().backward()
    return [stack.local(p.grad) for p in model.parameters()]


def _fp64_equals_upstream() -> bool:
    return stack.same_bits(_bits_of_fp64(minifsdp), _bits_of_fp64(upstream))


@pytest.mark.parametrize("world_size", [2, 3])
def test_bits_equal_upstream_in_fp64(run_ranks, world_size):
    assert run_ranks(world_size, _fp64_equals_upstream) == [True] * world_size


def _one_group_of_modules(engine: ModuleType) -> list[torch.Tensor]:
    """Two layers as one unit inside a root, and the order in which the unit holds them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5), nn.Linear(5, 2))
    engine.fully_shard([model[0], model[2]])
    engine.fully_shard(model)
    return stack.train(model, seed=50 * dist.get_rank())


def _grouped_equals_upstream() -> bool:
    return stack.same_bits(_one_group_of_modules(minifsdp), _one_group_of_modules(upstream))


@pytest.mark.parametrize("world_size", [2, 4])
def test_bits_equal_upstream_with_two_modules_in_one_unit(run_ranks, world_size):
    assert run_ranks(world_size, _grouped_equals_upstream) == [True] * world_size

"""What a sharded module's methods change is changed, and handles keep nothing alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import stack
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from minifsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from minifsdp.collectives import Peers, choose, use_collectives


def gathers_in_backward(model: nn.Module) -> list[str]:
    loss = model(stack.batch()).sum()
    with stack.messages() as seen:
        loss.backward()
    return [message for message in seen if message.startswith("AG")]


def _resharding_is_set() -> None:
    model = stack.shard(stack.build())
    usual = gathers_in_backward(model)
    model.set_reshard_after_forward(False)
    assert gathers_in_backward(model) == []
    model.set_reshard_after_forward(True, recurse=False)
    assert gathers_in_backward(model) == ["AG root"]
    model.set_reshard_after_forward(True)
    assert sorted(gathers_in_backward(model)) == sorted([*usual, "AG root"])


def test_set_reshard_after_forward_says_what_backward_gathers_again(run_ranks):
    run_ranks(2, _resharding_is_set)


def _numbers_that_say_something_else() -> None:
    size = dist.get_world_size()
    for number in {1, size}:
        with pytest.warns(UserWarning, match=f"reshard_after_forward={number} means"):
            unit = fully_shard(nn.Linear(2, 2), reshard_after_forward=number)._unit()
        assert unit.near is None
        assert unit.reshard_after_forward is (number > 1)


def test_one_rank_means_no_resharding_and_all_ranks_mean_the_usual(run_ranks):
    for world_size in (1, 2):
        run_ranks(world_size, _numbers_that_say_something_else)


def _kept_after_backward() -> None:
    model = stack.shard(stack.build())
    model.set_reshard_after_backward(False)
    stack.step(model)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    with stack.messages() as seen:
        model(stack.batch())
    assert seen == []
    model.set_reshard_after_backward(True, recurse=False)
    stack.step(model)
    assert isinstance(model.front.weight, DTensor)
    assert not isinstance(model.layers[0].up.weight, DTensor)


def test_set_reshard_after_backward_keeps_parameters_for_the_next_forward(run_ranks):
    run_ranks(2, _kept_after_backward)


def _built_anew() -> None:
    model = fully_shard(nn.Linear(3, 5))
    other = type(model)(7, 2)
    assert type(other) is nn.Linear and other.weight.shape == (2, 7)


def test_building_a_sharded_class_builds_the_module_underneath(run_ranks):
    run_ranks(1, _built_anew)


def _choices_nest() -> list[str]:
    peers, cpu = Peers.of(dist.group.WORLD), torch.device("cpu")
    names = []
    with use_collectives("backend"):
        with use_collectives("direct"):
            names.append(choose(peers, cpu).name)
        names.append(choose(peers, cpu).name)
    return [*names, choose(peers, cpu).name]


def test_a_choice_of_collectives_for_a_block_gives_back_the_one_before(run_ranks):
    assert run_ranks(2, _choices_nest) == [["direct", "backend", "shared"]] * 2


def _waited_for() -> None:
    use_collectives("direct")
    model = stack.shard(stack.build())
    handle = model.layers[0].unshard(async_op=True)
    assert isinstance(model.layers[0].up.weight, DTensor)  # not before it is waited for
    handle.wait()
    assert not isinstance(model.layers[0].up.weight, DTensor)
    model.layers[0].reshard()
    other = model.layers[0].unshard(async_op=True)
    handle.wait()
    assert isinstance(model.layers[0].up.weight, DTensor)  # that was another unshard's
    other.wait()
    gc.collect()
    unit = weakref.ref(model.layers[0]._unit())
    del model
    assert unit() is None


def test_a_handle_is_waited_for_once_and_does_not_keep_its_model(run_ranks):
    run_ranks(2, _waited_for)


def _zeroed_in_place() -> None:
    model = stack.shard(stack.build())
    stack.step(model)
    before = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=False)
    assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))
    assert not any(p.grad.to_local().any() for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_gradients_can_be_set_to_zero_in_place(run_ranks):
    run_ranks(2, _zeroed_in_place)


def _seen_by_a_hook(force_sum: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What a hook sees, and the gradient."""
    seen = []
    model = fully_shard(nn.Linear(1, 2, bias=False))
    model.set_force_sum_reduction_for_comms(force_sum)
    model.set_all_reduce_hook(lambda rows: seen.append(rows.clone()))
    model(torch.full((1, 1), 6.0)).sum().backward()
    return seen[0], model.weight.grad.to_local()[:, 0]


def _divided_afterwards() -> None:
    average, sum_ = torch.tensor([6.0]), torch.tensor([12.0])
    assert torch.equal(torch.stack(_seen_by_a_hook(False)), torch.stack([average, average]))
    assert torch.equal(torch.stack(_seen_by_a_hook(True)), torch.stack([sum_, average]))


def test_a_forced_sum_is_divided_after_the_hook_has_seen_it(run_ranks):
    run_ranks(2, _divided_afterwards)


def _divided_on_one_rank() -> None:
    model = fully_shard(nn.Linear(1, 2, bias=False).double())
    model.set_gradient_divide_factor(8.0)  # of float64: by 4 before the sum, by 2 after
    model.set_all_reduce_hook(lambda rows: rows.add_(1.0))
    model(torch.full((1, 1), 8.0, dtype=torch.float64)).sum().backward()
    assert torch.equal(model.weight.grad.to_local(), torch.full((2, 1), 1.5, dtype=torch.float64))


def test_on_one_rank_too_gradients_are_divided_before_and_after_the_hook(run_ranks):
    run_ranks(1, _divided_on_one_rank)


def _in_the_dtype_of_reduction() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = fully_shard(nn.Linear(1, 2, bias=False), mp_policy=policy)
    model.set_gradient_divide_factor(3.0)
    model(torch.full((1, 1), 7.0)).sum().backward()
    assert torch.equal(model.weight.grad.to_local(), torch.full((2, 1), 7.0) / 3)


def test_one_rank_divides_in_the_dtype_of_reduction(run_ranks):
    run_ranks(1, _in_the_dtype_of_reduction)


def _partial_sums() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = stack.shard(stack.build(), mesh=mesh)
    for reduces in (False, True):
        model.set_requires_all_reduce(reduces)
        with stack.messages() as seen:
            stack.step(model)
        assert [m for m in seen if m.startswith("AR")] == (
            ["AR layers.2", "AR layers.1", "AR layers.0", "AR root"] if reduces else []
        )


def test_replicas_are_reduced_only_when_it_is_required(run_ranks):
    run_ranks(4, _partial_sums)


def _taken_once() -> None:
    model = stack.shard(stack.build())
    event = object()
    model.set_post_optim_event(event)
    assert model._unit().post_optim_event is event
    model(stack.batch())
    assert model._unit().post_optim_event is None


def test_the_optimizers_event_is_for_the_next_forward_only(run_ranks):
    run_ranks(1, _taken_once)


class Encoder(nn.Module):
    """Has a second way in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.encode(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.outer(x))


def _forward_by_another_name() -> None:
    model = nn.Sequential(Encoder(), nn.Linear(3, 3))
    encoder = fully_shard(model[0])
    fully_shard(model)
    model(torch.ones(1, 3))
    register_fsdp_forward_method(encoder, "encode")
    with stack.messages() as seen:
        out = encoder.encode(torch.ones(1, 3))
    assert seen == ["AG 0"] and isinstance(encoder.outer.weight, DTensor)
    with stack.messages() as seen:
        out.sum().backward()
    assert seen == ["AG 0", "RS 0"]
    with pytest.raises(ValueError, match="no method 'decode'"):
        register_fsdp_forward_method(encoder, "decode")
    register_fsdp_forward_method(nn.Linear(1, 1), "decode")  # not sharded: nothing to do


def test_a_method_registered_as_a_forward_gathers_reshards_and_reduces(run_ranks):
    run_ranks(2, _forward_by_another_name)

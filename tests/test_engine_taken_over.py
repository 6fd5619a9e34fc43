"""What is put in a parameter's place is what trains, and all of it is compared with replicas."""

from __future__ import annotations

import pytest
import stack
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from minifsdp import debug, fully_shard


def _assigned_and_trained() -> None:
    source, model = stack.shard(stack.build(seed=1)), stack.shard(stack.build(seed=2))
    stack.step(model)
    state = {name: value.clone() for name, value in source.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assigned = dict(model.named_parameters())
    for either in (source, model):
        optimizer = torch.optim.SGD(either.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            stack.step(either)
            optimizer.step()
    assert all(p is assigned[name] for name, p in model.named_parameters())
    pairs = zip(source.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(stack.local(a), stack.local(b)) for a, b in pairs)


def test_parameters_that_were_assigned_are_those_that_train(run_ranks):
    for world_size in (1, 2):
        run_ranks(world_size, _assigned_and_trained)


def _replaced_before_the_first_forward() -> None:
    model, twice = stack.shard(stack.build()), stack.shard(stack.build())
    weight = model.front.weight
    model.front.weight = nn.Parameter(weight.detach() * 2)
    with torch.no_grad():
        twice.front.weight.mul_(2)
    assert torch.equal(model(stack.batch()), twice(stack.batch()))
    model.reshard()
    assert torch.equal(stack.local(model.front.weight), stack.local(weight) * 2)


def test_a_parameter_that_was_replaced_before_the_first_forward_is_taken_over(run_ranks):
    run_ranks(2, _replaced_before_the_first_forward)


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def _parted() -> None:
    torch.manual_seed(0)
    model, plain = fully_shard(Tied()), Tied()
    plain.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
    model.first.weight = nn.Parameter(model.first.weight.detach() * 2)
    with torch.no_grad():
        plain.first.weight.mul_(2)
    x = torch.ones(1, 4)
    assert torch.equal(model(x), plain(x))
    model.reshard()
    assert model.last.weight is model.first.weight


def test_of_ties_that_were_parted_the_first_is_taken_over_and_tied_again(run_ranks):
    for world_size in (1, 2):
        run_ranks(world_size, _parted)


def _unequal_in_a_second_dtype() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    layer = nn.Linear(2, 2)
    layer.bias = nn.Parameter(torch.full((2,), dist.get_rank()), requires_grad=False)
    fully_shard(layer, mesh=mesh)
    with debug.checks(), pytest.raises(RuntimeError, match="starts with different parameters"):
        layer(torch.ones(1, 2))


def test_replicas_that_differ_in_frozen_integers_only_are_found(run_ranks):
    run_ranks(2, _unequal_in_a_second_dtype)


class Shared(nn.Module):
    """One layer under two names, and within another module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.inner = nn.Sequential(self.first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(x))


def _owned_once() -> list[int]:
    return [len(param.owners) for param in fully_shard(Shared())._unit().params]


def test_a_module_that_is_there_twice_owns_its_parameters_once(run_ranks):
    assert run_ranks(1, _owned_once) == [[1]]

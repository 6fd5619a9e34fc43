"""What a sharded model holds between steps: rows in DTensors, the same ones upstream would hold."""

from __future__ import annotations

import pytest
import stack
import torch
import torch.distributed as dist
import torch.distributed.fsdp as upstream
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import minifsdp


class Odd(nn.Module):
    """Parameters of 1, 2, 7 and 8 rows, of one to four dimensions, and one without rows."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"one": (1, 5), "two": (2,), "seven": (7, 3), "eight": (8, 2, 3)}
        shapes |= {"deep": (5, 2, 1, 3), "none": (0, 3)}
        for name, shape in shapes.items():
            numel = torch.Size(shape).numel()
            value = torch.arange(numel, dtype=torch.float32).view(shape)
            self.register_parameter(name, nn.Parameter(value, requires_grad=name != "two"))

    def forward(self) -> torch.Tensor:
        return sum(p.sum() for p in self.parameters())


def _described(model: nn.Module) -> list[dict]:
    described = []
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        assert isinstance(param, nn.Parameter)
        rows = param.to_local()
        described.append(
            {
                "name": name,
                "shape": param.shape,
                "stride": param.stride(),
                "placements": param.placements,
                "requires_grad": param.requires_grad,
                "dtype": param.dtype,
                "rows' shape": rows.shape,
                "rows": rows.tolist(),
            }
        )
    return described


def _differs_from_upstream() -> list[tuple]:
    ours, theirs = minifsdp.fully_shard(Odd()), upstream.fully_shard(Odd())
    assert all(p.placements == (Shard(0),) for p in ours.parameters())
    return [
        (a["name"], key, a[key], b[key])
        for a, b in zip(_described(ours), _described(theirs), strict=True)
        for key in a
        if a[key] != b[key]
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parameters_are_dtensors_with_upstreams_rows(run_ranks, world_size):
    assert run_ranks(world_size, _differs_from_upstream) == [[]] * world_size


def _rows_by_name() -> dict[str, int]:
    model = minifsdp.fully_shard(Odd())
    return {name: len(param.to_local()) for name, param in model.named_parameters()}


def test_two_rows_on_four_ranks_are_1_1_0_0_and_seven_are_2_2_2_1(run_ranks):
    rows = run_ranks(4, _rows_by_name)
    assert [here["two"] for here in rows] == [1, 1, 0, 0]
    assert [here["seven"] for here in rows] == [2, 2, 2, 1]


def _parameters_keep_identity() -> bool:
    model = stack.shard(stack.build())
    before = dict(model.named_parameters())
    stack.step(model)
    after = dict(model.named_parameters())
    return list(before) == list(after) and all(after[name] is before[name] for name in before)


def test_a_step_leaves_the_same_parameter_objects(run_ranks):
    assert run_ranks(2, _parameters_keep_identity) == [True, True]


def _state_dict_after_a_forward() -> list[str]:
    """What is wrong with a state dict taken while the root is whole, and loaded elsewhere."""
    source, target = stack.shard(stack.build(seed=1)), stack.shard(stack.build(seed=2))
    expected = source(stack.batch()).detach()
    target(stack.batch())
    assert not isinstance(source.front.weight, DTensor), "the root should be whole here"
    state = source.state_dict()
    wrong = [name for name, value in state.items() if not isinstance(value, DTensor)]
    wrong += [n for n, v in state.items() if v.placements != (Shard(0),)]
    target.load_state_dict(state)
    wrong += [n for n, p in target.named_parameters() if not isinstance(p, DTensor)]
    wrong += [
        name
        for name, param in target.named_parameters()
        if not torch.equal(param.to_local(), state[name].to_local())
    ]
    if not torch.equal(target(stack.batch()), expected):
        wrong.append("the forward after loading does not use what was loaded")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_state_after_a_forward_holds_rows_and_loads(run_ranks, world_size):
    assert run_ranks(world_size, _state_dict_after_a_forward) == [[]] * world_size


def _loading_by_assignment(after_a_step: bool) -> bool:
    source, target = stack.shard(stack.build(seed=1)), stack.shard(stack.build(seed=2))
    if after_a_step:
        stack.step(target)
    state = {name: value.clone() for name, value in source.state_dict().items()}
    target.load_state_dict(state, assign=True)
    return torch.equal(target(stack.batch()), source(stack.batch()))


@pytest.mark.parametrize("after_a_step", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_state_that_is_assigned_is_what_forward_uses(run_ranks, world_size, after_a_step):
    answers = run_ranks(world_size, _loading_by_assignment, after_a_step)
    assert answers == [True] * world_size


def _edited_rows_are_used() -> bool:
    """Rows that are set in place between steps, as an initialiser or an averager sets them."""
    model, plain = stack.shard(stack.build()), stack.build()
    stack.step(model)
    with torch.no_grad():
        for param in [*model.parameters(), *plain.parameters()]:
            param.fill_(0.25)
    return torch.equal(model(stack.batch()), plain(stack.batch()))


def test_rows_edited_between_steps_are_used(run_ranks):
    assert run_ranks(2, _edited_rows_are_used) == [True, True]


class Tied(nn.Module):
    """Its two layers share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(5, 5, bias=False)
        self.back = nn.Linear(5, 5, bias=False)
        self.back.weight = self.front.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(torch.tanh(self.front(x)))


def _built_on_meta() -> tuple[list[str], list[bool]]:
    """The names of a model built on meta, and whether its weight is tied: sharded, filled, run."""
    with torch.device("meta"):
        model = Tied()
    minifsdp.fully_shard(model)
    names = [name for name, _ in model.named_parameters()]
    tied = [model.front.weight is model.back.weight]
    model.to_empty(device="cpu")
    tied.append(model.front.weight is model.back.weight)
    torch.nn.init.constant_(model.front.weight, 0.5)
    tied.append(bool((model.back.weight.to_local() == 0.5).all()))
    plain = Tied()
    torch.nn.init.constant_(plain.front.weight, 0.5)
    x = torch.ones(2, 5)
    tied.append(torch.equal(model(x), plain(x)))
    model(x).sum().backward()
    plain(x).sum().backward()
    tied.append(torch.equal(model.front.weight.grad.full_tensor(), plain.front.weight.grad))
    return names, tied


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_built_on_meta_is_filled_after_sharding_with_ties_kept(run_ranks, world_size):
    assert run_ranks(world_size, _built_on_meta) == [(["front.weight"], [True] * 5)] * world_size


def _still_on_meta() -> str:
    with torch.device("meta"):
        model = stack.build()
    stack.shard(model)
    model.layers.to_empty(device="cpu")
    try:
        model(stack.batch())
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_parameters_still_on_meta_are_named_at_the_first_forward(run_ranks):
    for message in run_ranks(2, _still_on_meta):
        assert "meta" in message
        assert "front.weight" in message
        assert "back.bias" in message
        assert "to_empty" in message
        assert "layers" not in message


def _moved_with_an_optimizer(how: str) -> list[str]:
    """What an optimizer built before `model.to(...)` misses after it."""
    model = stack.shard(stack.build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = list(model.parameters())
    stack.step(model)
    dtype = torch.float64 if how == "dtype" else torch.float32
    model.to(dtype) if how == "dtype" else model.to("cpu")
    missed = []
    if not all(a is b for a, b in zip(before, model.parameters(), strict=True)):
        missed.append("parameters are other objects")
    if not all(p.dtype == dtype == p.to_local().dtype for p in model.parameters()):
        missed.append("parameters have another dtype")
    if any(p.grad is None or p.grad.dtype != dtype for p in model.parameters()):
        missed.append("gradients did not move")
    optimizer.zero_grad()
    rows = [p.to_local().clone() for p in model.parameters()]
    x = stack.batch().to(dtype)
    first = model(x)
    first.sum().backward()
    optimizer.step()
    moved = [
        not torch.equal(a, p.to_local()) for a, p in zip(rows, model.parameters(), strict=True)
    ]
    if not all(moved):
        missed.append("the optimizer does not step what the model holds")
    if torch.equal(model(x), first):
        missed.append("the next forward does not see the step")
    return missed


@pytest.mark.parametrize("how", ["dtype", "device"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_moving_a_sharded_model_keeps_what_its_optimizer_knows(run_ranks, world_size, how):
    assert run_ranks(world_size, _moved_with_an_optimizer, how) == [[]] * world_size


def _moved_while_the_root_is_whole() -> bool:
    model = stack.shard(stack.build())
    plain = stack.build().double()
    model(stack.batch())
    model.double()
    rows_only = all(isinstance(p, DTensor) for p in model.parameters())
    x = stack.batch().double()
    return rows_only and torch.equal(model(x), plain(x))


def test_moving_a_model_whose_root_is_whole_moves_its_rows(run_ranks):
    assert run_ranks(2, _moved_while_the_root_is_whole) == [True, True]


def _gradients_without_synchronisation() -> list[str]:
    """States of sharded gradients through an un-synced micro-batch and a synced one."""
    model, plain = stack.shard(stack.build()), stack.build()
    seen = []
    for seed, sync in ((0, False), (1, False), (2, True)):
        model.set_requires_gradient_sync(sync)
        stack.step(model, seed)
        stack.step(plain, seed)
        grads = [p.grad for p in model.parameters()]
        assert all(isinstance(p, DTensor) for p in model.parameters())
        absent, present = all(g is None for g in grads), all(g is not None for g in grads)
        seen.append("none" if absent else "all" if present else "some")
    close = all(
        torch.allclose(a.grad.full_tensor(), b.grad, atol=1e-6)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    return [*seen, "sum" if close else "another sum"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_unsynced_gradients_are_not_on_the_sharded_parameters_yet(run_ranks, world_size):
    answers = run_ranks(world_size, _gradients_without_synchronisation)
    assert answers == [["none", "none", "all", "sum"]] * world_size


def _ranks_keep_what_they_built() -> list[float]:
    layer = nn.Linear(1, 4, bias=False)
    torch.nn.init.constant_(layer.weight, float(dist.get_rank()))
    minifsdp.fully_shard(layer)
    return layer.weight.full_tensor().flatten().tolist()


def test_each_rank_contributes_its_own_rows_of_what_it_built(run_ranks):
    assert run_ranks(2, _ranks_keep_what_they_built) == [[0, 0, 1, 1]] * 2

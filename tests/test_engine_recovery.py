"""More corners that breaking the engine line by line has shown: recovery, padding, and the rest."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from test_engine_corners import data, equal, gradients, layers, sharded
from torch import nn
from torch.distributed.tensor import DTensor

import minifsdp
from minifsdp import clip_grad_norm_, fully_shard
from minifsdp.collectives import Peers, choose, use_collectives
from minifsdp.collectives.packed import place_rows
from minifsdp.layout import RowLayout

# --- failures


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("below the root")


def _raised_below_the_root() -> None:
    model = sharded(layers())
    with pytest.raises(ValueError, match="below the root"):
        model(Raising.apply(data().requires_grad_())).sum().backward()
    model.zero_grad()
    reference = sharded(layers())
    for either in (model, reference):
        for p in either.parameters():
            p.grad = None
        either(data()).square().mean().backward()
    assert equal(gradients(model), gradients(reference))


def test_an_exception_after_the_roots_backward_does_not_spoil_the_next(run_ranks):
    run_ranks(2, _raised_below_the_root)


def _unsynced_is_lost() -> None:
    model = sharded(layers())
    model.set_requires_gradient_sync(False)
    model(data()).square().mean().backward()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    reference = sharded(layers())
    for either in (model, reference):
        either(data(1)).square().mean().backward()
    assert equal(gradients(model), gradients(reference))


def test_reset_iter_state_forgets_unsynced_gradients(run_ranks):
    for world_size in (1, 2):
        run_ranks(world_size, _unsynced_is_lost)


class CalledDirectly(nn.Module):
    """Two modules that become one unit, in a model that does not become one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def _group_as_root() -> None:
    model = CalledDirectly()
    fully_shard([model.a, model.b])
    with pytest.raises(RuntimeError, match="group of modules cannot be the root"):
        model(data())
    fully_shard(model)
    model(data()).sum().backward()


def test_a_group_cannot_be_the_root_and_the_remedy_works(run_ranks):
    run_ranks(2, _group_as_root)


# --- padding


@pytest.mark.parametrize(("rows", "ranks"), [(3, 2), (1, 4), (5, 4), (4, 4), (0, 2)])
def test_place_rows_writes_every_element_of_its_slot_and_none_beside_it(rows, ranks):
    layout = RowLayout(rows, 3, ranks)
    message = torch.full((ranks, 2 + layout.slot_numel + 2), float("nan"))
    grad = torch.randn(rows, 3)
    place_rows(message[:, 2 : 2 + layout.slot_numel], grad.view(-1))
    slot = message[:, 2 : 2 + layout.slot_numel].reshape(-1)
    assert torch.equal(slot[: layout.numel].view(rows, 3), grad)
    assert not slot[layout.numel :].any()  # NaN counts as something
    assert message[:, :2].isnan().all() and message[:, -2:].isnan().all()


def _padding_of_shards() -> None:
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        model = fully_shard(nn.Linear(4, 5))
        assert all(flat.isfinite().all() for flat in model._unit().rows())
    finally:
        torch.use_deterministic_algorithms(False)


def test_padding_of_shards_is_zero_in_fresh_memory(run_ranks):
    for world_size in (2, 4):
        run_ranks(world_size, _padding_of_shards)


# --- the rest


class Dtypes(nn.Module):
    """Notes the dtype that its input came in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.dtype
        return self.layer(x.to(self.layer.weight.dtype))


def _cast_inputs() -> None:
    for casts, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        policy = minifsdp.MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=casts)
        model = fully_shard(Dtypes(), mp_policy=policy)
        model(data())
        assert model.seen == dtype


def test_inputs_are_cast_if_the_policy_says_so(run_ranks):
    run_ranks(1, _cast_inputs)


def _smallest() -> None:
    model = sharded(layers())
    model(data()).square().mean().backward()
    whole = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    norm = clip_grad_norm_(model.parameters(), 1e9, norm_type=float("-inf"))
    assert norm == whole.abs().min()


def test_the_norm_of_order_minus_infinity_is_the_smallest_element(run_ranks):
    for world_size in (1, 2, 4):
        run_ranks(world_size, _smallest)


def _collectives() -> None:
    peers, device = Peers.of(dist.group.WORLD), torch.device("cpu")
    with use_collectives("backend"):
        assert choose(peers, device).name == "backend"
    assert choose(peers, device).name == "shared"
    use_collectives("backend")
    assert choose(peers, device).name == "backend"
    with pytest.raises(ValueError, match="'gloo'; choose one of: auto, "):
        use_collectives("gloo")
    assert choose(peers, device).name == "backend"


def test_use_collectives_is_a_setter_and_a_context(run_ranks):
    run_ranks(2, _collectives)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 5), nn.Linear(5, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def _assigned_and_tied() -> None:
    source, model = fully_shard(Tied()), fully_shard(Tied())
    state = {name: DTensor.clone(rows) for name, rows in source.state_dict().items()}
    assert state["embed.weight"] is not state["head.weight"]
    model.load_state_dict(state, assign=True)
    assert model.head.weight is model.embed.weight
    tokens = torch.arange(5)[None]
    assert torch.equal(model(tokens), source(tokens))


def test_assigned_state_stays_tied(run_ranks):
    run_ranks(2, _assigned_and_tied)


class WithCounts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.counts = nn.Parameter(torch.arange(2**24, 2**24 + 7), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.counts.dtype == torch.int64
        return self.layer(x) * (self.counts[-1] == 2**24 + 6)


def _integers() -> None:
    policy = minifsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = fully_shard(WithCounts(), mp_policy=policy)
    out = model(data())
    assert out.dtype == torch.bfloat16 and out.any()


def test_integer_parameters_are_not_cast_by_a_policy(run_ranks):
    for world_size in (1, 2):
        run_ranks(world_size, _integers)


# --- found by somebody who set out to break the engine


def _saved_alone() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 200)))
    model(data()).sum().backward()
    for name, rows in model.state_dict().items():
        file = io.BytesIO()
        torch.save(rows, file)
        assert file.tell() < rows.to_local().nbytes + 4096, name
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False).to_local(), rows.to_local())
    again = copy.deepcopy(model.state_dict())
    assert equal([r.to_local() for r in again.values()], [p.to_local() for p in model.parameters()])


def test_each_parameters_rows_can_be_saved_and_copied_on_their_own(run_ranks):
    for world_size in (1, 2):
        run_ranks(world_size, _saved_alone)


def _unshard_first() -> None:
    model, reference = sharded(layers()), sharded(layers())
    for unit in [model, *model]:
        unit.unshard()
    for either in (model, reference):
        either(data()).square().mean().backward()
    assert equal(gradients(model), gradients(reference))


def test_units_may_be_unsharded_before_the_first_forward(run_ranks):
    for world_size in (1, 2):
        run_ranks(world_size, _unshard_first)


def _frozen_after_unsynced() -> None:
    model, reference = sharded(layers()), sharded(layers())
    for either in (model, reference):
        either.set_requires_gradient_sync(False)
        either(data()).square().mean().backward()
    model[0][0].bias.requires_grad_(False)
    for either in (model, reference):
        either.set_requires_gradient_sync(True)
        either(data(1)).square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if name != "0.0.bias":
            assert torch.equal(ours.grad.to_local(), theirs.grad.to_local()), name


def test_a_parameter_may_be_frozen_after_an_unsynced_micro_batch(run_ranks):
    run_ranks(2, _frozen_after_unsynced)


def _skipped_micro_batch() -> None:
    model, reference = sharded(layers()), sharded(layers())
    for either in (model, reference):
        either.set_requires_gradient_sync(False)
        either(data()).square().mean().backward()
        if either is model:
            with pytest.raises(RuntimeError):
                model(torch.ones(2, 4))  # a bad batch, skipped
        either.set_requires_gradient_sync(True)
        either(data(1)).square().mean().backward()
    assert equal(gradients(model), gradients(reference))


def test_a_skipped_micro_batch_costs_none_of_the_earlier_ones(run_ranks):
    for world_size in (1, 2):
        run_ranks(world_size, _skipped_micro_batch)


class Following(nn.Module):
    """Follows its parameter through `__setattr__`."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(5, 5))

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "w":
            object.__setattr__(self, "followed", [value])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.followed[0]


class ListWithForward(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


def _unusual_modules() -> None:
    for module in (Following(), ListWithForward([nn.Linear(5, 5), nn.Linear(5, 5)])):
        model = fully_shard(module)
        model(data()).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_modules_that_follow_their_parameters_and_lists_with_a_forward_train(run_ranks):
    run_ranks(2, _unusual_modules)

"""Engines with one fault each, and a model to find it with: what `minifsdp.verify` is tested on.

python -m minifsdp.verify --model tests.planted_engines:build --batch tests.planted_engines:batch
    --engine tests.planted_engines:one_wrong_row --world-size 4
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import minifsdp
from minifsdp.hooks import ScheduledUnit, unit_of
from minifsdp.scaling import Scaling
from minifsdp.verify.engines import MiniFSDP
from minifsdp.verify.settings import Settings

VOCAB = 11
MIDDLE = "layers.1"


class Block(nn.Module):
    """A residual block of two linear layers, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Predicts targets from tokens and returns the loss. `gain` has 2 rows: fewer than 4 ranks."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 6)
        self.gain = nn.Parameter(torch.ones(2, 6))
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(6, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.gain.prod(0)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def build() -> nn.Module:
    return Net()


def build_tied() -> nn.Module:
    return Net(tied=True)


class Chancy(Net):
    """Draws from Python's random in its forward, which nothing seeds."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, targets) * random.random()


def build_chancy() -> nn.Module:
    return Chancy()


def batch(rank: int, step: int, micro: int = 0) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    drawn = torch.randint(0, VOCAB, (2, 3, 5), generator=chance)
    return {"tokens": drawn[0], "targets": drawn[1]}


def _sharded(model: nn.Module, units: list[nn.Module], settings: Settings) -> nn.Module:
    return MiniFSDP().shard(model, units, settings)


def fault(plant: Callable[[nn.Module], None]) -> Callable[..., nn.Module]:
    """An engine: minifsdp, into which `plant` puts a fault once a model is sharded."""

    @functools.wraps(plant)
    def shard(model: nn.Module, units: list[nn.Module], settings: Settings) -> nn.Module:
        model = _sharded(model, units, settings)
        plant(model)
        return model

    return shard


def _middle(model: nn.Module) -> ScheduledUnit:
    return unit_of(model.get_submodule(MIDDLE))


def _units(model: nn.Module) -> list[ScheduledUnit]:
    return [u for m in model.modules() if (u := unit_of(m)) is not None]


def _param(unit: ScheduledUnit, suffix: str) -> Any:
    return next(p for p in unit.params if p.name.endswith(suffix))


def no_fault(model: nn.Module, units: list[nn.Module], settings: Settings) -> nn.Module:
    return _sharded(model, units, settings)


# ---- in forward ---------------------------------------------------------------------------------


@fault
def one_wrong_row(model: nn.Module) -> None:
    """Row 5 of one gathered weight is one unit in the last place off, from the second step on."""
    unit, gathers = _middle(model), 0
    take_in = unit._take_in

    def wrong() -> None:
        nonlocal gathers
        take_in()
        gathers += 1
        if gathers > 2:  # the first step's forward and backward
            param = _param(unit, "up.weight")
            row = param.padded.view(-1, 6)[5]
            row.copy_(torch.nextafter(row, torch.full_like(row, torch.inf)))

    unit._take_in = wrong


@fault
def missing_wait(model: nn.Module) -> None:
    """One unit's parameters are used as their memory is; the gather arrives when it reshards."""
    unit = _middle(model)
    take_in, reshard, late = unit._take_in, unit.reshard, []

    def not_waiting() -> None:
        gather = unit._gather
        arrive, gather.wait = gather.wait, lambda outputs: late.append((arrive, outputs))
        take_in()

    def arriving() -> None:
        for arrive, outputs in late:
            arrive(outputs)
        late.clear()
        reshard()

    unit._take_in, unit.reshard = not_waiting, arriving


@fault
def stale_gather(model: nn.Module) -> None:
    """One unit computes each forward with the parameters of the step before."""
    unit, held = _middle(model), []
    take_in = unit._take_in

    def late() -> None:
        take_in()
        full = unit._parts[0].full
        now = full.clone()
        if held:
            full.copy_(held[0])
        held[:] = [now]

    unit._take_in = late


@fault
def other_data(model: nn.Module) -> None:
    """The last rank computes on the batch of another step."""

    def swap(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (), batch(dist.get_rank(), 77)

    if dist.get_rank() == dist.get_world_size() - 1:
        model.register_forward_pre_hook(swap, with_kwargs=True, prepend=True)


@fault
def bf16_parameters(model: nn.Module) -> None:
    """Gathered parameters are rounded to bf16, and computed with in float32."""
    for unit in _units(model):
        _rounding(unit)


def _rounding(unit: ScheduledUnit) -> None:
    take_in = unit._take_in

    def rounded() -> None:
        take_in()
        for part in unit._parts:
            part.full.copy_(part.full.bfloat16())

    unit._take_in = rounded


@fault
def rolled_parameter(model: nn.Module) -> None:
    """The rows of one gathered weight are all one place further."""
    unit = _middle(model)
    take_in = unit._take_in

    def rolled() -> None:
        take_in()
        weight = _param(unit, "down.weight").padded.view(-1, 9)
        weight.copy_(weight.roll(1, 0))

    unit._take_in = rolled


@fault
def changed_between_steps(model: nn.Module) -> None:
    """An element of rank 1's rows is moved as the second step begins."""
    forwards = 0

    def change(module: nn.Module, args: Any) -> None:
        nonlocal forwards
        forwards += 1
        if forwards == 2 and dist.get_rank() == 1:
            rows = dict(module.named_parameters())[f"{MIDDLE}.up.weight"].to_local()
            rows.data.view(-1)[0] += 1e-3

    model.register_forward_pre_hook(change, prepend=True)


# ---- in backward --------------------------------------------------------------------------------


def bf16_gradients(model: nn.Module, units: list[nn.Module], settings: Settings) -> nn.Module:
    """Gradients are reduced in bf16, where float32 was meant."""
    policy = minifsdp.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    for module in [*units, model]:
        minifsdp.fully_shard(module, mp_policy=policy)
    return model


@fault
def skipped_division(model: nn.Module) -> None:
    """One unit's gradients are summed over ranks and not divided."""
    _middle(model).reducer._scaling = lambda dtype: Scaling()


@fault
def divided_twice(model: nn.Module) -> None:
    """All gradients are divided by the number of ranks once too often."""
    for unit in _units(model):
        twice = Scaling(average_shards=True, divide_after=dist.get_world_size())
        unit.reducer._scaling = lambda dtype, scale=twice: scale


@fault
def reduced_twice(model: nn.Module) -> None:
    """One parameter's gradient is handed out twice."""
    _on_gradient(_middle(model), lambda param: param.name.endswith("down.weight"), again=True)


@fault
def one_wrong_gradient_row(model: nn.Module) -> None:
    """The first row that rank 1 has of one gradient is off by one unit in the last place."""
    unit = _middle(model)
    add = unit.reducer._add_gradient

    def wrong(param: Any, rows: torch.Tensor) -> None:
        add(param, rows)
        if param.name.endswith("up.weight") and dist.get_rank() == 1:
            row = param.sharded.grad.to_local()[0]
            row.copy_(torch.nextafter(row, torch.full_like(row, torch.inf)))

    unit.reducer._add_gradient = wrong


@fault
def rank_1_doubled(model: nn.Module) -> None:
    """Rank 1 doubles its rows of one unit's gradients."""
    _changing(_middle(model), lambda name, rows: rows * (1 + (dist.get_rank() == 1)))


@fault
def rolled_gradient(model: nn.Module) -> None:
    """The rows of one gradient are one place further on each rank."""
    _changing(_middle(model), lambda name, rows: rows.roll(9) if "down.weight" in name else rows)


@fault
def gradient_of_a_step_ago(model: nn.Module) -> None:
    """One unit hands out the gradients that it reduced in the step before."""
    held: dict[str, torch.Tensor] = {}

    def late(name: str, rows: torch.Tensor) -> torch.Tensor:
        before, held[name] = held.get(name, rows.clone()), rows.clone()
        return before

    _changing(_middle(model), late)


@fault
def exchanged_gradients(model: nn.Module) -> None:
    """Two parameters of one shape get each other's gradient."""
    unit, held = _middle(model), []
    add = unit.reducer._add_gradient

    def exchanging(param: Any, rows: torch.Tensor) -> None:
        if not param.name.endswith(("norm.weight", "down.bias")):
            return add(param, rows)
        held.append((param, rows.clone()))
        if len(held) == 2:
            (first, of_first), (second, of_second) = held
            held.clear()
            add(first, of_second)
            add(second, of_first)

    unit.reducer._add_gradient = exchanging


def _changing(unit: ScheduledUnit, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    add = unit.reducer._add_gradient
    unit.reducer._add_gradient = lambda param, rows: add(param, change(param.name, rows))


@fault
def lost_gradient(model: nn.Module) -> None:
    """One parameter's gradient is never handed out."""
    _on_gradient(_middle(model), lambda param: param.name.endswith("up.bias"), again=False)


def _on_gradient(unit: ScheduledUnit, chosen: Callable[[Any], bool], again: bool) -> None:
    add = unit.reducer._add_gradient

    def adding(param: Any, rows: torch.Tensor) -> None:
        if not chosen(param):
            add(param, rows)
        elif again:
            add(param, rows)
            add(param, rows.clone())

    unit.reducer._add_gradient = adding


@fault
def lost_micro_batch(model: nn.Module) -> None:
    """What un-synced micro-batches bring is dropped in one unit."""
    reducer = _middle(model).reducer
    reducer.accumulate = lambda: reducer.collect().clear()


@fault
def accumulated_in_bf16(model: nn.Module) -> None:
    """Un-synced gradients are kept in bf16, where the reduction's dtype was meant."""
    for unit in _units(model):
        _keeping_bf16(unit.reducer)


def _keeping_bf16(reducer: Any) -> None:
    accumulate = reducer.accumulate

    def rounded() -> None:
        accumulate()
        for grad in reducer._unsynced.values():
            grad.copy_(grad.bfloat16())

    reducer.accumulate = rounded


# ---- after backward -----------------------------------------------------------------------------


class ClipsByInfinityNorm(MiniFSDP):
    name = "ClipsByInfinityNorm"

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        return minifsdp.clip_grad_norm_(model.parameters(), max_norm, norm_type=float("inf"))


class ClipsWithoutSumming(MiniFSDP):
    """Each rank clips by the norm of its own rows."""

    name = "ClipsWithoutSumming"

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        rows = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(rows)
        torch._foreach_mul_(rows, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm


@fault
def missed_step(model: nn.Module) -> None:
    """The optimizer gets a copy of one parameter, and so never steps on it."""
    params = list(model.named_parameters())

    def parameters(recurse: bool = True) -> list[nn.Parameter]:
        missed = f"{MIDDLE}.up.weight"
        return [nn.Parameter(p.detach().clone()) if n == missed else p for n, p in params]

    model.parameters = parameters


def parted_tie(model: nn.Module, units: list[nn.Module], settings: Settings) -> nn.Module:
    """The head no longer shares the embedding's weight."""
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return _sharded(model, units, settings)


def bf16_master_weights(model: nn.Module, units: list[nn.Module], settings: Settings) -> nn.Module:
    """Parameters are rounded to bf16 as they are sharded."""
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.bfloat16())
    return _sharded(model, units, settings)

"""Steps of training with nothing behind them, and the books of the last one."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import clip_grad_norm_, events
from ..collectives import use_collectives
from ..hooks import ScheduledUnit
from . import costs
from .books import Rehearsal, Repeated, Volume
from .categories import Category
from .given import Batch, Build, arguments, built_by, checked, tokens_in, units_of
from .ledger import Change, Ledger, Moment, Place
from .settings import Settings
from .world import GPU, Notes, fake_tensors, pretended_world, quiet

_ROUNDING = 512  # bytes: what CUDA's caching allocator rounds sizes up to
_MICRO_BATCHES = 3  # see [Note: micro-batches that repeat]
_MESSAGES = ("all_gather", "reduce_scatter", "all_reduce")


def rehearse(
    build: Build, batch: Batch, world_size: int, device_type: str, settings: Settings
) -> Rehearsal:
    """Two steps on rank 0 of a pretended world; the second is the one that is kept."""
    ledger = Ledger(device_type, _ROUNDING if device_type == GPU else 1)
    done = replace(settings, micro_batches=min(_MICRO_BATCHES, settings.micro_batches))
    units: dict[str, ScheduledUnit] = {}
    with (
        quiet(),
        pretended_world(world_size, device_type, _notes(ledger, units)),
        use_collectives(settings.collectives),
    ):
        model, make_optimizer = built_by(build)
        units |= units_of(model)
        with fake_tensors(), ledger, ledger.watching_storages(), _following(ledger, model, units):
            _give_memory(model, units, device_type)
            for parameter in model.parameters():
                ledger.classify(parameter, Category.PARAMETERS)
            optimizer = make_optimizer(model)
            try:
                train_step(model, optimizer, batch, done, ledger)  # makes the optimizer's state
            except Exception as error:
                error.add_note(f"in {ledger.phase}{ledger.unit and ' of '}{ledger.unit}")
                raise
            begin = ledger.place
            ledger.micro_batches.clear()
            tokens = train_step(model, optimizer, batch, done, ledger)
            ledger.at("between steps", "")
            rehearsal = _kept(ledger, begin, settings.micro_batches)
        rehearsal.world_size = world_size
        rehearsal.tokens = tokens // done.micro_batches * settings.micro_batches
        sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
        rehearsal.parameters = sum(numel for numel, _ in sizes)
        rehearsal.trained = sum(numel for numel, learns in sizes if learns)
        units.clear()
        del model, optimizer, make_optimizer
    return rehearsal


def train_step(
    model: nn.Module, optimizer: Any, batch: Batch, settings: Settings, ledger: Ledger | None = None
) -> int:
    """One step of training, as a plan assumes it; returns its tokens on this rank."""

    def at(phase: str) -> None:
        if ledger is not None:
            ledger.at(phase, "")

    tokens = 0
    for number in range(1, settings.micro_batches + 1):
        if ledger is not None:
            ledger.begin_micro_batch()
        inputs = arguments(batch())
        tokens += tokens_in(inputs)
        if settings.no_sync:
            model.set_requires_gradient_sync(number == settings.micro_batches)
        at("forward")
        output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        at("loss")
        loss = checked(settings.loss(output))
        at("backward")
        loss.backward()
        del inputs, output, loss
    if settings.clip_norm is not None:
        at("clipping")
        clip_grad_norm_(model.parameters(), settings.clip_norm)
    at("optimizer")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return tokens


@contextlib.contextmanager
def counting() -> Iterator[dict[str, Volume]]:
    """Messages of units by kind, counted by the engine's events; a real run can be counted too."""
    volumes: dict[str, Volume] = {}

    def note(event: events.Event) -> None:
        if event.kind in _MESSAGES and event.nbytes:
            before = volumes.get(event.kind, Volume(0, 0))
            volumes[event.kind] = Volume(before.count + 1, before.nbytes + event.nbytes)

    with events.listening(note):
        yield volumes


def _give_memory(model: nn.Module, units: dict[str, ScheduledUnit], device_type: str) -> None:
    """What `to_empty` does in a run, with what is offloaded on the host."""
    offloaded = {u.offloaded for u in units.values() if u.params}
    model.to_empty(device="cpu" if offloaded == {True} else device_type)


# What the ledger is told while the steps run


@contextlib.contextmanager
def _following(ledger: Ledger, model: nn.Module, units: dict[str, ScheduledUnit]) -> Iterator[None]:
    """Tell the ledger which unit is at work, and what blocks turn out to be."""
    names = {id(m): name for name, unit in units.items() for m in _modules(unit)}
    stack: list[tuple[str, str]] = []

    def enter(module: nn.Module, _: Any) -> None:
        if id(module) in names:
            stack.append((ledger.phase, ledger.unit))
            phase = ledger.phase
            ledger.at("recomputation" if phase == "backward" else phase, names[id(module)])

    def leave(module: nn.Module, *_: Any) -> None:
        if id(module) in names and stack:
            ledger.at(*stack.pop())

    def note(event: events.Event) -> None:
        nbytes = event.nbytes if event.kind in _MESSAGES else 0
        ledger.trace.append(costs.Told(event.kind, event.unit, nbytes))
        if event.kind in ("unshard", "reduced", "all_reduce"):
            ledger.arrived()
        unit = units.get(event.unit)
        if unit is None:
            return
        if event.kind == "backward":
            ledger.at("backward", event.unit)
        elif event.kind == "reshard" and ledger.phase != "forward":
            for param in unit.params:
                if param.unsharded is not None:
                    ledger.classify(param.unsharded.grad, Category.GRADIENTS)

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        for parameter, state in optimizer.state.items():
            ledger.classify(parameter.grad, Category.GRADIENTS)
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    ledger.classify(value, Category.OPTIMIZER)

    handles = [
        module_hooks.register_module_forward_pre_hook(enter),
        module_hooks.register_module_forward_hook(leave),
        register_optimizer_step_post_hook(stepped),
    ]
    try:
        with events.listening(note):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _modules(unit: ScheduledUnit) -> Sequence[nn.Module]:
    return [module for ref in unit._modules if (module := ref()) is not None]


def _notes(ledger: Ledger, units: dict[str, ScheduledUnit]) -> Notes:
    """Puts into the trace what the engine gives its worker (a unit's step), and its copies."""
    known = weakref.proxy(ledger)
    issued = 0

    def copied() -> Callable[[], None]:
        nonlocal issued
        issued += 1
        number = issued
        known.trace.append(costs.Copied())
        return lambda: known.trace.append(costs.Copied(issued - number + 1))

    @contextlib.contextmanager
    def around(function: Callable[[], Any]) -> Iterator[None]:
        optimizer: Optimizer = function.__self__._optimizer
        first = optimizer.param_groups[0]["params"][0]
        unit = next(name for name, u in units.items() if any(p.sharded is first for p in u.params))
        before = known.phase, known.unit
        known.trace.append(costs.Submitted(False, unit))
        known.at("optimizer", unit)
        try:
            yield
        finally:
            known.at(*before)
            known.trace.append(costs.Submitted(True, unit))

    return Notes(around, copied)


def _kept(ledger: Ledger, begin: Place, micro_batches: int) -> Rehearsal:
    held: Counter[tuple[bool, Category]] = Counter()
    for change in ledger.changes[: begin.change]:
        held[change.block.on_host, change.block.category] += change.delta
    changes = [
        Change(change.time - begin.step, change.block, change.delta)
        for change in itertools.islice(ledger.changes, begin.change, None)
    ]
    moments = [
        Moment(moment.change - begin.change, moment.phase, moment.unit)
        for moment in ledger.moments[begin.moment :]
    ]
    ranks: tuple[int, ...] = ()
    trace = ledger.trace[begin.step :]
    for step in trace:
        if isinstance(step, costs.Message) and step.kind in ("all_gather", "reduce_scatter"):
            ranks = step.ranks
            break
    repeated = None
    if micro_batches >= _MICRO_BATCHES:
        second, last = (
            Place(*(there - here for there, here in zip(place, begin, strict=True)))
            for place in ledger.micro_batches[1:]
        )
        repeated = Repeated(second, last, micro_batches - 2)
    return Rehearsal(0, ledger.device_type, 0, 0, 0, held, changes, moments, trace, ranks, repeated)

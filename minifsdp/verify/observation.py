"""What is seen of an engine's run, and the hooks that see it without touching it.

[Note: what is compared, in the order of computing]
Before the first step the parameters. In each forward, of each unit as it runs: its inputs, the
parameters as it computes with them (whole, if the engine gathers before the unit's forward), its
outputs; then the loss. After the last backward the gradients, from the last parameter to the first
as backward makes them; the norm, and the clipped gradients; after the step parameters and buffers.
Gradients and parameters are compared by rows: each rank those that dim-0 `torch.chunk` gives it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..nest import map_tensors
from .ulp import numbers
from .units import Plan, clean


class Kind(IntEnum):
    """A phase, in the order that a step has them; the first four alternate within a forward."""

    START = 0
    INPUT = 1
    GATHERED = 2
    OUTPUT = 3
    LOSS = 4
    GRADIENT = 5
    NORM = 6
    CLIPPED = 7
    PARAMETER = 8
    BUFFER = 9


PHASES = {
    Kind.START: "parameters before the first step",
    Kind.INPUT: "inputs of units",
    Kind.GATHERED: "parameters in forward",
    Kind.OUTPUT: "forward outputs of units",
    Kind.LOSS: "loss",
    Kind.GRADIENT: "gradients",
    Kind.NORM: "gradient norm",
    Kind.CLIPPED: "clipped gradients",
    Kind.PARAMETER: "parameters after the step",
    Kind.BUFFER: "buffers after the step",
}
ONE = {
    **PHASES,
    Kind.START: "parameter before the first step",
    Kind.INPUT: "input",
    Kind.GATHERED: "parameter in forward",
    Kind.OUTPUT: "forward output",
    Kind.GRADIENT: "gradient",
    Kind.CLIPPED: "clipped gradient",
    Kind.PARAMETER: "parameter after the step",
    Kind.BUFFER: "buffer after the step",
}
"""What one value of a phase is called."""
BY_ROWS = (Kind.START, Kind.GRADIENT, Kind.CLIPPED, Kind.PARAMETER)
"""Phases of which each rank sees its own rows."""


class Place(NamedTuple):
    """Which value of a step."""

    kind: Kind
    micro: int
    unit: str
    name: str
    """Of the parameter, or which of several inputs or outputs."""


class Observation(NamedTuple):
    """One value: a tensor of its own, or None where the engine has none (no gradient)."""

    place: Place
    tensor: torch.Tensor | None
    first_row: int = 0
    """Of the whole parameter, where `tensor` is rows of it."""


class Watch:
    """Hooks on a sharded model that copy what its units take, hold and give in forward."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._seen: list[Observation] | None = None
        self._micro = 0
        self._handles = []
        modules = {clean(name): module for name, module in model.named_modules()}
        owned: dict[str, list[tuple[str, nn.Module, str]]] = {}
        for param in plan.params:
            path, _, attribute = param.name.rpartition(".")
            if path in modules:
                owned.setdefault(param.unit, []).append((param.name, modules[path], attribute))
        for unit in [*plan.units, ""]:
            if unit not in modules:
                raise ValueError(
                    f"the engine's model has no module {unit!r} any more: return the model itself "
                    "or a wrapper that holds it as .module"
                )
            before = functools.partial(self._before, unit, owned.get(unit, []))
            after = functools.partial(self._after, unit)
            self._handles.append(modules[unit].register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(modules[unit].register_forward_hook(after))

    @contextmanager
    def watching(self, micro: int) -> Iterator[list[Observation]]:
        """Fill a list with what a forward shows; recomputation in backward is not watched."""
        self._seen, self._micro = [], micro
        try:
            yield self._seen
        finally:
            self._seen = None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(
        self, unit: str, owned: list[tuple[str, nn.Module, str]], module: Any, args: Any, kw: Any
    ) -> None:
        if self._seen is None:
            return
        self._add(Kind.INPUT, unit, (args, kw))
        for name, owner, attribute in owned:
            held = getattr(owner, attribute, None)
            if isinstance(held, torch.Tensor) and not isinstance(held, DTensor):
                place = Place(Kind.GATHERED, self._micro, unit, name)
                self._seen.append(Observation(place, copy_of(held)))

    def _after(self, unit: str, module: Any, args: Any, output: Any) -> None:
        if self._seen is not None:
            self._add(Kind.OUTPUT, unit, output)

    def _add(self, kind: Kind, unit: str, nested: Any) -> None:
        tensors: list[torch.Tensor] = []
        map_tensors(lambda t: tensors.append(t) or t, nested)
        for number, tensor in enumerate(tensors):
            name = "" if len(tensors) == 1 else str(number)
            place = Place(kind, self._micro, unit, name)
            self._seen.append(Observation(place, copy_of(tensor)))


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its numbers in memory of their own, on the host."""
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        return numbers(tensor.detach().to("cpu", copy=True))

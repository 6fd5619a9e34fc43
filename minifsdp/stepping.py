"""Optimizers that step a unit at a time: as its gradients arrive, or behind the next forward.

[Note: an optimizer for each unit]
An optimizer that steps after backward needs every gradient at once. One for each unit can step as
soon as the unit's gradients are reduced, in the middle of backward, and free them: only one unit's
gradients are there at a time. Units whose rows are on the host step on a thread of their own, while
the device goes on with backward. Clipping needs the norm of all gradients first; then units step in
the order of forward, those on the host behind the forward that has begun: a unit is not gathered
before it has stepped. Each parameter is stepped by the same call on the same rows either way, so
the bits are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from . import events
from .clip import clip_grad_norm_, refuse_clipping
from .hooks import ScheduledUnit
from .module import FSDPModule


class UnitOptimizers:
    """What `step_in_backward` returns; use it as one optimizer.

    What takes optimizers of torch (schedulers, torch.distributed.checkpoint) takes `optimizers`.
    """

    def __init__(
        self,
        model: FSDPModule,
        make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
        max_norm: float | None,
    ) -> None:
        self._max_norm = max_norm
        self._units: list[tuple[ScheduledUnit, Optimizer]] = []
        self._unsharded: Optimizer | None = None  # of parameters that belong to no unit
        self.norm: torch.Tensor | None = None
        """With `max_norm`, the norm of all gradients before they were clipped at the last step."""
        self._worker = ThreadPoolExecutor(1, "minifsdp-optimizer")
        units = model._units(recurse=True)
        sharded = {id(p.registered()): p.sharded for unit in units for p in unit.params}
        # In the model's order: it decides the last bit of the norm.
        self._params = [sharded.get(id(p), p) for p in model.parameters() if p.requires_grad]
        for unit in units:
            if unit.reducer.on_gradients is not None:
                raise RuntimeError(
                    f"unit {unit.name!r} already steps in backward: call step_in_backward once"
                )
            params = [p.sharded for p in unit.params if p.requires_grad]
            if not params:
                continue
            optimizer = make_optimizer(params)
            self._units.append((unit, optimizer))
            if max_norm is None:
                unit.reducer.on_gradients = _Stepper(optimizer, self._worker, unit)
                refuse_clipping(params)
        known = {id(param) for param in sharded.values()}
        if others := [param for param in self._params if id(param) not in known]:
            self._unsharded = make_optimizer(others)

    @property
    def optimizers(self) -> list[Optimizer]:
        """One for each unit that trains, and one for ignored parameters; none is stepping."""
        self.wait()
        ours = [optimizer for _, optimizer in self._units]
        return ours if self._unsharded is None else [*ours, self._unsharded]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers: set `group["lr"]` in each."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, wait: bool = True) -> None:
        """Step on what backward has not, clipped with `max_norm`, and wait for steps under way.

        wait: False lets units on the host step behind the forward that follows. Until then, or
            `wait`, leave parameters, gradients and the settings of `optimizers` alone.
        """
        self.wait()
        if self._max_norm is not None:
            self.norm = clip_grad_norm_(self._params, self._max_norm)
        if self._unsharded is not None:
            _Stepper(self._unsharded, self._worker)()
        for unit, optimizer in self._units:
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                stepping = _Stepper(optimizer, self._worker, unit)()
                if stepping is not None:
                    unit.begin_step(stepping)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Block until every step that was begun is over. Raises what a step raised."""
        for unit, _ in self._units:
            unit.settle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: a gradient is gone once it has been stepped on."""

    def state_dict(self) -> dict[str, Any]:
        """The optimizers' states, in the order of units."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Raises ValueError for another number of units."""
        optimizers, states = self.optimizers, state["optimizers"]
        if len(states) != len(optimizers):
            raise ValueError(
                f"the state is of {len(states)} optimizers, the model has {len(optimizers)}: shard "
                "it as it was sharded when it was saved"
            )
        for optimizer, its_state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(its_state)


class _Stepper:
    """Steps and frees gradients; on the worker if it is to go on `behind` what follows."""

    def __init__(
        self, optimizer: Optimizer, worker: ThreadPoolExecutor, unit: ScheduledUnit | None = None
    ) -> None:
        self._optimizer, self._worker = optimizer, worker
        self._unit = None if unit is None else weakref.ref(unit)  # which owns this
        self._behind = unit is not None and unit.offloaded

    @property
    def name(self) -> str:
        """The unit's name."""
        unit = None if self._unit is None else self._unit()
        return "ignored parameters" if unit is None else unit.name

    def __call__(self) -> Future[None] | None:
        if not self._behind:
            self._step()
            return None
        return self._worker.submit(self._step)

    @events.timed("optimizer")
    def _step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def step_in_backward(
    model: FSDPModule,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    max_norm: float | None = None,
) -> UnitOptimizers:
    """Give each unit an optimizer of its own, which steps as soon as its gradients are reduced.

        optimizer = step_in_backward(model, lambda params: torch.optim.AdamW(params, fused=True))
        loss.backward()   # steps
        optimizer.step()  # waits for steps that run on the host

    Gradients are never all there at once. Before the last of several micro-batches, use
    `set_requires_gradient_sync(False)` or `set_is_last_backward(False)`.

    make_optimizer: from one unit's trainable parameters (DTensors) to an optimizer over them.
    max_norm: clip all gradients to this norm. Then `step` does the stepping, a unit at a time;
        with `step(wait=False)` units that are offloaded step while the next forward runs.

    Raises ValueError for a model that is not sharded, RuntimeError for one that steps already.
    A loss that is scaled (GradScaler) needs `max_norm`: backward would step on scaled gradients.
    """
    if not isinstance(model, FSDPModule):
        raise ValueError(
            f"step_in_backward takes a module that fully_shard returned, not {type(model).__name__}"
        )
    return UnitOptimizers(model, make_optimizer, max_norm)

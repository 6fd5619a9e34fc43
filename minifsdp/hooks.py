"""The hooks on a unit's modules and on autograd that drive it through an iteration.

When they do what is told in `runtime`, [Note: the schedule].
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from . import debug, events
from .nest import cast_floating, grad_tensors, map_tensors, replace_grad_tensors
from .reduction import GradientReducer, refuse_higher_order
from .runtime import Phase, Runtime, alive, backward_is_running
from .unit import State, Unit

UNIT_ATTRIBUTE = "_minifsdp_unit"
_MAX_USES = 64  # forwards of one unit, before a backward, whose order is remembered


def unit_of(module: nn.Module) -> ScheduledUnit | None:
    """The unit that `fully_shard` made of `module`, alone or with others."""
    return getattr(module, UNIT_ATTRIBUTE, None)


class _BackwardBoundary(torch.autograd.Function):
    """Identity on a unit's inputs, whose backward runs when the unit's own backward is over."""

    @staticmethod
    def forward(ctx: Any, unit: ScheduledUnit, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.unit = unit
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.unit.finish_backward()
        return None, *grads


class ScheduledUnit(Unit):
    """A unit that knows when: it follows its modules through forward and backward."""

    def __init__(self, modules: Sequence[nn.Module], *args: Any) -> None:
        super().__init__(*args)
        self.reducer = GradientReducer(self)
        self.runtime: Runtime | None = None  # until the first forward finds the root
        self.phase = Phase.IDLE
        self.reshard_after_forward: bool | None = None
        """None: always, but for the root of a forward that a backward may follow."""
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.is_last_backward = True  # read on the root
        self.post_optim_event: torch.Event | None = None  # read on the root
        self.max_pending = 1  # reductions under way at once; the largest of all units counts
        self.forward_prefetch: list[weakref.ref[ScheduledUnit]] = []
        self.backward_prefetch: list[weakref.ref[ScheduledUnit]] = []
        self.predecessors: deque[int | None] = deque(maxlen=_MAX_USES)  # one for each use
        self.is_group = len(modules) > 1
        self._modules = [weakref.ref(module) for module in modules]
        self._still_to_run: set[int] = set()  # ids of a group's modules, during its forward
        for module in modules:
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward, always_call=self.is_group)

    # Forward

    @torch.compiler.disable
    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make the parameters whole and watch for the end of this use's backward."""
        if self.phase is Phase.BACKWARD and backward_is_running():
            self.unshard()  # for the recomputation of checkpointed activations
            self.wait_for_unshard()
            events.begin("forward", self)
            return self._cast_inputs(args, kwargs)
        if self.is_group and not self._still_to_run:
            self._still_to_run = {id(m()) for m in self._modules}
        entering = self.phase is not Phase.FORWARD
        if self.runtime is None:
            initialize(module, self)
        if self.runtime.begin_forward(self):
            args, kwargs = self._enter_model(args, kwargs)
        self.phase = Phase.FORWARD
        args, kwargs = self._cast_inputs(args, kwargs)
        self.unshard()
        self.wait_for_unshard()
        if events.listeners:
            events.emit("forward", self.name)
        events.begin("forward", self)
        if not entering:
            return args, kwargs
        for unit in alive(self.forward_prefetch) or self.runtime.expected_after(self):
            unit.prefetch()
        if torch.is_grad_enabled() and (tensors := grad_tensors((args, kwargs))):
            watched = _BackwardBoundary.apply(self, *tensors)
            args, kwargs = replace_grad_tensors((args, kwargs), list(watched))
        return args, kwargs

    def _enter_model(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What only the outermost forward does: inputs to the device, the optimizer's event."""
        event, self.post_optim_event = self.post_optim_event, None
        device = self.home.device
        if device.type == "cpu":
            return args, kwargs
        if event is not None:
            torch.accelerator.current_stream().wait_event(event)
        return tuple(map_tensors(lambda t: t.to(device), given) for given in (args, kwargs))

    @torch.compiler.disable
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Reshard, and have the output's gradient make the parameters whole again."""
        events.end("forward", self)
        if self.phase is Phase.BACKWARD:
            return self._cast_output(output)
        if self.is_group:
            self._still_to_run.discard(id(module))
            if self._still_to_run:
                return self._cast_output(output)
        output = self.leave_forward(output)
        if self.runtime.forward_root is self:
            output = self.runtime.end_forward(output)
        return self._cast_output(output)

    def leave_forward(self, output: Any) -> Any:
        """What is due once the unit's modules have run, or the root's have without some of them."""
        self._still_to_run.clear()
        if not backward_is_running():
            self._reshard_after_forward()
            self.runtime.left(self)
        self.phase = Phase.IDLE
        if torch.is_grad_enabled():
            for tensor in grad_tensors(output):
                tensor.register_hook(self.before_backward)
        return output

    def _reshard_after_forward(self) -> None:
        wanted = self.reshard_after_forward
        if wanted is None:
            wanted = self.index != 0 or not torch.is_grad_enabled()
        if not wanted:
            return
        if self.near is not None:
            self.reshard_near()
        else:
            self.reshard()

    def is_partly_run(self) -> bool:
        """Whether some modules of the group have run in this forward and some have not."""
        return bool(self._still_to_run)

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        policy = self.mp_policy
        if policy.param_dtype is None or not policy.cast_forward_inputs:
            return args, kwargs
        return cast_floating(args, policy.param_dtype), cast_floating(kwargs, policy.param_dtype)

    def _cast_output(self, output: Any) -> Any:
        dtype = self.mp_policy.output_dtype
        return output if dtype is None else cast_floating(output, dtype)

    # Backward

    @torch.compiler.disable
    def before_backward(self, grad: torch.Tensor) -> torch.Tensor:
        """Make the parameters whole, and start the unit whose backward comes next."""
        if torch.is_grad_enabled():  # as autograd sets it for create_graph=True
            refuse_higher_order(self.name)
        self.runtime.begin_backward()
        if self.phase is Phase.BACKWARD:
            return grad  # another output of the same use
        self.phase = Phase.BACKWARD
        if self.unshard_in_backward:
            self.unshard()
            self.wait_for_unshard()
        if events.listeners:
            events.emit("backward", self.name)
        events.begin("backward", self)
        before = self.predecessors.pop() if self.predecessors else None
        expected = [] if before is None else self.runtime.at(before)
        for unit in alive(self.backward_prefetch) or expected:
            if unit.unshard_in_backward:
                unit.prefetch()
        return grad

    @torch.compiler.disable
    def finish_backward(self) -> None:
        """Reshard and reduce. Does nothing for a unit that this backward did not touch."""
        if self.phase is Phase.BACKWARD:
            events.end("backward", self)
        self.phase = Phase.REDUCED
        if self.reshard_after_backward:
            self.reshard()
        if self.reducer.syncs:
            self.runtime.reduce(self)
        else:
            self.reducer.accumulate()

    def give_up(self, accumulated: bool) -> None:
        """Give up this unit's part of an iteration."""
        self.reducer.give_up(accumulated)
        self.reshard()
        self.phase = Phase.IDLE
        self.predecessors.clear()
        self._still_to_run.clear()


def initialize(module: nn.Module, root: ScheduledUnit) -> None:
    """At the first forward, make `module` the root of all units inside it.

    Raises RuntimeError if it is one of a group, if a unit inside already ran as a root, or has
    parameters on the meta device; ValueError for trainable parameters of several dtypes in a unit.
    """
    if root.is_group:
        raise RuntimeError(
            "a group of modules cannot be the root: call fully_shard on the module that contains "
            "them too, and run its forward"
        )
    units: dict[ScheduledUnit, str] = {}
    for path, submodule in module.named_modules():
        unit = unit_of(submodule)
        if unit is not None and unit not in units:
            units[unit] = path
    for unit, path in units.items():
        if unit.runtime is not None:
            raise RuntimeError(
                f"unit {path!r} ran its first forward before the root that contains it: "
                "run the root's forward first"
            )
    names = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
    runtime = Runtime(list(units))
    for index, (unit, path) in enumerate(units.items()):
        unit.name = path or "root"
        if unit.state is State.SHARDED and not unit.is_adopted():
            unit.adopt()
        for param in unit.params:
            param.name = names.get(id(param.sharded), param.name)
        unit.check_ready()
        if debug.active and unit.home.replicas is not None:
            debug.active.same_on_replicas(unit.name, unit.rows(), unit.home.replicas)
        unit.index, unit.runtime = index, runtime

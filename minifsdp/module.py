"""What a module is after `fully_shard`: the methods that upstream's `FSDPModule` has."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from .hooks import ScheduledUnit, unit_of
from .placement import twin_of


class UnshardHandle:
    """What `FSDPModule.unshard(async_op=True)` returns."""

    def __init__(self, unit: ScheduledUnit) -> None:
        self._unit: ScheduledUnit | None = unit

    def wait(self) -> None:
        """Block until the unit's parameters are whole."""
        if self._unit is not None:
            self._unit.wait_for_unshard()
            self._unit = None


class FSDPModule:
    """What a module is after `fully_shard`: itself, and these methods."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Building a sharded class anew builds the module class underneath it, not sharded."""
        original = cls.__mro__[2]
        return original(*args, **kwargs)

    def _unit(self) -> ScheduledUnit:
        return unit_of(self)

    def _units(self, recurse: bool) -> Iterable[ScheduledUnit]:
        modules = self.modules() if recurse else [self]
        return dict.fromkeys(u for m in modules if (u := unit_of(m)) is not None)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Make this unit's own parameters whole; with `async_op`, once the handle is waited for."""
        unit = self._unit()
        unit.unshard()
        if async_op and not unit.gathers_late():  # such a gather has to begin now: it is done now
            return UnshardHandle(unit)
        unit.wait_for_unshard()
        return UnshardHandle(unit) if async_op else None

    def reshard(self) -> None:
        """Free this unit's whole parameters; rows are registered again."""
        self._unit().reshard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As any module's; gradients that are still being stepped on are waited for."""
        for unit in self._units(recurse=True):
            unit.settle()
        super().zero_grad(set_to_none)

    def reset_iter_state(self) -> None:
        """Give up the iteration under way after an exception; gradients not yet reduced are lost.

        Raises RuntimeError on a module that is not the root.
        """
        runtime = self._unit().runtime
        if runtime is None:
            return
        if self._unit().index != 0:
            raise RuntimeError("reset_iter_state is for the root: call it on the outermost module")
        runtime.give_up(accumulated=True)

    # What travels

    def set_requires_gradient_sync(self, value: bool, *, recurse: bool = True) -> None:
        """False: backward leaves gradients whole and local, accumulating, until one that syncs."""
        for unit in self._units(recurse):
            unit.reducer.syncs = value
            unit.reducer.all_reduces = value

    def set_requires_all_reduce(self, value: bool, *, recurse: bool = True) -> None:
        """False, on a 2-D mesh: reduce over shards only, until a backward that does both."""
        for unit in self._units(recurse):
            unit.reducer.all_reduces = value

    def set_is_last_backward(self, value: bool) -> None:
        """False: more backwards follow before gradients are read, so reductions need not end."""
        unit = self._unit()
        root = unit if unit.runtime is None else unit.runtime.root()
        root.is_last_backward = value

    def set_reshard_after_forward(self, value: bool, recurse: bool = True) -> None:
        """As fully_shard's keyword, from now on."""
        if not isinstance(value, bool):
            raise ValueError(f"set_reshard_after_forward takes True or False, not {value!r}")
        for unit in self._units(recurse):
            unit.reshard_after_forward = value
            unit.near = None

    def set_reshard_after_backward(self, value: bool, *, recurse: bool = True) -> None:
        """False keeps full parameters after backward, for the next micro-batch's forward."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = value

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these units when this one's forward starts, instead of the one expected next."""
        self._unit().forward_prefetch = check_units(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these units when this one's backward starts, instead of the one expected next."""
        self._unit().backward_prefetch = check_units(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backward does not need this unit's own parameters whole (an embedding)."""
        self._unit().unshard_in_backward = unshard_in_backward

    # How gradients are reduced

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None
    ) -> None:
        """Call `hook` with this unit's reduced rows, flat, before they are divided and handed out.

        On a 2-D mesh that is after the all-reduce. `stream`: where to run it, on a 1-D mesh.
        Raises ValueError for a stream with a 2-D mesh.
        """
        unit = self._unit()
        if stream is not None and unit.home.replicas is not None:
            raise ValueError("a stream for the hook cannot be set on a 2-D mesh: leave it out")
        unit.reducer.all_reduce_hook, unit.reducer.hook_stream = hook, stream

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by `factor` instead of the number of ranks."""
        self._unit().reducer.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated name of `set_gradient_divide_factor`."""
        warnings.warn(
            "set_reduce_scatter_divide_factor is now called set_gradient_divide_factor",
            FutureWarning,
            stacklevel=2,
        )
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Reduce this unit's gradients by sums only, dividing before and after."""
        self._unit().reducer.force_sum = enable

    def set_reduce_scatter_unused_params(self, value: bool, *, recurse: bool = True) -> None:
        """Send zeros for parameters without a gradient, so ranks may use different ones.

        Inside a unit that every rank runs: a unit that one rank skips is a missing all-gather.
        """
        for unit in self._units(recurse):
            unit.reducer.fills_unused = value

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Let so many reductions be under way at once; the largest number of any unit counts.

        Raises TypeError for what is no int, ValueError for one below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            given = type(max_input_buffers).__name__
            raise TypeError(f"max_input_buffers must be an int, not {given}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be at least 1, not {max_input_buffers}")
        for unit in self._units(recurse):
            unit.max_pending = max_input_buffers

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce over a process group of its own, so that gathers need not queue; collective."""
        for unit in self._units(recurse):
            unit.reducer.peers = twin_of(unit.home.shards) if enable else unit.home.shards

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Have the root's next forward wait for `event`, once: the end of an optimizer step."""
        self._unit().post_optim_event = event

    # What upstream's class has and this one refuses

    def set_custom_all_gather(self, comm: object) -> None:
        """Refused: see `minifsdp.collectives.use_collectives`."""
        _refuse("set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: object) -> None:
        """Refused: see `minifsdp.collectives.use_collectives`."""
        _refuse("set_custom_reduce_scatter")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refused: message buffers are the engine's own."""
        _refuse("set_allocate_memory_from_process_group_for_comm")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refused: symmetric memory is not supported."""
        _refuse("set_symm_mem_for_comm")

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """`to`, `cuda`, `to_empty` ...: applied to rows, which are then taken into new shards."""
        self.reshard()
        result = super()._apply(*args, **kwargs)
        self._unit().adopt()
        return result


def check_units(modules: Iterable[object]) -> list[weakref.ref[ScheduledUnit]]:
    """The units of `modules`. Raises ValueError for one that `fully_shard` did not return."""
    units = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"expected modules that fully_shard returned, got {type(module)}")
        units.append(weakref.ref(module._unit()))
    return units


def _refuse(method: str) -> NoReturn:
    raise NotImplementedError(
        f"{method} is not supported: minifsdp chooses how messages travel and owns their buffers; "
        "choose with minifsdp.collectives.use_collectives"
    )

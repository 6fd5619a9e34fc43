"""`fully_shard` and what it adds to a module: the public face of the engine."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .param import Owner, ShardedParam, mark_sharded, sharded_as
from .placement import Home, default_mesh, near_home
from .policy import MixedPrecisionPolicy, OffloadPolicy, as_mixed_precision, as_offload
from .runtime import UNIT_ATTRIBUTE, ScheduledUnit, unit_of
from .unit import shard


@overload
def fully_shard(module: nn.Module, **keywords: Any) -> FSDPModule: ...
@overload
def fully_shard(module: list[nn.Module], **keywords: Any) -> list[FSDPModule]: ...
def fully_shard(
    module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: object | None = None,
):
    """Shard the parameters of `module` (or of a list of modules, as one unit) over ranks, in place.

    Parameters of submodules that are units already stay theirs, so shard the inner modules first.
    Returns its argument, whose modules are now `FSDPModule`s holding `DTensor`s with `Shard(0)`.

    mesh: 1-D (shard), or 2-D (replicate over axis 0, shard over axis 1); default: all ranks.
    reshard_after_forward: True frees full parameters after forward and gathers them again in
        backward; False keeps them; an int keeps them sharded over that many neighbouring ranks;
        None means True, but False for the root.
    shard_placement_fn: may return `Shard(0)` or None for each parameter; no other dim is supported.
    mp_policy, offload_policy: see `policy`; upstream's objects are accepted too.
    ignored_params: parameters that stay whole and are never synchronised.

    Raises ValueError for a module that cannot be a unit (a ModuleList, one already sharded, a
    parent before its child, a parameter tied to another unit's) and for a bad argument;
    NotImplementedError for what upstream's function can and this one cannot.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    for one in modules:
        _check_module(one)
    if dp_mesh_dims is not None:
        raise NotImplementedError(
            "fully_shard does not take dp_mesh_dims (parameters that are DTensors already): pass "
            "the data-parallel submesh as mesh="
        )
    home = Home.of(mesh if mesh is not None else default_mesh())
    near = _near(reshard_after_forward, home)
    ignored = set(ignored_params or ())
    params = _own_params(modules, ignored, home)
    _check_placements(shard_placement_fn, params)
    _move_to_device(modules, params, ignored, home.device)
    unit = ScheduledUnit(
        modules,
        params,
        home,
        as_mixed_precision(MixedPrecisionPolicy() if mp_policy is None else mp_policy),
        as_offload(OffloadPolicy() if offload_policy is None else offload_policy),
    )
    unit.near = near
    if reshard_after_forward is not None:
        unit.reshard_after_forward = reshard_after_forward is not False
    for one in modules:
        setattr(one, UNIT_ATTRIBUTE, unit)
        one.__class__ = _sharded_class(type(one))
    _reshard_around_state_dicts(params, unit)
    return module


# What fully_shard checks and collects


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise ValueError(f"fully_shard takes modules, not {type(module).__name__}: {module!r}")
    name = type(module).__name__
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(f"{name} has no forward to hook: shard the modules inside it instead")
    if unit_of(module) is not None:
        raise ValueError(f"{name} is already sharded: call fully_shard once for each module")


def _near(reshard_after_forward: bool | int | None, home: Home) -> Home | None:
    """The smaller groups of ranks to reshard to, if that is what an int asks for."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return None
    size, whole = reshard_after_forward, home.shards.size
    if not isinstance(size, int) or size < 1 or whole % size:
        raise ValueError(
            f"reshard_after_forward={size!r} must be True, False, None, or a divisor of the "
            f"{whole} ranks that the parameters are sharded over"
        )
    if size == 1:
        raise ValueError("reshard_after_forward=1 keeps whole parameters: say False instead")
    return None if size == whole else near_home(home, size)


def _walk(modules: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of `modules` and everything inside them that is no unit yet."""
    seen: set[nn.Module] = set()

    def visit(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or unit_of(module) is not None:
            return
        seen.add(module)
        yield path, module
        for name, child in module.named_children():
            yield from visit(f"{path}.{name}" if path else name, child)

    for module in modules:
        yield from visit("", module)


def _own_params(
    modules: list[nn.Module], ignored: set[nn.Parameter], home: Home
) -> list[ShardedParam]:
    """Describe the parameters that become the new unit's, each once, with all its owners."""
    owners: dict[nn.Parameter, list[Owner]] = {}
    names: dict[nn.Parameter, str] = {}
    for path, module in _walk(modules):
        for attribute, param in module._parameters.items():
            if param is None or param in ignored:
                continue
            owners.setdefault(param, []).append(Owner(weakref.ref(module), attribute))
            names.setdefault(param, f"{path}.{attribute}" if path else attribute)
    described = []
    for param, its_owners in owners.items():
        name = names[param]
        if isinstance(param, DTensor):
            raise ValueError(
                f"parameter {name!r} is a DTensor already. If its parent was sharded before it: shard "
                "inner modules first, their parents after them"
            )
        if (other := sharded_as(param)) is not None:
            raise ValueError(
                f"parameter {name!r} is tied to {other!r}, which another unit shards: shard both "
                "modules as one unit, fully_shard([module_a, module_b])"
            )
        described.append(shard(name, param, its_owners, home))
        mark_sharded(param, name)
    return described


def _check_placements(choose: Callable[..., Shard | None] | None, params) -> None:
    if choose is None:
        return
    for param in params:
        placement = choose(param.registered())
        if placement is not None and placement != Shard(0):
            raise NotImplementedError(
                f"shard_placement_fn wants {placement} for parameter {param.name!r}; only "
                "Shard(0), rows, is supported"
            )


def _move_to_device(modules, params: list[ShardedParam], ignored, device: torch.device) -> None:
    """Bring whole parameters and buffers to the unit's device, unless they are on meta."""
    for param in params:
        whole = param.registered()
        if not whole.is_meta and whole.device != device:
            whole.data = whole.data.to(device)
    for _, module in _walk(modules):
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def _reshard_around_state_dicts(params: list[ShardedParam], unit: ScheduledUnit) -> None:
    """State dicts hold rows, so a unit that is whole (the root after forward) reshards first."""

    def reshard(*_: Any) -> None:
        unit.reshard()

    for module in {owner.module() for param in params for owner in param.owners}:
        module.register_state_dict_pre_hook(reshard)
        module.register_load_state_dict_pre_hook(reshard)


@functools.cache
def _sharded_class(cls: type) -> type:
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _refuse_deepcopy})


def _refuse_deepcopy(self: nn.Module, memo: object) -> None:
    raise RuntimeError(
        "a sharded module cannot be deep-copied: build the model again and load this one's state"
    )


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
        if async_op:
            return UnshardHandle(unit)
        unit.wait_for_unshard()
        return None

    def reshard(self) -> None:
        """Free this unit's whole parameters; rows are registered again."""
        self._unit().reshard()

    def reset_iter_state(self) -> None:
        """Give up the iteration under way after an exception; gradients not yet reduced are lost.

        Raises RuntimeError on a module that is not the root.
        """
        runtime = self._unit().runtime
        if runtime is None:
            return
        if self._unit().index != 0:
            raise RuntimeError("reset_iter_state is for the root: call it on the outermost module")
        runtime.reset()

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
        self._unit().forward_prefetch = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these units when this one's backward starts, instead of the one expected next."""
        self._unit().backward_prefetch = _units_of(modules)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """`to`, `cuda`, `to_empty` ...: applied to rows, which are then taken into new shards."""
        self.reshard()
        result = super()._apply(*args, **kwargs)
        self._unit().adopt()
        return result


def _units_of(modules: Iterable[object]) -> list[weakref.ref[ScheduledUnit]]:
    units = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"expected modules that fully_shard returned, got {type(module)}")
        units.append(weakref.ref(module._unit()))
    return units


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make `module.method_name` a forward too: parameters are whole while it runs.

    Does nothing on a module that is not sharded. Raises ValueError if there is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")

    function, this = getattr(method, "__func__", method), weakref.ref(module)

    @functools.wraps(method)
    def as_forward(*args: Any, **kwargs: Any) -> Any:
        self = this()
        unit = self._unit()
        args, kwargs = unit.before_forward(self, args, kwargs)
        return unit.after_forward(self, args, function(self, *args, **kwargs))

    setattr(module, method_name, as_forward)

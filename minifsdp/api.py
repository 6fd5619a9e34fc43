"""`fully_shard` and what it adds to a module: the public face of the engine."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from .hooks import UNIT_ATTRIBUTE, ScheduledUnit
from .managed import check_module, check_placements, move_to_device, own_params, reshard_mode
from .misuse import mark, watch_optimizers
from .module import FSDPModule, check_units
from .param import ShardedParam
from .placement import Home, default_mesh
from .policy import MixedPrecisionPolicy, OffloadPolicy, as_mixed_precision, as_offload


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
        check_module(one)
    if dp_mesh_dims is not None:
        raise NotImplementedError(
            "fully_shard does not take dp_mesh_dims (parameters that are DTensors already): pass "
            "the data-parallel submesh as mesh="
        )
    home = Home.of(mesh if mesh is not None else default_mesh())
    reshards, near = reshard_mode(reshard_after_forward, home)
    precision = as_mixed_precision(MixedPrecisionPolicy() if mp_policy is None else mp_policy)
    offload = as_offload(OffloadPolicy() if offload_policy is None else offload_policy)
    params = own_params(modules, set(ignored_params or ()), home)
    check_placements(shard_placement_fn, params)
    # Nothing is changed before this line, so that a refused call can be made again.
    move_to_device(modules, params, home.device)
    watch_optimizers()
    for param in params:
        mark(param.registered(), f"parameter {param.name!r} as it was before sharding")
    unit = ScheduledUnit(modules, params, home, precision, offload)
    unit.near = near
    unit.reshard_after_forward = reshards
    for one in modules:
        setattr(one, UNIT_ATTRIBUTE, unit)
        one.__class__ = _sharded_class(type(one))
    _reshard_around_state_dicts(params, unit)
    return module


def _reshard_around_state_dicts(params: list[ShardedParam], unit: ScheduledUnit) -> None:
    """State dicts hold rows, so a unit that is whole (the root after forward) reshards first.

    Loading with `assign=True` replaces parameters: the unit takes over what it finds.
    """

    def reshard(*_: Any) -> None:
        unit.settle()
        unit.reshard()

    def adopt(*_: Any) -> None:
        if not unit.is_adopted():
            unit.adopt()

    for module in {owner.module() for param in params for owner in param.owners}:
        module.register_state_dict_pre_hook(reshard)
        module.register_load_state_dict_pre_hook(reshard)
        module.register_load_state_dict_post_hook(adopt)


@functools.cache
def _sharded_class(cls: type) -> type:
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _refuse_deepcopy})


def _refuse_deepcopy(self: nn.Module, memo: object) -> None:
    raise RuntimeError(
        "a sharded module cannot be deep-copied: build the model again and load this one's state"
    )


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


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Upstream's way to let several roots (pipeline stages) share streams; nothing to do here.

    The engine has no streams of its own: messages run on the process group's, buffers come from the
    compute stream's pool, for all roots alike. Raises ValueError for modules that are not sharded.
    """
    check_units(modules)

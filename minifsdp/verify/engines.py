"""The engines that can be compared, and what another one has to be.

[Note: an engine of your own]
Name a function `shard(model, units, settings)` that shards `model` over the ranks of the process
group and returns it, or a wrapper that holds it as `.module`. `units`: the modules that are units,
inner ones first, the root not among them. `settings`: a `Settings`, of which dtype, reduce_dtype,
offload and device say what is wanted. Its parameters may be DTensors, or whole on every rank. If
there is accumulation, `set_requires_gradient_sync` or `no_sync` of the model is used, and its
`clip_grad_norm_` for clipping, or torch's. Where that is not enough, name a subclass of `Engine`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.parallel import DistributedDataParallel

import minifsdp

from .named import named
from .settings import Settings
from .units import clean

Shard = Callable[[nn.Module, list[nn.Module], Settings], nn.Module]


class Engine:
    """How a sharding engine is driven. Subclasses say how it shards, and what it does otherwise."""

    name = "engine"
    exact = True
    """Whether its bits are to be equal; if not, what rounding explains is allowed."""
    ignores_offload = False

    def absent(self, settings: Settings) -> str | None:
        """Why it cannot run with these settings, or None."""
        return None

    def shard(self, model: nn.Module, units: list[nn.Module], settings: Settings) -> nn.Module:
        """Shard `model` and return what is called in its place."""
        raise NotImplementedError

    def inner(self, model: nn.Module) -> nn.Module:
        """The module whose names are those of the model that was built."""
        return model

    def syncing(self, model: nn.Module, syncs: bool) -> contextlib.AbstractContextManager[None]:
        """Around forward and backward of a micro-batch: whether gradients are reduced."""
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(syncs)
        elif not syncs and hasattr(model, "no_sync"):
            return model.no_sync()
        return contextlib.nullcontext()

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Clip all gradients; the norm they had together."""
        if hasattr(model, "clip_grad_norm_"):
            return model.clip_grad_norm_(max_norm)
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def tensors(self, model: nn.Module, gradients: bool) -> dict[str, torch.Tensor | None]:
        """Parameters by name, or their gradients: DTensors, or whole on every rank; all call."""
        named_params = self.inner(model).named_parameters()
        return {clean(name): p.grad if gradients else p for name, p in named_params}


def _fully_shard(library: Any, model: nn.Module, units: list[nn.Module], settings: Settings):
    common: dict[str, Any] = {
        "mesh": init_device_mesh(torch.device(settings.device).type, (dist.get_world_size(),)),
        "mp_policy": library.MixedPrecisionPolicy(settings.dtype, settings.reduce_dtype),
    }
    if settings.offload:
        pin = torch.device(settings.device).type != "cpu"
        common["offload_policy"] = library.CPUOffloadPolicy(pin_memory=pin)
    for unit in units:
        library.fully_shard(unit, **common)
    return library.fully_shard(model, **common)


class MiniFSDP(Engine):
    name = "minifsdp"

    def shard(self, model: nn.Module, units: list[nn.Module], settings: Settings) -> nn.Module:
        return _fully_shard(minifsdp, model, units, settings)

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        return minifsdp.clip_grad_norm_(model.parameters(), max_norm)


class FSDP2(Engine):
    name = "fsdp2"

    def shard(self, model: nn.Module, units: list[nn.Module], settings: Settings) -> nn.Module:
        return _fully_shard(fsdp, model, units, settings)

    def tensors(self, model: nn.Module, gradients: bool) -> dict[str, torch.Tensor | None]:
        for module in model.modules():  # some stay whole after recomputation
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()
        return super().tensors(model, gradients)


class FSDP1(Engine):
    name = "fsdp1"
    exact = False
    ignores_offload = True  # it pins what it offloads, which needs a GPU

    def syncing(self, model: nn.Module, syncs: bool) -> contextlib.AbstractContextManager[None]:
        # In `no_sync` it accumulates in the dtype it computes in, so more is rounded away.
        return super().syncing(model, syncs or self._rounds)

    def shard(self, model: nn.Module, units: list[nn.Module], settings: Settings) -> nn.Module:
        self._rounds = settings.reduce_dtype not in (None, settings.dtype)
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.fsdp")  # it is deprecated
        mixed = None
        if settings.dtype or settings.reduce_dtype:
            mixed = fsdp.MixedPrecision(
                settings.dtype,
                settings.reduce_dtype or settings.dtype,
                cast_forward_inputs=True,
            )
        wrapped = set(units)
        device = torch.device(settings.device)
        return fsdp.FullyShardedDataParallel(
            model,
            auto_wrap_policy=CustomPolicy(lambda module: module in wrapped),
            mixed_precision=mixed,
            device_id=device if device.type == "cpu" else torch.cuda.current_device(),
            use_orig_params=True,
        )

    def tensors(self, model: nn.Module, gradients: bool) -> dict[str, torch.Tensor | None]:
        whole = fsdp.FullyShardedDataParallel.summon_full_params
        with whole(model, writeback=False, with_grads=gradients):
            found = super().tensors(model, gradients)
            if gradients:  # a frozen parameter beside trained ones in a flat one gets zeros
                trained = super().tensors(model, gradients=False)
                found = {n: t if trained[n].requires_grad else None for n, t in found.items()}
            return {n: t if t is None else t.detach().clone() for n, t in found.items()}


class DDP(Engine):
    name = "ddp"
    exact = False
    ignores_offload = True

    def absent(self, settings: Settings) -> str | None:
        if {settings.dtype, settings.reduce_dtype} - {None, torch.float32}:
            return "DistributedDataParallel casts no parameters (--dtype, --reduce-dtype)"
        return None

    def shard(self, model: nn.Module, units: list[nn.Module], settings: Settings) -> nn.Module:
        ids = None if torch.device(settings.device).type == "cpu" else [torch.cuda.current_device()]
        return DistributedDataParallel(
            model, device_ids=ids, broadcast_buffers=False, find_unused_parameters=True
        )

    def inner(self, model: nn.Module) -> nn.Module:
        return model.module


class Named(Engine):
    """A function that shards, as an engine."""

    def __init__(self, name: str, shard: Shard) -> None:
        self.name, self._shard = name, shard

    def shard(self, model: nn.Module, units: list[nn.Module], settings: Settings) -> nn.Module:
        return self._shard(model, units, settings)

    def inner(self, model: nn.Module) -> nn.Module:
        wraps = isinstance(getattr(model, "module", None), nn.Module)
        return model.module if wraps and len(list(model.children())) == 1 else model


class Whole(Engine):
    """No sharding: see `whole`."""

    name = "none"
    exact = False
    ignores_offload = True


ENGINES: dict[str, type[Engine]] = {e.name: e for e in (MiniFSDP, FSDP2, FSDP1, DDP, Whole)}


def engine_of(given: str | Shard | Engine | type[Engine]) -> Engine:
    """A known name, `package.module:name`, a function that shards, or an `Engine`.

    Raises ValueError for anything else.
    """
    label = given if isinstance(given, str) else None
    if isinstance(given, str):
        if given in ENGINES:
            return ENGINES[given]()
        if ":" not in given:
            raise ValueError(
                f"no engine {given!r}: give {', '.join(ENGINES)}, or package.module:shard for one "
                "of your own"
            )
        given = named(given, "engine")
    if isinstance(given, type) and issubclass(given, Engine):
        given = given()
    if isinstance(given, Engine):
        if type(given).name == Engine.name and given.name == Engine.name:
            given.name = type(given).__name__
        return given
    if callable(given):
        return Named(label or getattr(given, "__name__", "engine"), given)
    raise ValueError(
        f"an engine is a name or a function shard(model, units, settings), not {given!r}"
    )

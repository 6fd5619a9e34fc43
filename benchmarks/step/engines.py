"""The engines that are compared, each with the settings that serve it best."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import minifsdp
from llama.model import TransformerBlock
from minifsdp.collectives import use_collectives

from .built import Built, DeepSpeedBuilt, Setup, adamw

Settings = dict[str, Any]


@dataclass(frozen=True)
class Engine:
    """One row of the benchmark."""

    name: str
    about: str
    build: Callable[[Setup, Settings], Built]
    variants: tuple[Settings, ...] = ({},)
    """Settings to choose from: a timed run tries them in turns and keeps the fastest; the first
    holds the least memory, and memory is measured with it."""
    absent: Callable[[Setup], str | None] = lambda setup: None
    """Why it cannot run here, or None."""
    exact: bool = False
    """Its losses must be FSDP2's to the bit in every step."""
    sharded: bool = True
    offloads: bool = True
    steps_in_backward: bool = False


# ---- minifsdp: engine and collectives are told apart by its rows --------------------------------


def _minifsdp(setup: Setup, settings: Settings, collectives: str, in_backward: bool) -> Built:
    around = functools.partial(use_collectives, collectives)
    with around():
        model = _fully_sharded(setup, minifsdp)
        if in_backward:
            minifsdp.step_in_backward(model, adamw)
            return Built(model, None, setup.device, around)
        return Built(model, adamw(model.parameters()), setup.device, around)


def _minifsdp_absent(setup: Setup, collectives: str, in_backward: bool) -> str | None:
    if setup.device.type == "cuda" and collectives != "backend":
        return f"{collectives} moves tensors of the CPU only"
    try:
        with use_collectives(collectives):
            pass
    except ValueError as error:
        return str(error)
    if in_backward and not hasattr(minifsdp, "step_in_backward"):
        return "minifsdp has no step_in_backward"
    return None


def _minifsdp_row(collectives: str, in_backward: bool) -> Engine:
    here = {"collectives": collectives, "in_backward": in_backward}
    return Engine(
        f"minifsdp-{collectives}" + ("-in-backward" if in_backward else ""),
        f"minifsdp, {collectives} collectives" + (", step_in_backward" if in_backward else ""),
        functools.partial(_minifsdp, **here),
        absent=functools.partial(_minifsdp_absent, **here),
        exact=True,
        steps_in_backward=in_backward,
    )


# ---- torch's engines ----------------------------------------------------------------------------


def _fully_sharded(setup: Setup, library: Any) -> nn.Module:
    """Each block a unit, the root the rest; `library` is minifsdp or torch.distributed.fsdp."""
    shared: dict[str, Any] = {"mesh": init_device_mesh(setup.device.type, (dist.get_world_size(),))}
    if setup.offload:
        shared["offload_policy"] = library.CPUOffloadPolicy(pin_memory=setup.pins)
    model = setup.model()
    for block in model.layers:
        library.fully_shard(block, **shared)
    return library.fully_shard(model, **shared)


def _fsdp2(setup: Setup, settings: Settings) -> Built:
    model = _fully_sharded(setup, fsdp)
    # Private, but nothing public lets gathers overlap where there are no streams (a CPU).
    model._set_unshard_async_op(settings["asynchronous"])
    if settings["forward_prefetch"]:
        units = [model, *model.layers]
        for unit, following in itertools.pairwise(units):
            unit.set_modules_to_forward_prefetch([following])
    return Built(model, adamw(model.parameters()), setup.device)


def _fsdp1(setup: Setup, settings: Settings) -> Built:
    prefetch = settings["backward_prefetch"]
    model = fsdp.FullyShardedDataParallel(
        setup.model(),
        auto_wrap_policy=ModuleWrapPolicy({TransformerBlock}),
        cpu_offload=fsdp.CPUOffload(offload_params=True) if setup.offload else None,
        device_id=setup.device,
        backward_prefetch=fsdp.BackwardPrefetch[prefetch] if prefetch else None,
        forward_prefetch=settings["forward_prefetch"],
        limit_all_gathers=settings["limit_all_gathers"],
        use_orig_params=settings["use_orig_params"],
    )
    return Built(model, adamw(model.parameters()), setup.device)


def _fsdp1_variants() -> tuple[Settings, ...]:
    """Views of flat parameters or these themselves; without prefetching and with most of it."""
    plain: Settings = dict(backward_prefetch=None, forward_prefetch=False, limit_all_gathers=True)
    prefetching: Settings = dict(
        backward_prefetch="BACKWARD_PRE", forward_prefetch=True, limit_all_gathers=False
    )
    return (
        {"use_orig_params": True, **plain},
        {"use_orig_params": False, **plain},
        {"use_orig_params": False, **prefetching},
    )


def _fsdp1_absent(setup: Setup) -> str | None:
    if setup.offload and setup.device.type == "cpu":
        return "FullyShardedDataParallel pins what it offloads, which needs a GPU"
    return None


def _ddp(setup: Setup, settings: Settings) -> Built:
    model = DistributedDataParallel(setup.model().to(setup.device), **settings)
    return Built(model, adamw(model.parameters()), setup.device)


def _none(setup: Setup, settings: Settings) -> Built:
    model = setup.model().to(setup.device)
    return Built(model, adamw(model.parameters()), setup.device)


def _deepspeed(setup: Setup, settings: Settings) -> Built:
    import deepspeed  # never a dependency: measured where it is installed

    place = {"device": "cpu", "pin_memory": setup.pins}
    offload = {"offload_param": place, "offload_optimizer": place} if setup.offload else {}
    model = setup.model()
    # By default buckets take gigabytes, and torch's linear is replaced for all engines alike.
    buckets = dict.fromkeys(
        ("reduce_bucket_size", "stage3_prefetch_bucket_size"),
        sum(p.numel() for p in model.layers[0].parameters()),
    )
    zero = {"stage": 3, "memory_efficient_linear": False, **settings, **buckets, **offload}
    engine, optimizer, *_ = deepspeed.initialize(
        model=model,
        optimizer=adamw(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": setup.work.batch,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
        },
    )
    return DeepSpeedBuilt(engine, optimizer, setup.device)


def _deepspeed_absent(setup: Setup) -> str | None:
    return None if importlib.util.find_spec("deepspeed") else "deepspeed is not installed"


_ALL = [
    *(
        _minifsdp_row(collectives, in_backward)
        for in_backward in (False, True)
        for collectives in ("shared", "direct", "backend")
    ),
    Engine(
        "fsdp2",
        "torch's fully_shard",
        _fsdp2,
        variants=(
            {"asynchronous": False, "forward_prefetch": False},
            {"asynchronous": True, "forward_prefetch": True},
        ),
    ),
    Engine(
        "fsdp1",
        "torch's FullyShardedDataParallel",
        _fsdp1,
        variants=_fsdp1_variants(),
        absent=_fsdp1_absent,
    ),
    Engine(
        "ddp",
        "torch's DistributedDataParallel",
        _ddp,
        variants=({"gradient_as_bucket_view": True, "static_graph": True},),
        sharded=False,
        offloads=False,
    ),
    Engine(
        "deepspeed",
        "DeepSpeed ZeRO-3, where it is installed",
        _deepspeed,
        variants=({"overlap_comm": True, "contiguous_gradients": True},),
        absent=_deepspeed_absent,
    ),
    Engine(
        "none",
        "the whole model on every rank, no communication: the limit",
        _none,
        sharded=False,
        offloads=False,
    ),
]
ENGINES = {engine.name: engine for engine in _ALL}
USUAL = [
    name for name in ENGINES if not name.endswith(("direct-in-backward", "backend-in-backward"))
]
"""What runs unless engines are named: stepping in backward is told from the rest once."""
UPSTREAM = ("fsdp1", "fsdp2")
"""The engines to beat: ratios are against the better of them."""
REFERENCE, LIMIT = "fsdp2", "none"

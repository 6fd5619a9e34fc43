"""A world of N ranks and one GPU, pretended in one process that has neither.

[Note: what is real and what is pretended]
Model, autograd, optimizer and engine are the real ones and take the decisions they take in a run.
Pretended are memory (torch's fake tensors: shapes, types, strides and devices, no bytes), the
process group (torch's fake one: every collective returns at once) and the device. A type of device
that every build of torch knows and nobody has ("lazy") stands for the GPU: without CUDA, autograd
touches no tensor that says it is on "cuda". What would ask the device or other ranks for a value,
or keep fake buffers for later runs, is replaced while the plan is made; `_stand_ins` lists all of
it, and nothing of it is left afterwards.
"""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .. import collectives, offload, stepping
from ..collectives import backend
from ..collectives.backend import BackendCollectives
from ..collectives.direct import DirectCollectives
from ..collectives.packed import PackedGather
from ..flat import FlatShard
from .attention import PretendedAttention

GPU = "lazy"
"""The type of the pretended device, as `init_device_mesh` and `torch.device` take it."""


class Notes(NamedTuple):
    """Who is told of what no operator tells of."""

    around_submitted: Callable[[Callable[[], Any]], AbstractContextManager[Any]] = nullcontext
    """A context around each function that the engine gives a thread of its own."""
    copied: Callable[[], Callable[[], None]] = lambda: lambda: None
    """Called when copies between host and device were issued; returns what waits for them."""


_FUSED = "_get_fused_kernels_supported_devices"
_FOREACH = "_get_foreach_kernels_supported_devices"
FEW_RANKS = 4  # see [Note: many ranks]


@contextmanager
def pretended_world(
    world_size: int,
    device_type: str,
    notes: Notes = Notes(),  # noqa: B008  (never changed)
) -> Iterator[None]:
    """A process group of `world_size` ranks, of which this process is rank 0.

    device_type: GPU, or "cpu" for a plan of a run on CPUs.
    Raises RuntimeError in a process that has a process group already, ValueError for a bad
    argument.
    """
    if world_size < 1:
        raise ValueError(f"a world of {world_size} ranks cannot be planned: give 1 or more")
    if device_type not in (GPU, "cpu"):
        raise ValueError(f"plan for a {GPU!r} or a 'cpu', not for {device_type!r}")
    if dist.is_initialized():
        raise RuntimeError(
            "this process has a process group already; a plan pretends one of its own: plan in a "
            "process that does not train, or call destroy_process_group() first"
        )
    dist.init_process_group("fake", store=_fake_store(), rank=0, world_size=world_size)
    try:
        # One thread: a process makes those of devices once, for the devices there are.
        with ExitStack() as stack, torch.autograd.set_multithreading_enabled(False):
            for owner, name, stand_in in _stand_ins(device_type, notes):
                stack.enter_context(_replaced(owner, name, stand_in))
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from warning and logging: about shapes it tries, about devices nobody has."""
    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.split(".")[0] == "torch"
    ]
    before = [logger.disabled for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")
        for logger in loggers:
            logger.disabled = True
        try:
            yield
        finally:
            for logger, disabled in zip(loggers, before, strict=True):
                logger.disabled = disabled


def fake_tensors() -> FakeTensorMode:
    """Tensors made inside have no memory. Tensors from outside (tables, constants) may be used."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _fake_store() -> dist.Store:
    """The rendezvous of torch's fake process group, and its registration.

    It is in torch's testing code, which is private; nothing public makes many ranks of one process.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


@contextmanager
def _replaced(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    missing = object()
    before = owner.get(name, missing) if isinstance(owner, dict) else vars(owner).get(name, missing)
    put = owner.__setitem__ if isinstance(owner, dict) else functools.partial(setattr, owner)
    put(name, stand_in)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            put(name, before)


def _stand_ins(device_type: str, notes: Notes) -> list[tuple[Any, str, Any]]:
    """(owner, name, what it is while a plan is made)."""
    named = collectives._IMPLEMENTATIONS
    many = dist.get_world_size() > FEW_RANKS
    replaced = [
        # New ones, whose buffers are gone with the plan.
        (named, "backend", PlannedCollectives() if many else BackendCollectives()),
        (named, "direct", DirectCollectives()),
        (offload, "_up", offload.Staging()),
        (offload, "_down", offload.Staging()),
        # A slice of a storage without bytes cannot be taken; a view of the tensor is as small.
        (FlatShard, "views", _views),
        # Host steps run at once; what they overlap with is the timeline's business.
        (stepping, "ThreadPoolExecutor", lambda *_: AtOnce(notes)),
    ]
    if many:
        replaced.append((FlatShard, "full_slots", _no_slots))
    if device_type == GPU:
        here = {"is_available": True, "current_device_index": None, "current_accelerator": _gpu()}
        for name, answer in here.items():
            replaced.append((torch.accelerator, name, lambda *_, answer=answer, **__: answer))
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("torch.optim"):
                for name in vars(module).keys() & {_FUSED, _FOREACH}:
                    replaced.append((module, name, lambda: [GPU, "cpu", "cuda"]))
        replaced.append((torch, GPU, SimpleNamespace(device_count=lambda: 1)))
        replaced.append((offload, "_copied", lambda device: notes.copied()))
        replaced.append((nn.functional, "scaled_dot_product_attention", PretendedAttention()))
        replaced.append((torch, "norm", _norm))
    return replaced


_plain_norm = torch.norm


def _norm(
    input: torch.Tensor,
    p: float | str | None = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """torch.norm, by the operator it takes on CUDA; on unknown devices it takes another, whose
    shards DTensor does not add up."""
    if input.device.type != GPU or p == "nuc" or out is not None:
        return _plain_norm(input, p, dim, keepdim, out, dtype)
    order = 2.0 if p in (None, "fro") else p
    return torch.linalg.vector_norm(input, order, dim, keepdim, dtype=dtype)


def _gpu() -> torch.device:
    return torch.device(GPU)


def _views(flat_shard: FlatShard) -> list[torch.Tensor]:
    views = []
    layouts, offsets = flat_shard.layouts, flat_shard.piece.offsets
    for param, layout, start in zip(flat_shard.params, layouts, offsets, strict=True):
        shape = (len(layout.rows_of(flat_shard.rank)), *param.shape[1:])
        stop = start + layout.numel_of(flat_shard.rank)
        views.append(flat_shard.flat[start:stop].view(shape))
    return views


class AtOnce:
    """A thread pool without threads: what is submitted has run when `submit` returns."""

    def __init__(self, notes: Notes) -> None:
        self._around = notes.around_submitted

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._around(function):
            future.set_result(function())
        return future


# [Note: many ranks] The engine copies a message out piece by piece, one for each rank and
# parameter: 740,000 views for 70B on 1,024 ranks, none of which takes memory. For more than a few
# ranks a plan leaves the views out and copies each part of the message as one.


def _no_slots(part: FlatShard) -> list[tuple[torch.Tensor, ...]]:
    """One place for all ranks: the whole storage of the full parameters."""
    if part.layouts[0].world_size == 1:
        slots = [p.slots(layout) for p, layout in zip(part.params, part.layouts, strict=True)]
        return list(zip(*slots, strict=True))
    padded = part.params[0].padded
    storage = padded.untyped_storage()
    full = padded.new_empty(0).set_(storage, 0, (storage.nbytes() // padded.itemsize,))
    return [(full,)]


class PlannedGather(PackedGather):
    """An all-gather whose message is copied out in one."""

    def wait(self, outputs: Any) -> None:
        self.finish()
        places = self._places if self.nbytes else []
        for (part, start, stop), [[full]] in zip(places, outputs, strict=bool(places)):
            columns = self.message[:, start:stop].view(part.message_dtype)
            full[: columns.numel()].view_as(columns).copy_(columns)
        self.discard()


class PlannedCollectives(BackendCollectives):
    """The backend's, with messages copied out in one."""

    def all_gather(self, parts: Any, peers: Any, device: torch.device) -> PackedGather:
        with _replaced(backend, "PackedGather", PlannedGather):
            return super().all_gather(parts, peers, device)

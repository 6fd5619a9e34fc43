"""What an engine holds beyond its shards, in a process that runs nothing else.

[Note: peak bytes above the shards] On a CPU no counter tells what tensors held at once, and the
resident size of a process says little, so the profiler is started before the model is built: its
`[memory]` events, summed from there, are all that the allocator has given out. The peak is the
highest sum within the third step, when optimizer state and whatever an engine keeps are there.
From it goes what any engine must hold by formula, this rank's padded rows and two moments of them
(`Work.shard_bytes`). The profiler does not see what gloo's threads free: a thread drops a message's
tensors just after it has told the waiting rank, and if it drops them last the sum stays too high
for good. So in this run every wait lasts a little longer, until that has happened
(`settled_waits`). The allocator knows nothing of shared memory, so the process's own shared
mappings, as its memory map lists them at the end, are added. On CUDA the allocator has counters.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.profiled import settled_waits, within_mark

from .built import Built, Setup
from .engines import Engine
from .timing import build

_STEPS = 3
_MARK = "benchmarks.step: the measured step"


class Memory(NamedTuple):
    """Bytes and allocations of one rank, in its third step."""

    peak_bytes: int
    """The most that lived at once, shared mappings and pinned memory included."""
    shard_bytes: int
    """What of it is shards and optimizer state, by formula."""
    shared_bytes: int
    """What of it is shared mappings or, on CUDA, pinned host memory."""
    allocations: int
    """All that the allocator was asked for, refilled parameters apart."""
    refills: int
    """Parameters whose freed storages were filled again."""

    @property
    def above_shards_bytes(self) -> int:
        return self.peak_bytes - self.shard_bytes


def measure(engine: Engine, setup: Setup) -> Memory:
    """Three steps of one engine, in its leanest variant; the process must not have run another."""
    shards = setup.work.shard_bytes(dist.get_world_size(), engine.sharded)
    if setup.device.type == "cuda":
        on_host = setup.offload and engine.offloads
        return _measure_cuda(engine, setup, 0 if on_host else shards)
    mapped = shared_mapping_bytes()
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with settled_waits(), profiler:
        built = _build(engine, setup)
        for step in range(_STEPS - 1):
            built.step(_tokens(setup, step))
        tokens = _tokens(setup, _STEPS - 1)
        with count_refills() as refills, record_function(_MARK):
            built.step(tokens)
    mapped = shared_mapping_bytes() - mapped
    peak, allocations = within_mark(profiler, _MARK)
    return Memory(peak + mapped, shards, mapped, allocations - len(refills), len(refills))


def _build(engine: Engine, setup: Setup) -> Built:
    built = build(engine, setup, engine.variants[0])
    gc.collect()  # the whole model, where an engine's construction left it in a cycle
    return built


def _tokens(setup: Setup, step: int) -> torch.Tensor:
    dist.barrier()
    return setup.work.tokens(setup.seed, step, dist.get_rank(), setup.device)


def _measure_cuda(engine: Engine, setup: Setup, shards: int) -> Memory:
    built = _build(engine, setup)
    for step in range(_STEPS - 1):
        built.step(_tokens(setup, step))
    tokens = _tokens(setup, _STEPS - 1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with count_refills() as refills:
        built.step(tokens)
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    pinned = 0 if setup.offload else torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
    return Memory(
        torch.cuda.max_memory_allocated() + pinned,
        shards,
        pinned,
        allocations - len(refills),
        len(refills),
    )


@contextlib.contextmanager
def count_refills() -> Iterator[list[int]]:
    """The bytes of every storage that Python code enlarges in the block.

    Engines free a parameter's storage and fill it again with `resize_`, which no operator wraps.
    """
    refills: list[int] = []
    owned = "resize_" in vars(torch.UntypedStorage)
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if nbytes > storage.nbytes():
            refills.append(nbytes)
        return original(storage, nbytes)

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    try:
        yield refills
    finally:
        if owned:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
        else:
            del torch.UntypedStorage.resize_


def shared_mapping_bytes() -> int:
    """Bytes of memory (not of files on a disk) that this process maps shared; 0 without /proc."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return 0
    in_memory = _memory_file_systems()
    total = 0
    for line in maps.read_text().splitlines():
        span, permissions, _, device, _, *path = line.split(maxsplit=5)
        name = path[0] if path else ""
        anonymous = name.startswith(("/memfd:", "/dev/zero", "/SYSV"))
        if permissions.endswith("s") and (anonymous or device in in_memory):
            start, end = (int(address, 16) for address in span.split("-"))
            total += end - start
    return total


def _memory_file_systems() -> set[str]:
    """Devices of the mounted tmpfs, as maps names them (hexadecimal)."""
    devices = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[fields.index("-") + 1] == "tmpfs":
            major, minor = fields[2].split(":")
            devices.add(f"{int(major):02x}:{int(minor):02x}")
    return devices

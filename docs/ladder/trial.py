"""Runs a rung on ranks of its own and measures it: bytes held, bytes sent, seconds."""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler writes to stderr

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from link import Link
from task import DIM, HIDDEN
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

STEPS, MBIT_PER_SECOND = 8, 2000.0
_PROFILED_STEPS = 3  # of which the first is not counted: the optimizer has no moments before it
_SETTLED = "ladder: settled"


class Seen(NamedTuple):
    """A step as a rung yields it, before it forgets the gradients."""

    loss: Tensor  # this rank's, 0-d
    params: list[Tensor]  # what the optimizer steps
    host_bytes: int = 0  # bytes that only stand on the host, where a device has memory of its own


class Figures(NamedTuple):
    """What a rung took on this rank."""

    losses: list[float]
    peak_bytes: int  # the most that was held at once in a step, on the host or not
    host_bytes: int
    sent_bytes: int  # a step
    seconds: float  # a step, the fastest
    waited_seconds: float  # of it, for messages


def measure(train: Callable[..., Iterator[Seen]], link: Link, steps: int, **settings) -> Figures:
    """Train for `steps` steps: the first few under the profiler, for memory, the rest timed.

    Raises ValueError where ranks cannot have equally many rows.
    """
    if DIM % link.world_size or HIDDEN % link.world_size:
        raise ValueError(
            f"{DIM} and {HIDDEN} rows do not divide by {link.world_size} ranks, and no rung pads: "
            "choose --ranks 1, 2, 3, 4, 6 or 8"
        )
    seen: list[Seen] = []
    times: list[tuple[float, float]] = []
    run_of_steps = train(link, steps, **settings)
    with link.carries_all():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            seen.append(next(run_of_steps))
            with record_function(_SETTLED):
                pass
            for _ in range(1, _PROFILED_STEPS):
                sent_before = link.sent_bytes
                seen.append(next(run_of_steps))
            sent_bytes = link.sent_bytes - sent_before
        for _ in range(_PROFILED_STEPS, steps):
            dist.barrier()
            began, waited_before = time.perf_counter(), link.waited_seconds
            seen.append(next(run_of_steps))
            times.append((time.perf_counter() - began, link.waited_seconds - waited_before))
    return Figures(
        [one.loss.item() for one in seen],
        peak_bytes_of(profiler),
        seen[-1].host_bytes,
        sent_bytes,
        *min(times),
    )


def peak_bytes_of(profiler: profile) -> int:
    """The most that the steps after the first held at once, by the profiler's memory events."""
    events = profiler.profiler.kineto_results.events()
    settled = next(event.start_ns() for event in events if event.name() == _SETTLED)
    # sorted() is stable: events of one nanosecond stay in the order they were recorded.
    changes = sorted(
        ((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"),
        key=lambda change: change[0],
    )
    held = itertools.accumulate(nbytes for _, nbytes in changes)
    return max(now for (at, _), now in zip(changes, held, strict=True) if at > settled)


def run(train: Callable[..., Iterator[Seen]]) -> None:
    """A rung's command line: train it on ranks of its own, or of torchrun's; print figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2, help="unless torchrun has started them")
    parser.add_argument("--steps", type=int, default=STEPS, help="4 or more")
    parser.add_argument(
        "--mbit",
        type=float,
        default=MBIT_PER_SECOND,
        help="speed that the line between ranks is pretended to have, in Mbit/s; 0: as it is",
    )
    arguments = parser.parse_args()
    if arguments.steps <= _PROFILED_STEPS:
        parser.error(f"--steps must be above {_PROFILED_STEPS}: so many are spent on memory")
    start_ranks(report, arguments.ranks, train, arguments.steps, arguments.mbit)


def start_ranks(work: Callable[..., None], ranks: int, *args: object) -> None:
    """Call `work(*args)` on every rank of a gloo group: torchrun's, or `ranks` new processes."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        work(*args)
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_join, (ranks, os.path.join(folder, "store"), work, args), nprocs=ranks)


def _join(rank: int, ranks: int, store: str, work: Callable[..., None], args: tuple) -> None:
    torch.set_num_threads(1)
    method = f"file://{store}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=ranks)
    work(*args)
    dist.destroy_process_group()


def report(train: Callable[..., Iterator[Seen]], steps: int, mbit_per_second: float) -> None:
    """Measure a rung; rank 0 prints its own figures."""
    figures = measure(train, Link(mbit_per_second), steps)
    if dist.get_rank() == 0:
        print("losses", *(f"{loss:.4f}" for loss in figures.losses))
        print(f"holds at most {figures.peak_bytes / 2**20:.2f} MiB", end="")
        print(f", of it on the host {figures.host_bytes / 2**20:.2f}" * bool(figures.host_bytes))
        print(f"sends {figures.sent_bytes / 2**20:.2f} MiB a step")
        print(f"takes {1e3 * figures.seconds:.0f} ms a step", end="")
        print(f", of it {1e3 * figures.waited_seconds:.0f} waiting for messages")

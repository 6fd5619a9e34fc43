"""What is counted in steps that are not timed: calls, operators, messages, bytes sent."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from minifsdp.events import Event, listening

if TYPE_CHECKING:
    from .timing import Race

_MESSAGES = ("all_gather", "reduce_scatter", "all_reduce")
_ITEM_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8}


class Counts(NamedTuple):
    """What one rank did in a step."""

    aten_ops: int
    """Operators of ATen that the profiler saw, those that others call included."""
    python_calls: int
    """Calls of Python functions in the thread that steps."""
    c10d_ops: dict[str, int]
    """Calls into the process group, by name."""
    c10d_bytes: int
    """Bytes of them: whole messages, all ranks' pieces, where the profiler tells their shapes."""
    messages: int
    """Messages that minifsdp's events tell of; 0 for another engine."""
    message_bytes: int
    """Bytes of them: whole messages, all ranks' pieces."""
    sent_bytes: int
    """Bytes that this process wrote to sockets; with `SENT_BY_MACHINE` all the machine sent."""


def count(race: Race, name: str) -> Counts:
    """Two more steps of one engine: one with calls counted, one under the profiler."""
    calls: list[int] = []
    sent = _sent(lambda: calls.append(_python_calls(lambda: race.step(name))))
    sent -= _sent(lambda: None)
    events: list[Event] = []
    with listening(events.append), _profiler() as profiler:
        race.step(name)
    ops, ops_bytes, aten = _c10d(profiler)
    messages = [event for event in events if event.kind in _MESSAGES and event.nbytes]
    return Counts(
        aten, calls[0], ops, ops_bytes, len(messages), sum(m.nbytes for m in messages), max(sent, 0)
    )


def _profiler() -> profile:
    return profile(activities=[ProfilerActivity.CPU], record_shapes=True)


def _c10d(profiler: profile) -> tuple[dict[str, int], int, int]:
    """Calls into the process group but barriers, their bytes, and the number of ATen operators."""
    # The public summary has no shapes of single calls; the events have.
    events = profiler.profiler.kineto_results.events()
    ops: Counter[str] = Counter()
    by_op = by_gloo = 0
    for event in events:
        prefix, _, name = event.name().replace("::", ":").partition(":")
        if prefix == "c10d" and name != "barrier":
            ops[name.strip("_")] += 1
            by_op += _largest_bytes(event)
        elif prefix == "gloo" and name not in ("barrier", "recv"):
            # Unlike the ops, gloo's own events have shapes for lists of tensors as well.
            by_gloo += _largest_bytes(event) * (dist.get_world_size() if "gather" in name else 1)
    aten = sum(event.name().startswith("aten::") for event in events)
    return dict(ops), by_gloo or by_op, aten


def _largest_bytes(event: Any) -> int:
    """Bytes of the largest tensor that an event tells the shape of."""
    pieces = zip(event.shapes(), event.dtypes(), strict=False)
    sizes = (math.prod(s) * _ITEM_BYTES.get(dtype, 0) for s, dtype in pieces if s)
    return max(sizes, default=0)


def _python_calls(step: Any) -> int:
    calls = 0

    def listen(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(listen)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


SENT_BY_MACHINE = not Path("/proc/self/io").exists()
"""Whether only the loopback device tells what was sent, for all processes of the machine at once.

Else the process's own count of bytes written is read: gloo writes to sockets, and a step writes
nothing else. NCCL, which does not use sockets on one host, is seen by neither."""


def _sent(step: Any) -> int:
    """Bytes sent during `step` and the barrier that follows."""
    _quiet()
    before = _written()
    step()
    _quiet()
    return _written() - before


def _quiet() -> None:
    """Wait until nothing is under way on any rank."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    dist.barrier()


def _written() -> int:
    if not SENT_BY_MACHINE:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("wchar")).split()[1])
    device = Path("/proc/net/dev")
    if not device.exists():
        return 0
    loopback = [line for line in device.read_text().splitlines() if line.strip().startswith("lo:")]
    return int(loopback[0].split(":")[1].split()[8]) if loopback else 0

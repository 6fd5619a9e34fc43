"""What torch's profiler tells of the bytes that tensors took, step by step."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.profiler import profile

_SETTLING_SECONDS = 0.005


class Marked(NamedTuple):
    """What was allocated while a mark was set."""

    peak_bytes: int  # the most held at once, of all since the profiler began
    allocations: int


def within_mark(profiler: profile, mark: str) -> Marked:
    """The memory events inside `record_function(mark)`, which was entered once."""
    # The public summary adds memory up by operator; only the events tell what lived at once.
    events = profiler.profiler.kineto_results.events()
    marked = next(event for event in events if event.name() == mark)
    start, end = marked.start_ns(), marked.start_ns() + marked.duration_ns()
    # sorted() is stable: events of the same nanosecond stay in the order they were recorded.
    changes = sorted(
        ((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"),
        key=lambda change: change[0],
    )
    before = sum(nbytes for at, nbytes in changes if at < start)
    inside = [nbytes for at, nbytes in changes if start <= at <= end]
    peak_bytes = max(itertools.accumulate(inside, initial=before))
    return Marked(peak_bytes, sum(nbytes > 0 for nbytes in inside))


@contextlib.contextmanager
def settled_waits() -> Iterator[None]:
    """Let gloo's threads drop a message's tensors before its wait returns.

    The profiler does not see what they free: if they are last, its sum stays too high for good.
    """
    original = dist.Work.wait

    def wait(work: dist.Work, *args: Any, **keywords: Any) -> Any:
        result = original(work, *args, **keywords)
        time.sleep(_SETTLING_SECONDS)
        return result

    dist.Work.wait = wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        dist.Work.wait = original  # type: ignore[method-assign]

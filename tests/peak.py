"""What a function holds at most, by the allocations that torch's profiler sees."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile


class Held(NamedTuple):
    """In bytes, above what was held before."""

    peak: int  # the most at once
    largest: int  # the largest allocation


def held_during(function: Callable[[], object]) -> Held:
    """Run `function` and see what it allocates on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        function()
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    sizes = [nbytes for _, nbytes in changes]
    return Held(max(itertools.accumulate(sizes)), max(sizes))

"""What a thread does at each moment, and which messages are under way behind it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..spans import Held, RankTrace, TraceEvent


class Stretch(NamedTuple):
    """Some time that belongs to one event, or to a message under way."""

    start: float
    end: float
    event: TraceEvent


def innermost(events: Sequence[TraceEvent], thread: int) -> Iterator[Stretch]:
    """A thread's time in order, each stretch with the open event that began last."""
    mine = [event for event in events if event.thread == thread and event.end > event.start]
    edges = [(e.end, 0, index) for index, e in enumerate(mine)]
    edges += [(e.start, 1, index) for index, e in enumerate(mine)]
    running: set[int] = set()
    now, since = -1, 0.0
    for seconds, begins, index in sorted(edges):
        if begins:
            running.add(index)
        else:
            running.discard(index)
        following = max(running, default=-1)
        if following != now:
            if now >= 0 and seconds > since:
                yield Stretch(since, seconds, mine[now])
            now, since = following, seconds


def flights(events: Sequence[TraceEvent]) -> Iterator[Stretch]:
    """From the moment a message was asked for until it was waited for, with what asked."""
    asked: dict[tuple[str, bool], TraceEvent] = {}
    for event in events:
        to_gather = event.kind in ("unshard", "prefetch", "wait")
        if event.kind in ("unshard", "prefetch", "reduce"):
            asked[event.unit, to_gather] = event
        elif event.kind in ("wait", "reduce_wait"):
            before = asked.pop((event.unit, to_gather), None)
            if before is not None and event.start > before.end:
                yield Stretch(before.end, event.start, before)


def cells(trace: RankTrace, begin: float, end: float, count: int) -> list[dict[str, float]]:
    """What the training thread does in each of `count` equal parts of a time, as shares."""
    parts: list[dict[str, float]] = [{} for _ in range(count)]
    size = max(end - begin, 1e-9) / count
    for since, until, event in innermost(trace.events, 0):
        name = event.part
        first, last = int((since - begin) / size), int((until - begin) / size)
        for index in range(max(0, first), min(count - 1, last) + 1):
            left = begin + index * size
            inside = min(until, left + size) - max(since, left)
            parts[index][name] = parts[index].get(name, 0.0) + max(0.0, inside) / size
    return parts


def fullest(trace: RankTrace, begin: float, end: float, count: int) -> list[Held | None]:
    """In each of `count` equal parts of a time, the moment at which most is held."""
    best: list[Held | None] = [None] * count
    size = max(end - begin, 1e-9) / count
    for point, after in itertools.zip_longest(trace.held, trace.held[1:]):
        until = trace.seconds if after is None else after.seconds
        first, last = int((point.seconds - begin) / size), int((until - begin) / size)
        for index in range(max(0, first), min(count - 1, last) + 1):
            known = best[index]
            if known is None or point.total > known.total:
                best[index] = point
    return best

"""What a step waited for: shares of its time, and the longest waits, in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .figures import duration, size
from .spans import COMMUNICATING, COMPUTING, RankTrace, TraceEvent

_WORTH_A_LINE = 0.01  # of the time that was recorded


class Shares(NamedTuple):
    """Where the training thread's time went, in seconds."""

    computing: float
    exposed: float
    """Communication that nothing hid: starting messages, waiting for them, copying them out."""
    engine: float
    """Resharding, and adding up gradients that are not reduced yet."""
    optimizer: float
    outside: float
    """Between events: the loss, data, logging."""


def shares(trace: RankTrace) -> Shares:
    """Where a rank's time went."""
    parts = [
        trace.own(*COMPUTING),
        trace.own(*COMMUNICATING),
        trace.own("reshard", "accumulate"),
        trace.own("optimizer", "optimizer_wait"),
    ]
    start = min((event.start for event in trace.events), default=0.0)
    return Shares(*parts, outside=max(0.0, trace.seconds - start - sum(parts)))


class Wait(NamedTuple):
    """All waits for one unit in one direction."""

    unit: str
    direction: str
    """forward or backward"""
    seconds: float
    times: int
    nbytes: int
    """Of one message."""
    ahead: float
    """Seconds by which it was asked for before it was waited for, the mean."""
    prefetched: bool
    """Whether another unit asked for it, each time."""
    deferred: bool
    late_rank: int | None
    """The peer that came last to the longest of these waits, if it came after this rank."""
    late_seconds: float
    """By how much, over all these waits."""


Arrivals = Mapping[int, Mapping[str, Sequence[float]]]


def arrivals(ranks: Mapping[int, RankTrace]) -> Arrivals:
    """For each rank and unit, when the rank gave its part of each gather."""
    return {rank: _arrivals(trace) for rank, trace in ranks.items()}


def waits(trace: RankTrace, came: Arrivals) -> list[Wait]:
    """A rank's waits for parameters, the longest first. came: what `arrivals` told."""
    peers = {rank: times for rank, times in came.items() if rank != trace.rank}
    groups: dict[tuple[str, str], list[tuple[TraceEvent, TraceEvent | None, int]]]
    groups = defaultdict(list)
    asked: dict[str, TraceEvent] = {}
    count: dict[str, int] = defaultdict(int)
    backward_since: float | None = None
    starts = iter([*trace.iterations, float("inf")])
    following = next(starts)
    for event in trace.events:
        while event.start >= following:
            backward_since, following = None, next(starts)
        if event.kind == "backward" and backward_since is None:
            backward_since = event.start
        if event.kind in ("unshard", "prefetch"):
            asked[event.unit] = event
        if event.kind == "wait":
            direction = "forward" if backward_since is None else "backward"
            group = groups[event.unit, direction]
            group.append((event, asked.get(event.unit), count[event.unit]))
            count[event.unit] += 1
    found = [_wait(key, events, peers) for key, events in groups.items()]
    return sorted(found, key=lambda wait: -wait.seconds)


def _arrivals(trace: RankTrace) -> dict[str, list[float]]:
    came: dict[str, list[float]] = defaultdict(list)
    for event in trace.events:
        gives = ("wait",) if event.deferred else ("unshard", "prefetch")
        if event.nbytes and event.kind in gives:
            came[event.unit].append(event.start)
    return came


def _wait(
    key: tuple[str, str],
    events: list[tuple[TraceEvent, TraceEvent | None, int]],
    peers: Arrivals,
) -> Wait:
    unit, direction = key
    late: dict[int, float] = defaultdict(float)
    for event, _, nth in events:
        of_peers = {
            r: times[unit][nth] - event.start
            for r, times in peers.items()
            if nth < len(times.get(unit, ()))
        }
        last = max(of_peers, key=of_peers.get, default=None)
        if last is not None and of_peers[last] > 0:
            late[last] += min(of_peers[last], event.seconds)
    slowest = max(late, key=late.get, default=None)
    known = [(event, before) for event, before, _ in events if before is not None]
    return Wait(
        unit,
        direction,
        sum(event.own for event, *_ in events),
        len(events),
        max(event.nbytes for event, *_ in events),
        sum(e.start - before.end for e, before in known) / max(1, len(known)),
        bool(known) and all(before.kind == "prefetch" for _, before in known),
        any(event.deferred for event, *_ in events),
        slowest,
        sum(late.values()),
    )


def explain(trace: RankTrace, came: Arrivals) -> list[str]:
    """What a rank waited for and held, a sentence or two each. came: what `arrivals` told."""
    if not trace.events:
        return ["Nothing was recorded: no unit ran inside the block."]
    whole = sum(shares(trace))
    worth_a_line = _WORTH_A_LINE * whole
    found = waits(trace, came)
    said = [_exposed(trace)]
    late = sum(wait.late_seconds for wait in found)
    if late > worth_a_line:
        ours = f"{duration(late)} of the waiting for parameters"
        said.append(f"{ours} was for ranks that came later.")
    said += [_sentence(wait) for wait in found[:3] if wait.seconds > worth_a_line]
    if any(wait.deferred for wait in found):
        said.append(
            "Messages go through shared memory: the ranks' own cores copy them at the moment they "
            "are waited for, so waiting is mostly copying, and nothing could hide it."
        )
    return [*said, _most_held(trace)]


def split(trace: RankTrace) -> str:
    """What a rank's time went into, in a sentence."""
    parts, times = shares(trace), len(trace.iterations)
    whole = max(sum(parts), 1e-9)
    names = ("computing", "exposed communication", "resharding and adding up", "optimizer")
    named = zip(parts, (*names, "outside the model"), strict=True)
    listed = ", ".join(f"{seconds / whole:.0%} {name}" for seconds, name in named)
    forwards = "1 forward" if times == 1 else f"{times} forwards"
    return f"{duration(whole)} on rank {trace.rank}, {forwards} of the model: {listed}."


def _exposed(trace: RankTrace) -> str:
    kinds = {
        "waiting for parameters": ("wait",),
        "starting gathers": ("unshard", "prefetch"),
        "starting reductions": ("reduce",),
        "waiting for them": ("reduce_wait",),
    }
    parts = ", ".join(f"{duration(trace.own(*kind))} {what}" for what, kind in kinds.items())
    return f"Exposed communication, {duration(shares(trace).exposed)}: {parts}."


def _most_held(trace: RankTrace) -> str:
    peak = trace.peak()
    mailboxes = f"; and {size(trace.mailbox_bytes)} of mailboxes" if trace.mailbox_bytes else ""
    return (
        f"At most {size(peak.total)} beside the shards, after {duration(peak.seconds)}: "
        f"{size(peak.unsharded)} parameters, {size(peak.message)} messages, "
        f"{size(peak.gradients)} gradients{mailboxes}."
    )


def _sentence(wait: Wait) -> str:
    said = f"{wait.unit}, {wait.direction}: waited {duration(wait.seconds)} for {size(wait.nbytes)}"
    said += f" ({wait.times} times)" if wait.times > 1 else ""
    if wait.late_rank is not None and wait.late_seconds > 0.25 * wait.seconds:
        return (
            f"{said}; {duration(wait.late_seconds)} of it because rank {wait.late_rank} came later."
        )
    if wait.deferred:
        return f"{said}."
    if not wait.prefetched:
        return f"{said}: it was asked for only when it was needed."
    return f"{said}: asked for {duration(wait.ahead)} before, but the message took longer."

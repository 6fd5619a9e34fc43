"""What a step waited for: shares of its time, and the longest waits, in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .figures import duration, size
from .spans import COMPUTING, RankTrace, TraceEvent

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
    own: dict[str, float] = defaultdict(float)
    for event in trace.events:
        if event.thread == 0:
            own[event.part] += event.own
    parts = [own[part] for part in Shares._fields[:-1]]
    return Shares(*parts, outside=max(0.0, trace.seconds - _start(trace) - sum(parts)))


def _start(trace: RankTrace) -> float:
    return min((event.start for event in trace.events), default=0.0)


class Wait(NamedTuple):
    """All waits for one unit in one direction."""

    unit: str
    direction: str
    """forward, backward (for parameters), or reduction"""
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


Arrivals = Mapping[int, Mapping[tuple[str, bool], Sequence[float]]]


def arrivals(ranks: Mapping[int, RankTrace]) -> Arrivals:
    """For each rank and unit, when the rank gave its part of each gather (True) and reduction."""
    return {rank: _arrivals(trace) for rank, trace in ranks.items()}


def _arrivals(trace: RankTrace) -> dict[tuple[str, bool], list[float]]:
    came: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for event in trace.events:
        gives = ("wait",) if event.deferred else ("unshard", "prefetch")
        if event.nbytes and event.kind in (*gives, "reduce"):
            came[event.unit, event.kind != "reduce"].append(event.start)
    return came


class _Waited(NamedTuple):
    """One wait: the event, what asked for it, and how many of its kind the unit had before."""

    event: TraceEvent
    asked: TraceEvent | None
    nth: int


def waits(trace: RankTrace, came: Arrivals) -> list[Wait]:
    """A rank's waits for messages, the longest first. came: what `arrivals` told."""
    peers = {r: times for r, times in came.items() if r != trace.rank and r in trace.peers}
    found = [_wait(key, of_unit, peers) for key, of_unit in _grouped(trace).items()]
    return sorted(found, key=lambda wait: -wait.seconds)


def _grouped(trace: RankTrace) -> Mapping[tuple[str, str], list[_Waited]]:
    directions = _directions(trace)
    mailboxes = any(event.deferred for event in trace.events)  # then a reduction is one event
    groups: dict[tuple[str, str], list[_Waited]] = defaultdict(list)
    asked: dict[tuple[str, bool], TraceEvent] = {}
    count: dict[tuple[str, bool], int] = defaultdict(int)
    for event, direction in zip(trace.events, directions, strict=True):
        if not event.nbytes:
            continue
        message = event.unit, event.kind in ("unshard", "prefetch", "wait")
        if event.kind in ("unshard", "prefetch", "reduce"):
            asked[message] = event
        if event.kind in ("wait", "reduce" if mailboxes else "reduce_wait"):
            waited = _Waited(event, asked.get(message), count[message])
            groups[event.unit, direction].append(waited)
            count[message] += 1
    return groups


def _directions(trace: RankTrace) -> list[str]:
    """For each event "reduction", or what its unit's parameters were next used for."""
    used: dict[str, str] = {}
    found = []
    for event in reversed(trace.events):
        if event.kind in COMPUTING:
            used[event.unit] = event.kind
        is_reduction = event.kind in ("reduce", "reduce_wait")
        found.append("reduction" if is_reduction else used.get(event.unit, "forward"))
    return found[::-1]


def _wait(key: tuple[str, str], waited: Sequence[_Waited], peers: Arrivals) -> Wait:
    unit, direction = key
    late: dict[int, float] = defaultdict(float)
    for event, _, nth in waited:
        of_peers = {
            rank: times[nth] - event.start
            for rank, by_message in peers.items()
            if nth < len(times := by_message.get((unit, direction != "reduction"), ()))
        }
        last = max(of_peers, key=of_peers.get, default=None)
        if last is not None and of_peers[last] > 0:
            late[last] += min(of_peers[last], event.seconds)
    known = [(event, asked) for event, asked, _ in waited if asked is not None]
    return Wait(
        unit,
        direction,
        seconds=sum(event.own for event, *_ in waited),
        times=len(waited),
        nbytes=max(event.nbytes for event, *_ in waited),
        ahead=sum(e.start - asked.end for e, asked in known) / max(1, len(known)),
        prefetched=bool(known) and all(asked.kind == "prefetch" for _, asked in known),
        deferred=any(event.deferred for event, *_ in waited),
        late_rank=max(late, key=late.get, default=None),
        late_seconds=sum(late.values()),
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
        said.append(f"{duration(late)} of the waiting was for ranks that came later.")
    said += [_sentence(wait) for wait in found[:3] if wait.seconds > worth_a_line]
    if any(w.deferred for w in found) and late < 0.5 * sum(w.seconds for w in found):
        said.append(
            "Messages go through shared memory: the ranks' own cores copy them at the moment they "
            "are waited for, so waiting is mostly copying, and nothing could hide it."
        )
    if not trace.iterations or _start(trace) < trace.iterations[0]:
        said.append("The trace began inside a step: what was held before it is not counted.")
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
    messages = [e for e in trace.events if e.part == "exposed" and e.thread == 0]
    own = {what: sum(e.own for e in messages if e.kind in kind) for what, kind in kinds.items()}
    parts = ", ".join(f"{duration(seconds)} {what}" for what, seconds in own.items())
    return f"Exposed communication, {duration(shares(trace).exposed)}: {parts}."


def _most_held(trace: RankTrace) -> str:
    peak = trace.peak()
    mailboxes = f"; and {size(trace.mailbox_bytes)} of mailboxes" if trace.mailbox_bytes else ""
    after = duration(max(0.0, peak.seconds - _start(trace)))
    return (
        f"At most {size(peak.total)} beside the shards, {after} after the first event: "
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
    if wait.deferred or wait.direction == "reduction":
        return f"{said}."
    if not wait.prefetched:
        return f"{said}: it was asked for only when it was needed."
    return f"{said}: asked for {duration(wait.ahead)} before, but the message took longer."

"""What one rank did, and what it held: from a recorder's log to events and a curve of memory.

[Note: own time]
Spans contain others: the root's forward contains its blocks', a backward the reshards in it. At any
moment a thread's time belongs to the span begun last of those still open, so that own times add up
to the time that passed, whatever order spans end in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

COMPUTING = ("forward", "backward")
COMMUNICATING = ("unshard", "prefetch", "wait", "reduce", "reduce_wait")
KINDS = (*COMPUTING, *COMMUNICATING, "reshard", "accumulate", "optimizer", "optimizer_wait")
"""What an event may be; a prefetch is an unshard that another unit asked for."""


class Entry(NamedTuple):
    """A line of a recorder's log."""

    seconds: float
    edge: str
    """begin, end, moved (a message of `nbytes`) or held"""
    kind: str
    unit: str
    thread: int
    held: Mapping[str, int] | None = None
    """By _PART_OF's names, what the unit holds now; what is not named has not changed."""
    nbytes: int = 0


class Held(NamedTuple):
    """Bytes that the engine holds on this rank beside shards and optimizer state."""

    seconds: float
    """When it came to be so, since the trace began."""
    unsharded: int
    """Parameters of unsharded units."""
    message: int
    """Buffers for messages, those kept for the next ones included; not mailboxes."""
    gradients: int
    """Full ones that are not yet reduced, and reduced rows that are not yet stepped on."""

    @property
    def total(self) -> int:
        return self.unsharded + self.message + self.gradients


_PART_OF = {
    "unsharded": "unsharded",
    "gathering": "message",
    "reducing": "message",
    "idle": "message",
    "gradients": "gradients",
    "rows": "gradients",
}


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One thing that a unit did on one rank."""

    kind: str
    """One of KINDS."""
    unit: str
    """The module's path below the root, "root", or "optimizer"."""
    start: float
    """Seconds since the trace began."""
    end: float
    own: float
    """Seconds of it that are not those of an event inside it."""
    thread: int
    """0 trains (autograd's own threads belong to it); 1 is that of units that step behind it."""
    nbytes: int = 0
    """Of the message it started or waited for, all ranks' pieces."""
    deferred: bool = False
    """The message begins only when it is waited for: it goes through shared memory."""
    unsharded: int = 0
    """Bytes held when it ended; see Held."""
    message: int = 0
    gradients: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def part(self) -> str:
        """What its own time counts as: computing, exposed (communication), engine or optimizer."""
        if self.kind in COMPUTING:
            return "computing"
        if self.kind in COMMUNICATING and self.nbytes:  # else rows are copied on their own rank
            return "exposed"
        return "optimizer" if self.kind.startswith("optimizer") else "engine"


@dataclass(frozen=True)
class RankTrace:
    """What one rank did."""

    rank: int
    host: str
    seconds: float
    """From the beginning of the trace to its end."""
    events: list[TraceEvent]
    """In the order they began."""
    held: list[Held]
    """A point for each change, in order of time."""
    units: list[str]
    """Names, the root first, then in the order of the module tree."""
    iterations: list[float]
    """When each forward of the whole model began."""
    mailbox_bytes: int = 0
    """Shared memory mapped for messages all the time, this rank's mailbox and its peers'."""
    peers: tuple[int, ...] = ()
    """The ranks that shard with this one, itself included; () if no unit has run."""
    clock: str = "host"
    """host, or device: times are then those of the stream that computes."""
    began: float = field(default=0.0, repr=False)
    """On the host's own clock; ranks of one host share it."""

    def own(self, *kinds: str) -> float:
        """Seconds that the training thread spent in events of these kinds."""
        return sum(e.own for e in self.events if e.kind in kinds and e.thread == 0)

    def peak(self) -> Held:
        """The moment at which most was held."""
        return max(self.held, key=lambda held: held.total, default=Held(0.0, 0, 0, 0))

    def shifted(self, seconds: float) -> RankTrace:
        """The same, `seconds` later."""
        return replace(
            self,
            events=[replace(e, start=e.start + seconds, end=e.end + seconds) for e in self.events],
            held=[h._replace(seconds=h.seconds + seconds) for h in self.held],
            iterations=[t + seconds for t in self.iterations],
            seconds=self.seconds + seconds,
            began=self.began - seconds,
        )


@dataclass
class _Open:
    entry: Entry
    order: int
    own: float = 0.0
    nbytes: int = 0
    deferred: bool = False
    did_unshard: bool = False


def spans(log: Sequence[Entry], end: float) -> tuple[list[TraceEvent], list[Held]]:
    """Events and held bytes of a log in order of time that stopped at `end`."""
    replay = _Replay()
    for order, entry in enumerate(log):
        replay.read(order, entry)
    replay.close_all(end)
    held = replay.curve.points()
    done = [event for _, event in sorted(replay.done, key=lambda item: item[0])]
    return list(_with_held(done, held)), held


class _Replay:
    """Goes through a log once."""

    def __init__(self) -> None:
        self.done: list[tuple[int, TraceEvent]] = []
        self.curve = _Curve()
        self._threads: dict[int, int] = {}
        self._open: dict[int, list[_Open]] = {}
        self._until: dict[int, float] = {}
        self._asked: dict[tuple[str, str], tuple[int, bool]] = {}
        """Of each unit's last gather and reduction, the bytes and whether it was deferred."""

    def read(self, order: int, entry: Entry) -> None:
        thread = self._threads.setdefault(entry.thread, len(self._threads))
        stack = self._open.setdefault(thread, [])
        if entry.edge == "iteration":  # what a step that raised left open ended long ago
            self._drop(stack, 0, self._until.get(thread, entry.seconds), thread)
        if stack:
            stack[-1].own += entry.seconds - self._until[thread]
        self._until[thread] = entry.seconds
        since = entry.seconds
        if entry.edge == "begin":
            stack.append(_Open(entry, order))
        elif entry.edge == "moved" and stack:
            stack[-1].nbytes = entry.nbytes
        elif entry.edge == "end":
            span = _last(stack, entry)
            if span is not None:  # else it began before the trace
                self._drop(stack, stack.index(span) + 1, entry.seconds, thread)
                stack.remove(span)
                self._end(span, entry, stack, thread)
                since = span.entry.seconds
        if entry.held:
            self.curve.change(entry.unit, entry.held, since, entry.seconds)

    def _drop(self, stack: list[_Open], above: int, end: float, thread: int) -> None:
        """End what was broken off: by an error, or by checkpointing, which recomputes no more of
        a unit's forward than backward needs. It is inside what ends now, or all that is open."""
        for span in [s for s in stack[above:] if s.entry.kind == "forward" or above == 0]:
            stack.remove(span)
            self._keep(span, end, thread)

    def _end(self, span: _Open, entry: Entry, stack: list[_Open], thread: int) -> None:
        kind, unit = entry.kind, entry.unit
        if kind == "unshard":
            held = entry.held or {}
            span.deferred = span.nbytes > 0 and held.get("gathering") == 0
            self._asked["wait", unit] = span.nbytes, span.deferred
        elif kind == "reduce":
            self._asked["reduce_wait", unit] = span.nbytes, False
        elif kind in ("wait", "reduce_wait"):
            span.nbytes, span.deferred = self._asked.get((kind, unit), (0, False))
        if kind == "unshard" and stack and stack[-1].entry.kind == "prefetch":
            outer = stack[-1]
            outer.did_unshard, outer.own = True, outer.own + span.own
            outer.nbytes, outer.deferred = span.nbytes, span.deferred
        elif kind != "prefetch" or span.did_unshard:  # else the unit was there already
            self._keep(span, entry.seconds, thread)

    def _keep(self, span: _Open, end: float, thread: int) -> None:
        entry = span.entry
        event = TraceEvent(
            kind=entry.kind,
            unit=entry.unit,
            start=entry.seconds,
            end=end,
            own=span.own,
            thread=thread,
            nbytes=span.nbytes,
            deferred=span.deferred,
        )
        self.done.append((span.order, event))

    def close_all(self, end: float) -> None:
        """What was open when the trace stopped ends there."""
        for thread, stack in self._open.items():
            if stack:
                stack[-1].own += end - self._until[thread]
            for span in stack:
                self._keep(span, end, thread)


def _last(stack: Sequence[_Open], entry: Entry) -> _Open | None:
    for span in reversed(stack):
        if (span.entry.kind, span.entry.unit) == (entry.kind, entry.unit):
            return span
    return None


class _Curve:
    """Collects changes of what units hold; growth counts from the beginning of what caused it."""

    def __init__(self) -> None:
        self._now: dict[tuple[str, str], int] = {}
        self._changes: list[tuple[float, str, int]] = []

    def change(self, unit: str, held: Mapping[str, int], begin: float, end: float) -> None:
        growth: dict[str, int] = defaultdict(int)
        for what, nbytes in held.items():
            whose = "" if what == "idle" else unit  # any unit's message may take those
            growth[_PART_OF[what]] += nbytes - self._now.get((whose, what), 0)
            self._now[whose, what] = nbytes
        for part, delta in growth.items():
            if delta:
                self._changes.append((begin if delta > 0 else end, part, delta))

    def points(self) -> list[Held]:
        points: list[Held] = []
        now = {"unsharded": 0, "message": 0, "gradients": 0}
        for seconds, part, delta in sorted(self._changes, key=lambda change: change[0]):
            now[part] += delta
            point = Held(seconds, **now)
            if points and points[-1].seconds == seconds:
                points[-1] = point
            else:
                points.append(point)
        return points


def _with_held(events: Iterable[TraceEvent], held: Sequence[Held]) -> Iterator[TraceEvent]:
    """Each event with what was held when it ended."""
    times = [point.seconds for point in held]
    for event in events:
        index = bisect_right(times, event.end) - 1
        if index >= 0:
            _, unsharded, message, gradients = held[index]
            event = replace(event, unsharded=unsharded, message=message, gradients=gradients)
        yield event

"""Traces made by a clock that is moved by hand: a model of blocks, a link that carries one message.

Computing, copying and sending take set times, so that what is hidden and what is exposed is known.
"""

from __future__ import annotations

from minifsdp.trace import RankTrace
from minifsdp.trace.spans import Entry, spans

MILLI = 1e-3
PARAMS = 3 << 20  # bytes of a block's parameters


class _Clock:
    """Writes a recorder's log while it moves time."""

    def __init__(self) -> None:
        self.now, self.link_free = 0.0, 0.0
        self.log: list[Entry] = [Entry(0.0, "edge", "", "", 7)]
        self.arrives: dict[str, float] = {}

    def write(self, edge: str, kind: str, unit: str, nbytes: int = 0, **held: int) -> None:
        self.log.append(Entry(self.now, edge, kind, unit, 7, held, nbytes))

    def does(self, kind: str, unit: str, seconds: float, **held: int) -> None:
        self.write("begin", kind, unit)
        self.now += seconds
        self.write("end", kind, unit, **held)

    def send(self, unit: str, seconds: float) -> None:
        self.link_free = max(self.now, self.link_free) + seconds
        self.arrives[unit] = self.link_free

    def until_here(self, unit: str) -> float:
        return max(0.0, self.arrives.pop(unit) - self.now)


def make_trace(
    blocks: int = 4,
    rank: int = 0,
    iterations: int = 2,
    gather: float = 2.6 * MILLI,
    name: str = "layers.{}",
    deferred: bool = False,
) -> RankTrace:
    """A trace whose forward of a block takes 2 ms, its backward 4 ms, a gather `gather` seconds."""
    clock, does = _Clock(), None
    does = clock.does
    names = ["root", *(name.format(i) for i in range(blocks))]
    nbytes = {unit: PARAMS * (2 if unit == "root" else 1) for unit in names}
    here: set[str] = set()
    starts: list[float] = []

    def unshard(unit: str, by_another: bool) -> None:
        if unit in here or unit in clock.arrives:
            return
        if by_another:
            clock.write("begin", "prefetch", unit)
        clock.write("begin", "unshard", unit)
        clock.now += 0.15 * MILLI
        clock.send(unit, gather)
        clock.write("moved", "all_gather", unit, nbytes[unit])
        clock.write("end", "unshard", unit, gathering=0 if deferred else nbytes[unit])
        if by_another:
            clock.write("end", "prefetch", unit)

    def wait(unit: str) -> None:
        if unit in here:
            return
        there = gather if deferred else clock.until_here(unit)
        clock.arrives.pop(unit, None)
        does("wait", unit, there + 0.05 * MILLI, gathering=0, unsharded=nbytes[unit])
        here.add(unit)

    def reshard(unit: str) -> None:
        does("reshard", unit, 0.03 * MILLI, unsharded=0)
        here.discard(unit)

    for _ in range(iterations):
        clock.now += 0.8 * MILLI  # the data
        unshard("root", False)
        wait("root")
        starts.append(clock.now)
        clock.write("begin", "forward", "root")
        clock.now += 0.6 * MILLI
        for unit, following in zip(names[1:], [*names[2:], None], strict=True):
            unshard(unit, False)
            wait(unit)
            clock.write("begin", "forward", unit)
            if following:
                unshard(following, True)
            clock.now += 2 * MILLI
            clock.write("end", "forward", unit)
            reshard(unit)
        clock.now += 1.2 * MILLI
        clock.write("end", "forward", "root")
        clock.now += 0.5 * MILLI  # the loss
        clock.write("begin", "backward", "root")
        clock.now += 1.5 * MILLI
        pending = None
        for unit, following in zip(names[:0:-1], [*names[-2:0:-1], None], strict=True):
            unshard(unit, False)
            wait(unit)
            clock.write("begin", "backward", unit)
            if following:
                unshard(following, True)
            clock.now += 2 * MILLI
            does("accumulate", unit, 0.1 * MILLI, gradients=nbytes[unit] // 2)
            clock.now += 1.8 * MILLI
            does("accumulate", unit, 0.1 * MILLI, gradients=nbytes[unit])
            clock.write("end", "backward", unit)
            reshard(unit)
            if pending:
                there = clock.until_here(f"{pending} reduced")
                does("reduce_wait", pending, there + 0.05 * MILLI, reducing=0, rows=PARAMS // 8)
            pending = unit
            clock.write("begin", "reduce", unit)
            clock.now += 0.2 * MILLI
            clock.send(f"{unit} reduced", 1.5 * MILLI)
            clock.write("moved", "reduce_scatter", unit, nbytes[unit])
            clock.write("end", "reduce", unit, gradients=0, reducing=nbytes[unit])
        clock.now += 0.7 * MILLI
        clock.write("end", "backward", "root")
        reshard("root")
        if pending:
            there = clock.until_here(f"{pending} reduced")
            does("reduce_wait", pending, there + 0.05 * MILLI, reducing=0, rows=PARAMS // 8)
        does("optimizer", "optimizer", (1 + 0.3 * blocks) * MILLI)
        for unit in names:
            clock.write("held", "reduced", unit, rows=0)
    clock.now += 0.3 * MILLI
    events, held = spans(clock.log, clock.now)
    return RankTrace(
        rank=rank,
        host="a-host",
        seconds=clock.now,
        events=events,
        held=held,
        units=[*names, "optimizer"],
        iterations=starts,
        mailbox_bytes=2 * PARAMS if deferred else 0,
    )

"""A step on a made-up machine: the engine's own order of events, a fixed cost for each.

One core that computes and one wire, which carries messages one after the other in the order they
were asked for. Costs are round numbers, so that a picture shows the order and not the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .watch import Edge


class Costs(NamedTuple):
    """In ticks."""

    forward: float = 6.0
    """Of a block; a backward takes twice as long."""
    head: float = 2.0
    """Of the forward of what is the root's own."""
    message_ticks_per_byte: float = 0.01


class Span(NamedTuple):
    """Something that took time."""

    lane: str
    """compute, wait or wire"""
    kind: str
    unit: str
    start: float
    end: float


class Step(NamedTuple):
    """A step on the made-up machine."""

    spans: list[Span]
    states: dict[str, list[tuple[float, str]]]
    """Of each unit: from when on it is in which state."""
    ticks: float

    def total(self, lane: str) -> float:
        """Ticks of a lane."""
        return sum(span.end - span.start for span in self.spans if span.lane == lane)


def play(edges: Sequence[Edge], root: str = "root", costs: Costs = Costs()) -> Step:  # noqa: B008
    """What `edges` take."""
    now, wire_free = 0.0, 0.0
    spans: list[Span] = []
    arrives: dict[tuple[str, str], float] = {}
    asked: dict[tuple[str, str], float] = {}
    states: dict[str, list[tuple[float, str]]] = {u: [(0.0, s)] for u, s in edges[0].states.items()}

    def compute(kind: str, unit: str, ticks: float) -> None:
        nonlocal now
        spans.append(Span("compute", kind, unit, now, now + ticks))
        now += ticks

    def wait_until(kind: str, unit: str, moment: float) -> None:
        nonlocal now
        if moment > now:
            spans.append(Span("wait", kind, unit, now, moment))
            now = moment

    computing = None  # the block whose backward has begun, and has not been counted
    for edge in edges:
        if computing is not None and edge.kind not in ("prefetch", "unshard", "all_gather"):
            compute("backward", computing, 2 * costs.forward)
            computing = None
        key = (edge.kind, edge.unit)
        if edge.edge == "moved" and edge.kind in ("all_gather", "reduce_scatter"):
            start = max(now, wire_free)
            wire_free = start + edge.nbytes * costs.message_ticks_per_byte
            if edge.nbytes:
                spans.append(Span("wire", edge.kind, edge.unit, start, wire_free))
            arrives[key], asked[key] = wire_free, now
        elif edge.edge == "begin" and edge.kind == "wait":
            wait_until("all_gather", edge.unit, arrives["all_gather", edge.unit])
        elif edge.edge == "begin" and edge.kind == "reduce_wait":
            wait_until("reduce_scatter", edge.unit, arrives["reduce_scatter", edge.unit])
        elif edge.kind == "forward" and edge.edge == "end":
            compute("forward", edge.unit, costs.head if edge.unit == root else costs.forward)
        elif edge.kind == "backward" and edge.edge == "begin" and edge.unit == root:
            compute("backward", root, 2 * costs.head)  # the head's comes first
        elif edge.kind == "backward" and edge.edge == "begin":
            computing = edge.unit
        for unit, state in edge.states.items():
            if states[unit][-1][1] != state:
                states[unit].append((now, state))
    return Step(spans, states, now)


def totals(step: Step) -> Mapping[str, float]:
    """Ticks of the step and of what it is made of."""
    return {
        "step": step.ticks,
        "computing": step.total("compute"),
        "on the wire": step.total("wire"),
        "waiting": step.total("wait"),
    }

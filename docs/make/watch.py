"""What the engine does in a block of code, edge by edge, without a clock.

`minifsdp.trace` records the same with times. The guide's pages must not depend on a machine, so
this keeps the order only, and at each edge what every unit is and holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from minifsdp import events


class Edge(NamedTuple):
    """The engine begins or ends something, or a message is sent."""

    edge: str
    """begin, end or moved"""
    kind: str
    unit: str
    nbytes: int
    """Of the message, all ranks' pieces."""
    states: dict[str, str]
    """Of each unit, its state's name."""
    unsharded: int
    """Bytes of whole parameters, over all units."""
    message: int
    gradients: int
    """Whole ones."""
    rows: int
    """Of reduced gradients."""
    units: dict[str, dict[str, int]]
    """The same of each unit, as the engine names it."""

    @property
    def held(self) -> int:
        """All bytes beside the shards."""
        return self.unsharded + self.message + self.gradients + self.rows


class _Named(NamedTuple):
    name: str


class Watch:
    """A tracer and listener. See `events.Tracer`."""

    def __init__(self, model: Any) -> None:
        self._units = list(model._units(recurse=True))
        self.edges: list[Edge] = []

    def begin(self, kind: str, actor: Any) -> None:
        self._note("begin", kind, actor.name)

    def end(self, kind: str, actor: Any) -> None:
        self._note("end", kind, actor.name)

    def hear(self, event: events.Event) -> None:
        """Messages, and gradients that have been handed out."""
        if event.kind in ("all_gather", "reduce_scatter", "all_reduce", "reduced"):
            self._note("moved", event.kind, event.unit, event.nbytes)

    def _note(self, edge: str, kind: str, unit: str, nbytes: int = 0) -> None:
        held = {
            each.name: {**each.held(), **each.reducer.held(), **each.reducer.held_reduced()}
            for each in self._units
        }
        whats = next(iter(held.values()))
        total = {what: sum(one[what] for one in held.values()) for what in whats}
        self.edges.append(
            Edge(
                edge,
                kind,
                unit,
                nbytes,
                {each.name: each.state.name for each in self._units},
                total["unsharded"],
                total["gathering"] + total["reducing"],
                total["gradients"],
                total["rows"],
                held,
            )
        )

    @contextmanager
    def doing(self, kind: str) -> Iterator[None]:
        """Something outside the units: the optimizer."""
        self.begin(kind, _Named(kind))
        yield
        self.end(kind, _Named(kind))


@contextmanager
def watching(model: Any) -> Iterator[Watch]:
    """Watch a sharded model: `with watching(model) as watch: ...; watch.edges`."""
    watch = Watch(model)
    with events.listening(watch.hear):
        events.tracer = watch
        try:
            yield watch
        finally:
            events.tracer = None

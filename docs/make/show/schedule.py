"""Shown on the page about schedule and overlap."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from minifsdp import debug, events
from minifsdp.collectives import use_collectives
from minifsdp.hooks import ScheduledUnit, unit_of
from minifsdp.runtime import Runtime

from .. import timeline
from ..build import drawn_from
from ..model import batch, build
from ..ranks import on
from ..svg import Drawing
from ..watch import Edge, watching

_SHORT = {"all_gather": "AG", "reduce_scatter": "RS"}


def _messages(model: torch.nn.Module, run: object) -> str:
    seen: list[str] = []

    def hear(event: events.Event) -> None:
        if event.kind in _SHORT:
            seen.append(f"{_SHORT[event.kind]} {event.unit.removeprefix('blocks.')}")

    with events.listening(hear):
        run()
    return ", ".join(seen) or "none"


@on(2)
def orders() -> list[tuple[str, str, str]]:
    found = []
    model = build()
    for step in ("first step", "second step"):
        results: list[torch.Tensor] = []
        forward = _messages(model, lambda: results.append(model(batch()).sum()))  # noqa: B023
        backward = _messages(model, lambda: results[0].backward())  # noqa: B023
        found.append((step, forward, backward))
    for setting in (True, False):
        model = build(reshard_after_forward=setting)
        results = []
        forward = _messages(model, lambda: results.append(model(batch()).sum()))  # noqa: B023
        backward = _messages(model, lambda: results[0].backward())  # noqa: B023
        found.append((f"`reshard_after_forward={setting}`", forward, backward))
    with torch.no_grad():
        model = build()
        found.append(("without gradients", _messages(model, lambda: model(batch())), ""))
    return found


@drawn_from(orders)
def messages(per_rank: list[list[tuple[str, str, str]]]) -> str:
    lines = ["| | forward | backward |", "|---|---|---|"]
    lines += [f"| {what} | {forward} | {backward} |" for what, forward, backward in per_rank[0]]
    return "\n".join(lines)


def _second_step() -> list[Edge]:
    with use_collectives("direct"):
        model = build()
        model(batch()).sum().backward()
        model.zero_grad()
        with watching(model) as watch:
            model(batch()).sum().backward()
    return watch.edges


@on(2)
def with_prefetch() -> list[Edge]:
    return _second_step()


@on(2)
def without_prefetch() -> list[Edge]:
    """Every unit is asked for when it is needed, every sum waited for where it starts."""
    expected, prefetch, reduce = Runtime.expected_after, ScheduledUnit.prefetch, Runtime.reduce

    def reduce_now(self: Runtime, unit: ScheduledUnit) -> None:
        reduce(self, unit)
        while self._pending:
            self._pending.popleft().reducer.finish()

    Runtime.expected_after = lambda self, unit: []
    ScheduledUnit.prefetch = lambda self: None
    Runtime.reduce = reduce_now
    try:
        return _second_step()
    finally:
        Runtime.expected_after, ScheduledUnit.prefetch, Runtime.reduce = expected, prefetch, reduce


_PIXELS = 6.1  # per tick
_STATE_COLOURS = {"GATHERING": "gather", "UNSHARDED": "whole"}
_COMPUTE = {"forward": "forward", "backward": "backward"}
_WIRE = {"all_gather": "gather", "reduce_scatter": "reduce"}


def _draw(edges: list[Edge], title: str) -> str:
    step = timeline.play(edges)
    left, top, lane, gap = 96, 78, 26, 7
    units = ["root", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    lanes = ["computes", *units, "the wire"]
    picture = Drawing(left + step.ticks * _PIXELS + 30, top + len(lanes) * (lane + gap) + 64, title)
    picture.text(24, 28, title, "bold")
    y = {name: top + at * (lane + gap) + (8 if at else 0) for at, name in enumerate(lanes)}
    y["the wire"] += 8
    bottom = y["the wire"] + lane

    def at(tick: float) -> float:
        return left + tick * _PIXELS

    for name in lanes:
        classes = "" if name in ("computes", "the wire") else "mono small"
        picture.text(left - 12, y[name] + 17, name, classes, "end")
        picture.line([(left, y[name] + lane + 0.5), (at(step.ticks), y[name] + lane + 0.5)], "grid")
    for unit in units:
        changes = [*step.states[unit], (step.ticks, "")]
        for (start, state), (end, _) in itertools.pairwise(changes):
            if state in _STATE_COLOURS and end > start:
                hint = f"{unit}: {state.lower()}, ticks {start:g} to {end:g}"
                width = (end - start) * _PIXELS
                picture.box(
                    at(start), y[unit] + 5, width, lane - 10, _STATE_COLOURS[state], hint, rx=2
                )
    for span in step.spans:
        x, width = at(span.start), (span.end - span.start) * _PIXELS
        hint = f"{span.kind} of {span.unit}, ticks {span.start:g} to {span.end:g}"
        short = span.unit.removeprefix("blocks.").replace("root", "r")
        if span.lane == "compute":
            picture.box(x, y["computes"], width - 0.8, lane, _COMPUTE[span.kind], hint, rx=2)
            picture.text(x + width / 2, y["computes"] + 17, short, "on small", "middle")
        elif span.lane == "wait":
            picture.hatch(x, y["computes"], width, lane, "wait")
        else:
            picture.box(x, y["the wire"], max(1.5, width - 0.8), lane, _WIRE[span.kind], hint, rx=2)
            if width > 9:
                picture.text(x + width / 2, y["the wire"] + 17, short, "small", "middle")
    backward = next(s.start for s in step.spans if s.kind == "backward")
    picture.line(
        [(at(backward), top - 12), (at(backward), bottom + 4)], "soft", stroke_dasharray="3 3"
    )
    picture.text(at(backward) - 8, top - 12, "forward", "soft", "end")
    picture.text(at(backward) + 8, top - 12, "backward", "soft")
    picture.legend(
        left,
        bottom + 30,
        [
            ("forward", "forward"),
            ("backward", "backward"),
            ("/wait", "waits"),
            ("gather", "gathering"),
            ("whole", "whole"),
            ("reduce", "reduce-scatter"),
        ],
    )
    return picture.svg()


@drawn_from(with_prefetch)
def step(per_rank: list[list[Edge]]) -> str:
    return _draw(per_rank[0], "A step with prefetch: the wire works while the core computes")


@drawn_from(without_prefetch)
def naive(per_rank: list[list[Edge]]) -> str:
    return _draw(per_rank[0], "The same step, every message waited for where it starts")


@drawn_from(with_prefetch)
def ticks_with(per_rank: list[list[Edge]]) -> str:
    return _row("with prefetch", per_rank[0])


@drawn_from(without_prefetch)
def ticks_without(per_rank: list[list[Edge]]) -> str:
    return _row("without", per_rank[0])


def _row(name: str, edges: list[Edge]) -> str:
    totals = timeline.totals(timeline.play(edges))
    cells = " | ".join(f"{ticks:.1f}" for ticks in totals.values())
    return f"| ticks | {' | '.join(totals)} |\n|---|---:|---:|---:|---:|\n| {name} | {cells} |"


@on(2)
def deferred() -> None:
    for name in ("direct", "shared"):
        with use_collectives(name):
            model = build()
            unit = unit_of(model.blocks[0])
            unit.unshard()
            print(f"{name}: begins only when it is waited for: {unit.gathers_late()}")
            unit.wait_for_unshard()
            unit.reshard()


@on(2)
def branch() -> None:
    model = build()
    model(batch())  # so that units know their names
    with debug.checks():
        try:
            model.blocks[dist.get_rank()].unshard()  # another unit on each rank
        except RuntimeError as error:
            print(error)

"""A trace in Chrome's trace format, which Perfetto opens: a process a rank, a track a unit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from .spans import Held, RankTrace, TraceEvent

_ABOUT = (
    "rank",
    "host",
    "seconds",
    "units",
    "iterations",
    "mailbox_bytes",
    "peers",
    "clock",
    "began",
)
_FORMAT = "minifsdp trace 1"


def dumps(ranks: Mapping[int, RankTrace]) -> str:
    """The traces of all ranks as JSON that `loads` reads again."""
    lines = ",\n".join(
        json.dumps(line, separators=(",", ":"))
        for trace in ranks.values()
        for line in _lines(trace)
    )
    about = {name: [getattr(trace, name) for trace in ranks.values()] for name in _ABOUT}
    other = json.dumps({"format": _FORMAT, **about}, separators=(",", ":"))
    return f'{{"displayTimeUnit":"ms","otherData":{other},\n"traceEvents":[\n{lines}\n]}}\n'


_dumps = json.JSONEncoder(separators=(",", ":")).encode


def _lines(trace: RankTrace) -> Iterator[dict[str, Any]]:
    rank = trace.rank
    track = {unit: index for index, unit in enumerate(trace.units)}
    yield _name("process_name", rank, 0, name=f"rank {rank} ({trace.host})")
    yield _name("process_sort_index", rank, 0, sort_index=rank)
    for unit, tid in track.items():
        yield _name("thread_name", rank, tid, name=unit)
        yield _name("thread_sort_index", rank, tid, sort_index=tid)
    for event in trace.events:
        figures = asdict(event)
        for field in ("kind", "unit", "start", "end"):
            del figures[field]
        yield {
            "ph": "X",
            "name": event.kind,
            "cat": "minifsdp",
            "pid": rank,
            "tid": track[event.unit],
            "ts": event.start * 1e6,
            "dur": event.seconds * 1e6,
            "args": figures,
        }
    for point in trace.held:
        held = {"unsharded": point.unsharded, "message": point.message}
        held["gradients"] = point.gradients
        yield {"ph": "C", "name": "held", "pid": rank, "ts": point.seconds * 1e6, "args": held}
    for seconds in trace.iterations:
        about = {"ph": "i", "s": "p", "name": "iteration", "pid": rank, "tid": 0}
        yield {**about, "ts": seconds * 1e6}


def _name(what: str, rank: int, tid: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": tid, "args": args}


def loads(text: str, name: str) -> dict[int, RankTrace]:
    """The traces in a JSON `text` that `dumps` wrote. Raises ValueError, with `name`, for other."""
    try:
        stored = json.loads(text)
        other = stored["otherData"]
        if other["format"] != _FORMAT:
            raise ValueError(f"its format is {other['format']!r}, not {_FORMAT!r}")
        lines = stored["traceEvents"]
        abouts = [
            dict(zip(_ABOUT, values, strict=True))
            for values in zip(*map(other.get, _ABOUT), strict=True)
        ]
        return {about["rank"]: _rank(about, lines) for about in abouts}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{name} is not a trace that minifsdp saved as .json ({type(error).__name__}: {error})"
        ) from error


def _rank(about: dict[str, Any], lines: list[dict[str, Any]]) -> RankTrace:
    mine = [line for line in lines if line["pid"] == about["rank"]]
    events = [
        TraceEvent(
            kind=line["name"],
            unit=about["units"][line["tid"]],
            start=line["ts"] * 1e-6,
            end=(line["ts"] + line["dur"]) * 1e-6,
            **line["args"],
        )
        for line in mine
        if line["ph"] == "X"
    ]
    held = [Held(line["ts"] * 1e-6, **line["args"]) for line in mine if line["ph"] == "C"]
    return RankTrace(events=events, held=held, **{**about, "peers": tuple(about["peers"])})

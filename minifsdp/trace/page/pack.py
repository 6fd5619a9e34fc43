"""Traces as few characters of JSON: a list of integers for each column, differences where short.

Times are in tenths of a microsecond. `page.js` unpacks this.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..spans import KINDS, RankTrace
from ..waits import shares
from .look import HELD, PARTS, PHASES
from .moments import cells

LIMIT = 80_000
"""Events in a page, about 2 MB; beyond it only some ranks keep theirs."""
_LONG = 16  # letters that fit beside a row on any screen
CELLS = 240
"""In a rank's strip."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def kept(ranks: Mapping[int, RankTrace], limit: int = LIMIT) -> list[int]:
    """The ranks whose events go into the page: all, or as many as `limit` events allow.

    The first rank always, then those with most and least exposed communication and with the
    highest peak, then the others in order.
    """
    exposed = {rank: shares(trace).exposed for rank, trace in ranks.items()}
    order = sorted(ranks)
    telling = [
        order[0],
        max(order, key=exposed.__getitem__),
        min(order, key=exposed.__getitem__),
        max(order, key=lambda rank: ranks[rank].peak().total),
    ]
    chosen: list[int] = []
    for rank in dict.fromkeys([*telling, *order]):
        if not chosen or len(ranks[rank].events) <= limit:
            chosen.append(rank)
            limit -= len(ranks[rank].events)
    return sorted(chosen)


def rows(trace: RankTrace) -> list[str]:
    """Names of a rank's rows from the top: its units as they are, the optimizer last."""
    named = dict.fromkeys([*trace.units, *(event.unit for event in trace.events)])
    return sorted(named, key=lambda name: name == "optimizer")


def labels(names: Sequence[str]) -> list[str]:
    """Names to stand beside rows: of long ones, what all have before and after is left out.

    `labels(["root", "model.decoder.layers.0.block", "model.decoder.layers.1.block"])` gives
    `["root", "…layers.0…", "…layers.1…"]`.
    """
    paths = [name.split(".") for name in names if "." in name]
    if len(paths) < 2 or max(map(len, names)) <= _LONG:
        return list(names)
    before = max(0, _common(paths) - 1)  # the last of them stays, such as layers
    after = min(_common([path[::-1] for path in paths]), min(map(len, paths)) - before - 2)
    after = max(0, after)
    dots = "\N{HORIZONTAL ELLIPSIS}"
    shortened = []
    for name in names:
        parts = name.split(".")
        inside = ".".join(parts[before : len(parts) - after])
        shown = dots * bool(before) + inside + dots * bool(after)
        shortened.append(shown if "." in name else name)
    return shortened


def _common(paths: Sequence[Sequence[str]]) -> int:
    """How many parts all begin with."""
    alike = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return sum(1 for _ in alike)


def packed(ranks: Mapping[int, RankTrace], chosen: Iterable[int]) -> dict[str, Any]:
    """What the page's script needs."""
    names = _Table()
    sizes = _Table()
    whole = max(trace.seconds for trace in ranks.values())
    chosen = set(chosen)
    packs = []
    for rank, trace in sorted(ranks.items()):
        pack: dict[str, Any] = {
            "rank": rank,
            "strip": _strip(trace, whole),
            "exposed": _share(trace),
            "iterations": [_tick(seconds) for seconds in trace.iterations],
        }
        if rank in chosen:
            pack["rows"] = [names[name] for name in rows(trace)]
            pack["labels"] = labels(rows(trace))
            pack["mailbox"] = trace.mailbox_bytes
            pack["events"] = _events(trace, sizes)
            pack["held"] = [
                _differences(column)
                for column in (
                    [_tick(point.seconds) for point in trace.held],
                    *([getattr(point, name) for point in trace.held] for name in HELD),
                )
            ]
        packs.append(pack)
    return {
        "kinds": [[kind, PHASES[kind].label] for kind in KINDS],
        "parts": [[part, look.label] for part, look in PARTS.items()],
        "held": [[part, look.label] for part, look in HELD.items()],
        "names": list(names),
        "sizes": list(sizes),
        "whole": _tick(whole),
        "ranks": packs,
    }


class _Table(dict):
    """Numbers things as they come."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return self[key]


def _tick(seconds: float) -> int:
    return round(seconds * 1e7)


def _differences(values: Sequence[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise([0, *values])]


def _events(trace: RankTrace, sizes: _Table) -> dict[str, Any]:
    events = trace.events
    row = {name: index for index, name in enumerate(rows(trace))}
    starts = [_tick(event.start) for event in events]
    lasted = [_tick(event.end) - start for event, start in zip(events, starts, strict=True)]
    own = [_tick(event.own) for event in events]
    times = [point.seconds for point in trace.held]
    columns: dict[str, Any] = {
        "kind": "".join(_DIGITS[KINDS.index(event.kind)] for event in events),
        "row": [row[event.unit] for event in events],
        "start": _differences(starts),
        "lasted": lasted,
        "inside": [whole - part for whole, part in zip(lasted, own, strict=True)],
        "size": [sizes[event.nbytes] for event in events],
        "held": _differences([bisect_right(times, event.end) - 1 for event in events]),
    }
    # Rarely anything but zero, so kept only where they are not.
    columns["thread"] = {i: e.thread for i, e in enumerate(events) if e.thread}
    columns["deferred"] = [i for i, e in enumerate(events) if e.deferred]
    return columns


def _strip(trace: RankTrace, whole: float) -> str:
    """For each cell a digit of base 36 a part, but for what is outside."""
    *inside, _ = PARTS
    return "".join(
        _DIGITS[min(35, round(35 * cell.get(part, 0.0)))]
        for cell in cells(trace, 0.0, whole, CELLS)
        for part in inside
    )


def _share(trace: RankTrace) -> float:
    """Exposed communication as a share of all, in thousandths."""
    split = shares(trace)
    return round(1000 * split.exposed / max(sum(split), 1e-12))

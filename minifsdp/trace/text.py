"""A trace as text: units as rows, time across, what is held below, and what was waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .figures import duration, size
from .spans import RankTrace, TraceEvent
from .waits import arrivals, explain, shares, split

_LETTERS = {
    "forward": "F",
    "backward": "B",
    "wait": "w",
    "unshard": "u",
    "prefetch": "p",
    "reduce": "r",
    "reduce_wait": "v",
    "reshard": "s",
    "accumulate": "a",
    "optimizer": "O",
    "optimizer_wait": "o",
}
_LEGEND = "  ".join(f"{letter} {kind}" for kind, letter in _LETTERS.items())
_COLUMNS = 100
_LEVELS = " ▁▂▃▄▅▆▇█"


def timeline(ranks: Mapping[int, RankTrace], rank: int, columns: int = _COLUMNS) -> str:
    """The last whole iteration of `rank`, `columns` wide, and what it waited for."""
    if rank not in ranks:
        return "an empty trace: it is filled when the block of `with record() as trace:` ends"
    trace = ranks[rank]
    begin, end = _last_iteration(trace)
    events = [e for e in trace.events if e.end > begin and e.start < end]
    width = max((len(unit) for unit in trace.units), default=0)
    step = max(end - begin, 1e-9) / columns
    lines = [f"{'':{width}}  {_ruler(begin, end, columns)}"]
    for unit in trace.units:
        mine = [e for e in events if e.unit == unit]
        if mine:
            lines.append(f"{unit:{width}}  {_row(mine, begin, step, columns)}")
    held, peak = _memory(trace, begin, step, columns)
    lines.append(f"{'held':{width}}  {held}  at most {size(peak)}")
    lines += ["", _LEGEND, "", split(trace), *explain(trace, arrivals(ranks))]
    if len(ranks) > 1:
        lines += ["", *_table(ranks)]
    return "\n".join(line.rstrip() for line in lines)


def _last_iteration(trace: RankTrace) -> tuple[float, float]:
    """From one forward of the model to the next, or to the end of the last event."""
    last = max((event.end for event in trace.events), default=trace.seconds)
    starts = [t for t in trace.iterations if t < last]
    return (starts[-1], last) if starts else (0.0, last)


def _ruler(begin: float, end: float, columns: int) -> str:
    right = f" {duration(end - begin)}"
    return f"0 {'─' * (columns - 2 - len(right))}{right}"


def _row(events: Sequence[TraceEvent], begin: float, step: float, columns: int) -> str:
    """In each column the event that takes most of it, the innermost first."""
    cells = [" "] * columns
    shortest_last = sorted(events, key=lambda event: -event.seconds)
    for event in shortest_last:
        first = max(0, int((event.start - begin) / step))
        last = min(columns - 1, int((event.end - begin) / step))
        for column in range(first, last + 1):
            cells[column] = _LETTERS[event.kind]
    return "".join(cells)


def _memory(trace: RankTrace, begin: float, step: float, columns: int) -> tuple[str, int]:
    """A bar a column, the most that is held in it; and the most of all."""
    most = [0] * columns
    ends = [*(point.seconds for point in trace.held[1:]), trace.seconds]
    for point, until in zip(trace.held, ends, strict=False):
        first, last = int((point.seconds - begin) / step), int((until - begin) / step)
        for column in range(max(0, first), min(columns - 1, last) + 1):
            most[column] = max(most[column], point.total)
    peak = max(most)
    scale = (len(_LEVELS) - 1) / max(1, peak)
    return "".join(_LEVELS[-int(-total * scale // 1)] for total in most), peak


def _table(ranks: Mapping[int, RankTrace]) -> list[str]:
    lines = [f"{'rank':>4}  {'ms':>8}  computing  exposed  engine  optimizer  outside  most held"]
    for rank, trace in ranks.items():
        seconds = shares(trace)
        whole = max(sum(seconds), 1e-9)
        parts = [
            f"{part / whole:>{width}.0%}"
            for part, width in zip(seconds, (9, 7, 6, 9, 7), strict=True)
        ]
        lines.append(
            f"{rank:>4}  {whole * 1e3:>8.1f}  " + "  ".join(parts) + f"  {size(trace.peak().total)}"
        )
    return lines

"""A plan as one page that needs no network: memory over a step, stacked by what it is for."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, NamedTuple

from .categories import Category
from .machines import GIB
from .text import duration, gib, text

if TYPE_CHECKING:
    from .report import Report

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 1000, 380, 60, 16, 46
_POINTS = 700
_COLOURS = {
    Category.PARAMETERS: "#4e79a7",
    Category.GRADIENTS: "#e15759",
    Category.OPTIMIZER: "#76b7b2",
    Category.UNSHARDED: "#f28e2b",
    Category.MESSAGES: "#edc948",
    Category.STAGING: "#9c755f",
    Category.ACTIVATIONS: "#59a14f",
    Category.LOGITS: "#b07aa1",
    Category.INPUTS: "#ff9da7",
    Category.OTHER: "#bab0ac",
}


class Sample(NamedTuple):
    """What was held at a time."""

    seconds: float
    held: tuple[int, ...]  # bytes of each category, in the order of `Category`
    where: str


def curve(report: Report, on_host: bool) -> list[Sample]:
    """Bytes held over a step, the fullest moment of each of some hundred slices of it."""
    rehearsal, order = report.rehearsal, list(Category)
    held = [rehearsal.held.get((on_host, category), 0) for category in order]
    at, total = report.timing.at, max(report.timing.seconds, 1e-12)
    best: dict[int, Sample] = {0: Sample(0.0, tuple(held), "before the step")}
    moments = iter(rehearsal.moments)
    following, where = next(moments, None), ""
    for number, change in enumerate(rehearsal.changes):
        while following is not None and following.change <= number:
            where = f"{following.phase} {following.unit}".strip()
            following = next(moments, None)
        if change.block.on_host != on_host:
            continue
        held[order.index(change.block.category)] += change.delta
        seconds = at[min(change.time, len(at)) - 1] if change.time and at else 0.0
        slot = int(_POINTS * seconds / total)
        if slot not in best or sum(held) > sum(best[slot].held):
            best[slot] = Sample(seconds, tuple(held), where)
    samples = [best[slot] for slot in sorted(best)]
    return [*samples, Sample(total, tuple(held), "after the step")]


def picture(report: Report, on_host: bool) -> str:
    """The curve as SVG: stacked areas, the line of what is usable, and the phases below."""
    samples = curve(report, on_host)
    most = max(sum(sample.held) for sample in samples)
    limit = None if on_host else report.cluster.gpu.usable_bytes
    top = 1.06 * (max(most, limit) if limit is not None and limit < 3 * most else max(most, 1))
    total = max(samples[-1].seconds, 1e-12)
    wide, high = _WIDTH - _LEFT - 10, _HEIGHT - _TOP - _BOTTOM

    def x(seconds: float) -> float:
        return _LEFT + wide * seconds / total

    def y(nbytes: float) -> float:
        return _TOP + high * (1 - nbytes / top)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    base = [0] * len(samples)
    for index, category in enumerate(Category):
        heights = [b + s.held[index] for b, s in zip(base, samples, strict=True)]
        if any(s.held[index] for s in samples):
            there = [(x(s.seconds), y(h)) for s, h in zip(samples, heights, strict=True)]
            back = [(x(s.seconds), y(b)) for s, b in zip(samples, base, strict=True)]
            points = " ".join(f"{px:.1f},{py:.1f}" for px, py in [*there, *reversed(back)])
            parts.append(
                f'<polygon points="{points}" fill="{_COLOURS[category]}">'
                f"<title>{category.value}</title></polygon>"
            )
        base = heights
    for number in range(5):
        level = top * number / 4
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y(level) + 4:.1f}" text-anchor="end">'
            f"{level / GIB:.3g}</text>"
            f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y(level):.1f}" y2="{y(level):.1f}" '
            'stroke="#8884" />'
        )
    if limit is not None and limit <= top:
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y(limit):.1f}" y2="{y(limit):.1f}" '
            f'stroke="#c00" stroke-dasharray="6 4" /><text x="{_LEFT + 4}" y="{y(limit) - 4:.1f}" '
            f'fill="#c00">usable: {gib(limit)} GiB</text>'
        )
    parts += _phases(report, x)
    return "".join([*parts, "</svg>"])


def _phases(report: Report, x) -> list[str]:
    """A name below each stretch of a phase that is wide enough for it."""
    spans: list[tuple[str, float, float]] = []
    at = report.timing.at
    for moment in report.rehearsal.moments:
        changes = report.rehearsal.changes
        place = changes[moment.change].time if moment.change < len(changes) else len(at)
        seconds = at[min(place, len(at)) - 1] if place and at else 0.0
        phase = "backward" if moment.phase == "recomputation" else moment.phase
        if spans and spans[-1][0] == phase:
            continue
        if spans:
            spans[-1] = (*spans[-1][:2], seconds)
        spans.append((phase, seconds, report.timing.seconds))
    drawn = []
    for phase, start, end in spans:
        if x(end) - x(start) > 7 * len(phase):
            drawn.append(
                f'<line x1="{x(start):.1f}" x2="{x(start):.1f}" y1="{_HEIGHT - _BOTTOM}" '
                f'y2="{_HEIGHT - 26}" stroke="#888" /><text x="{x(start) + 4:.1f}" '
                f'y="{_HEIGHT - 30}">{html.escape(phase)}</text>'
            )
    last = duration(report.timing.seconds)
    drawn.append(f'<text x="{_WIDTH - 10}" y="{_HEIGHT - 8}" text-anchor="end">{last}</text>')
    repeated = report.rehearsal.repeated
    if repeated is not None and repeated.times > 1 and at:
        # Drawn once; the curve goes on level over the others.
        middle = (at[repeated.end.step - 1] + at[min(repeated.end.step, len(at) - 1)]) / 2
        drawn.append(
            f'<text x="{x(middle):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">'
            f"{repeated.times - 1:,} times more the same</text>"
        )
    return drawn


def page(report: Report) -> str:
    """The whole page."""
    legend = "".join(
        f'<span><i style="background:{_COLOURS[category]}"></i>{category.value}</span>'
        for category in Category
        if report.device.own_peaks.get(category)
        or (report.host is not None and report.host.own_peaks.get(category))
    )
    figures = [f"<h2>Device, GiB</h2>{picture(report, on_host=False)}"]
    if report.host is not None:
        figures.append(f"<h2>Host, GiB a rank</h2>{picture(report, on_host=True)}")
    title = f"Plan for {report.world_size} x {html.escape(report.cluster.gpu.description)}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>'
        ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:1040px;"
        "margin:2rem auto;padding:0 1rem}svg{width:100%;height:auto;font-size:12px}"
        "svg text{fill:currentColor}.legend span{margin-right:1rem;white-space:nowrap}"
        ".legend i{display:inline-block;width:.8em;height:.8em;margin-right:.35em}"
        "pre{overflow-x:auto;font-size:13px}</style>"
        f'<h1>{title}</h1><p class="legend">{legend}</p>{"".join(figures)}'
        f"<pre>{html.escape(text(report))}</pre></html>\n"
    )

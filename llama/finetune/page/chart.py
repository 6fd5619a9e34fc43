"""A curve as a figure of HTML: an SVG that stretches with the page, and labels that do not.

The drawing is 1000 units wide and 1000 high and is stretched to the plot's box; lines and dots keep
their width (`non-scaling-stroke`), and the labels of both axes are text of the page, placed in
per cent. So one drawing is sharp and legible on a phone and on a wide screen, without a script.
"""

import html
import itertools
import json
import math
import re
from typing import Any, NamedTuple

import numpy as np

from llama.finetune.page.series import POINTS, Series, thin

SIZE = 1000  # units of the drawing, both ways
LOG_RATIO = 20.0  # highest over median, from where a logarithmic axis tells more


class Curve(NamedTuple):
    """One set of points of a chart."""

    name: str
    look: str  # class of the style sheet: colour
    series: Series
    form: str = "line"  # "line", "faint" or "dots" (joined)


class Chart(NamedTuple):
    """What one figure shows."""

    title: str
    unit: str
    curves: list[Curve]
    marks: dict[int, str] = {}  # noqa: RUF012 (never changed) steps to mark, and why
    from_zero: bool = False
    may_be_log: bool = False
    wide: bool = False


class Axis(NamedTuple):
    """A range of values and its ticks."""

    low: float
    high: float
    ticks: list[float]
    log: bool = False

    def place(self, values: np.ndarray | float) -> np.ndarray:
        """Where values lie, 0 at the low end and 1 at the high one."""
        low, high = self.low, self.high
        if self.log:
            values, low, high = np.log10(values), math.log10(low), math.log10(high)
        return (np.asarray(values, np.float64) - low) / (high - low)


def nice_axis(low: float, high: float, count: int = 5) -> Axis:
    """A linear axis over `low` to `high`, ticks at 1, 2, 2.5 or 5 times a power of ten."""
    size = max(abs(low), abs(high))
    if size < 1e-290:  # where division no longer works
        low, high = 0.0, 1.0
    elif not high - low > size * 1e-9:
        low, high = low - size / 10, high + size / 10
    raw = high / count - low / count  # not (high - low): that may overflow
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [k * step for k in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], ticks)


def step_axis(first: int, last: int) -> Axis:
    """An axis of whole steps that ends where the run does."""
    last = max(last, first + 1)
    ticks = [t for t in nice_axis(first, last, 6).ticks if first <= t <= last and t == int(t)]
    return Axis(first, last, ticks)


def log_axis(low: float, high: float) -> Axis:
    """A logarithmic axis: ticks at powers of ten, and at 2 and 5 times them if they are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = -(-len(decades) // 7)
    factors = (1, 2, 5) if len(decades) <= 3 else (1,)
    grid = [m * 10.0**k for k in decades[::every] for m in factors]
    low = max((t for t in grid if t <= low), default=low)
    high = min((t for t in grid if t >= high), default=high)
    return Axis(low, high, [t for t in grid if low <= t <= high], log=True)


def value_axis(chart: Chart) -> Axis | None:
    """The axis that shows all of a chart's values; None if it has none."""
    values = np.concatenate([curve.series.known.values for curve in chart.curves])
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    if chart.may_be_log and low > 0 and high > LOG_RATIO * float(np.median(values)):
        return log_axis(low, high)
    return nice_axis(min(low, 0.0) if chart.from_zero else low, high)


def figure_text(value: float) -> str:
    """A number for people: four figures, commas between thousands."""
    if not math.isfinite(value):
        return "\N{EN DASH}"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    digits = 0 if size >= 1000 or value == int(value) else 3 - math.floor(math.log10(size))
    text = f"{value:,.{max(0, digits)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def tick_texts(ticks: list[float]) -> list[str]:
    """Short names of ticks, such as 1.5k, 2M, 0.25, 5e-5, with the digits that tell them apart."""
    for digits in range(4, 17):
        texts = [_tick_text(tick, digits) for tick in ticks]
        if len(set(texts)) == len(texts):
            break
    return texts


def _tick_text(value: float, digits: int) -> str:
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / size:.{digits}g}{name}"
    if 0 < abs(value) < 1e-3 or abs(value) >= 1e15:
        return re.sub(r"\.?0*e([+-])0*", r"e\1", f"{value:.{digits - 1}e}").replace("e+", "e")
    return f"{value:.{digits}g}"


def figure(chart: Chart, steps: Axis, tokens: Series) -> str:
    """The chart as an HTML figure; empty if there is no value to show.

    `tokens` tells those seen up to each step, for the reading under the pointer.
    """
    axis = value_axis(chart)
    if axis is None:
        return ""
    shapes, readings = [], []
    for curve in chart.curves:
        kept = thin(curve.series.values)
        if not len(kept):
            continue
        shapes.append(_shape(curve, kept, steps, axis))
        readings.append(_reading(curve, kept, tokens))
    marks = dict(list(chart.marks.items())[:POINTS])
    if marks:
        strokes = "".join(f"M{_x(steps, step)} 0v60" for step in marks)
        shapes.append(f'<path class="mark" d="{strokes}"/>')
    grid = "".join(f"M0 {_y(axis, t)}H{SIZE}" for t in axis.ticks)
    rows = "".join(
        f'<span style="top:{_y(axis, tick) / SIZE:.2%}">{text}</span>'
        for tick, text in zip(axis.ticks, tick_texts(axis.ticks), strict=True)
    )
    columns = "".join(
        f'<span style="left:{_x(steps, tick) / SIZE:.2%}">{text}</span>'
        for tick, text in zip(steps.ticks, tick_texts(steps.ticks), strict=True)
    )
    data = {"low": steps.low, "high": steps.high, "curves": readings, "marks": marks}
    return (
        f'<figure class="chart{" wide" if chart.wide else ""}">{_caption(chart, axis)}'
        f'<div class="plot" tabindex="0"><div class="rows" aria-hidden="true">{rows}</div>'
        f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" '
        f'aria-label="{html.escape(_spoken(chart))}"><path class="grid" d="{grid}"/>'
        f'{"".join(shapes)}</svg><div class="columns" aria-hidden="true">{columns}</div>'
        f'<div class="cross" hidden></div><div class="reading" hidden></div></div>'
        f'<p class="axis">step</p><script type="application/json">{embed(data)}</script></figure>'
    )


def embed(content: Any) -> str:
    """JSON that may stand in a script element."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _x(steps: Axis, step: float) -> float:
    return round(float(steps.place(step)) * SIZE, 1)


def _y(axis: Axis, value: float) -> float:
    return round((1 - float(axis.place(value))) * SIZE, 1)


def _shape(curve: Curve, kept: np.ndarray, steps: Axis, axis: Axis) -> str:
    """A curve's paths, broken where a value is missing; a lone point is a dot."""
    xs = (steps.place(curve.series.steps[kept]) * SIZE).round(1).tolist()
    ys = ((1 - axis.place(curve.series.values[kept])) * SIZE).round(1).tolist()
    missing = np.cumsum(~np.isfinite(curve.series.values))[kept]
    breaks = [0, *(np.flatnonzero(np.diff(missing)) + 1).tolist(), len(kept)]
    line, dots = [], []
    for start, end in itertools.pairwise(breaks):
        points = [f"{x:g} {y:g}" for x, y in zip(xs[start:end], ys[start:end], strict=True)]
        if end - start > 1:
            line.append("M" + "L".join(points))
        if end - start == 1 or curve.form == "dots":
            dots += [f"M{point}h0" for point in points]
    look = f"{curve.look} {'faint' if curve.form == 'faint' else ''}".strip()
    paths = f'<path class="{look} line" d="{"".join(line)}"/>' if line else ""
    return paths + (f'<path class="{look} dots" d="{"".join(dots)}"/>' if dots else "")


def _reading(curve: Curve, kept: np.ndarray, tokens: Series) -> dict[str, Any]:
    """What the page's script says of the points of a curve."""
    at = curve.series.steps[kept]
    seen = [0, *tokens.values.tolist()]
    counted = np.searchsorted(tokens.steps, at, side="right").tolist()
    return {
        "name": curve.name,
        "look": curve.look,
        "x": at.tolist(),
        "y": [figure_text(value) for value in curve.series.values[kept].tolist()],
        "tokens": [int(seen[index]) for index in counted],
    }


def _caption(chart: Chart, axis: Axis) -> str:
    unit = ", ".join(part for part in (chart.unit, "log scale" if axis.log else "") if part)
    keys = [
        f'<li class="{curve.look}{" faint" if curve.form == "faint" else ""}">'
        f"{html.escape(curve.name)}</li>"
        for curve in chart.curves
        if len(curve.series.known.values)
    ]
    if chart.marks:
        keys.append(f'<li class="mark">skipped ({len(chart.marks):,})</li>')
    legend = f"<ul>{''.join(keys)}</ul>" if len(keys) > 1 else ""
    return (
        f"<figcaption><h2>{html.escape(chart.title)}</h2>"
        f"<span>{html.escape(unit)}</span>{legend}</figcaption>"
    )


def _spoken(chart: Chart) -> str:
    """The chart in words, for those who do not see it."""
    parts = [f"{chart.title} ({chart.unit})" if chart.unit else chart.title]
    for curve in chart.curves:
        known = curve.series.known
        if len(known.values):
            ends = [
                f"{figure_text(float(known.values[i]))} at step {known.steps[i]:,}" for i in (0, -1)
            ]
            low, high = (figure_text(float(f(known.values))) for f in (np.min, np.max))
            parts.append(f"{curve.name}: {ends[0]}, {ends[1]}, from {low} to {high}")
    if chart.marks:
        parts.append(f"{len(chart.marks)} steps skipped")
    return "; ".join(parts)

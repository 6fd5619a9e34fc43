"""Curves from lines of `metrics.jsonl`: in order, smoothed, thinned to what a page shows."""

from typing import Any, NamedTuple

import numpy as np

POINTS = 1500  # of a curve; more than a screen has columns for


class Series(NamedTuple):
    """One value for each step that was measured, NaN where there is none, or none finite."""

    steps: np.ndarray  # (points,) int64, rising
    values: np.ndarray  # (points,) float64

    @property
    def known(self) -> "Series":
        """The points that have a value."""
        finite = np.isfinite(self.values)
        return Series(self.steps[finite], self.values[finite])


def number(value: Any) -> float:
    """`value` as a float; NaN for what is no number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        return float(value) if is_number else float("nan")
    except OverflowError:
        return float("nan")


def by_step(lines: list[dict[str, Any]], key: str) -> dict[int, dict[str, Any]]:
    """The lines with `key` by step, in rising order; of two for a step the later one."""
    found = {line["step"]: line for line in lines if key in line and 0 <= line["step"] < 2**53}
    return dict(sorted(found.items()))


def series(lines: dict[int, dict[str, Any]], key: str) -> Series:
    """What `key` was, step by step."""
    values = np.array([number(line.get(key)) for line in lines.values()], np.float64)
    values[~(np.abs(values) < 1e300)] = np.nan  # what is near overflow breaks the axes
    return Series(np.array(list(lines), np.int64), values)


def tokens_seen(lines: dict[int, dict[str, Any]]) -> Series:
    """Tokens of all steps so far, at each step."""
    tokens = np.nan_to_num(series(lines, "tokens").values)
    return Series(np.array(list(lines), np.int64), np.cumsum(tokens))


def tokens_per_second(lines: dict[int, dict[str, Any]]) -> Series:
    """Tokens over seconds of each step."""
    tokens, seconds = series(lines, "tokens"), series(lines, "seconds")
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where(seconds.values > 0, tokens.values / seconds.values, np.nan)
    return Series(tokens.steps, values)


def smooth(raw: Series, span: float) -> Series:
    """A moving average over about `span` points to either side, missing ones left out.

    Weights fall off exponentially both ways, so that the average does not lag behind the curve.
    """
    keep = 1 - 1 / max(span, 1.0)
    finite = np.isfinite(raw.values)
    values = np.where(finite, raw.values, 0.0)
    totals = _trail(values, keep) + _trail(values[::-1], keep)[::-1] - values
    weights = _trail(finite, keep) + _trail(finite[::-1], keep)[::-1] - finite
    with np.errstate(invalid="ignore"):
        return Series(raw.steps, np.where(finite, totals / weights, np.nan))


def _trail(values: np.ndarray, keep: float) -> np.ndarray:
    """At each point the sum of it and those before it, each `keep` times less than the next."""
    total, sums = 0.0, []
    for value in values.tolist():
        total = keep * total + value
        sums.append(total)
    return np.array(sums)


def thin(values: np.ndarray, points: int = POINTS) -> np.ndarray:
    """The indices of at most `points` of `values` that keep its look: first, last and extremes.

    Of each of equal stretches the first, the lowest, the highest and the last finite value.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) <= points:
        return finite
    kept = []
    for stretch in np.array_split(finite, points // 4):
        of = values[stretch]
        kept += [stretch[0], stretch[of.argmin()], stretch[of.argmax()], stretch[-1]]
    return np.unique(kept)

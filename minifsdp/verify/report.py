"""What a comparison found, as objects, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any


class Differs(AssertionError):
    """Raised by `Report.raise_if_different`; its text is the report's."""


@dataclass(frozen=True)
class Difference:
    """The first value, in the order of computing, that differs where it may not."""

    ours: str
    theirs: str
    """The engines."""
    step: int
    micro: int
    phase: str
    """parameter before the first step, input, parameter in forward, forward output, loss, gradient,
    gradient norm, clipped gradient, parameter after the step or buffer after the step"""
    unit: str
    """The unit's path; "root" for the root; "" where no unit has a part in it."""
    parameter: str | None
    row: int | None
    """Of the whole parameter."""
    index: tuple[int, ...]
    """Of the element in the whole parameter, or in what this rank has."""
    rank: int
    """The rank that owns the row, or that computed the value."""
    seen_by: tuple[int, ...]
    """Ranks on which the phase differs."""
    values: tuple[float, float]
    """Of the two engines; NaN where only one has the value, or their shapes differ."""
    ulp: float
    spread: tuple[str, ...]
    """How far it goes: in its phase, then in later ones."""
    looks_like: str

    def __str__(self) -> str:
        of = f" of unit {self.unit}" if self.unit else ""
        lines = [f"step {self.step}, micro-batch {self.micro}: {self.phase}{of}"]
        what = [f"parameter {self.parameter}"] if self.parameter else []
        if self.row is not None:
            what.append(f"row {self.row}")
        if self.index:
            what.append(f"element {list(self.index)}")
        owns = "owned by" if self.row is not None else "computed by"
        what.append(f"{owns} rank {self.rank}")
        lines.append(", ".join(what))
        if self.index:
            ours, theirs = (f"{value:.9g}" for value in self.values)
            unit = "" if isinstance(self.values[0], int) else " ULP"
            apart = "no distance" if self.ulp == float("inf") else f"{self.ulp:,.0f}{unit} apart"
            lines.append(f"{self.ours} has {ours}, {self.theirs} has {theirs}: {apart}")
        lines += self.spread
        lines.append(f"looks like: {self.looks_like}")
        return "\n".join(lines)


@dataclass(frozen=True)
class PhaseResult:
    """One phase over all steps and ranks."""

    phase: str
    elements: int
    differing: int
    most_ulp: float
    rounding: float | None
    """Greatest distance as a share of what rounding explains; None where equal bits are asked."""
    not_finite: int
    """Elements that are infinite or NaN in both engines: equal there says nothing."""

    @property
    def equal(self) -> bool:
        return self.differing == 0

    def __str__(self) -> str:
        if self.equal:
            return "equal bits"
        ulp = "no distance" if self.most_ulp == float("inf") else f"{self.most_ulp:,.0f} ULP"
        said = f"{self.differing:,} of {self.elements:,}, {ulp}"
        return said if self.rounding is None else f"{said}, {self.rounding:.2f} of rounding"


@dataclass(frozen=True)
class Comparison:
    """One engine against another."""

    ours: str
    theirs: str
    exact: bool
    """Whether equal bits are asked; else what rounding explains is allowed."""
    phases: tuple[PhaseResult, ...]
    first: Difference | None
    """The first difference that is not allowed."""
    absent: str | None = None
    """Why there was no comparison."""

    @property
    def equal(self) -> bool:
        """Whether every bit is equal."""
        return self.absent is None and all(phase.equal for phase in self.phases)

    @property
    def ok(self) -> bool:
        """Whether nothing differs that may not; True also where nothing was compared."""
        return self.first is None

    @property
    def verdict(self) -> str:
        if self.absent is not None:
            return "not compared"
        if self.equal:
            return "EQUAL BITS"
        if self.exact:
            return "DIFFERS"
        share = max(phase.rounding or 0.0 for phase in self.phases)
        inside = "within rounding" if self.ok else "BEYOND ROUNDING"
        return f"{inside} ({share:.2f})"


@dataclass(frozen=True)
class Report:
    """All comparisons of a run; `print` it, or ask `equal`, `ok`, `first`."""

    title: str
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether every bit of every comparison that ran is equal."""
        return all(c.equal for c in self.comparisons if c.absent is None)

    @property
    def ok(self) -> bool:
        """Whether bits are equal where they have to be, and the rest is within rounding."""
        return all(c.ok for c in self.comparisons)

    @property
    def first(self) -> Difference | None:
        """The first difference that is not allowed, of the first comparison that has one."""
        return next((c.first for c in self.comparisons if c.first is not None), None)

    def raise_if_different(self) -> None:
        """Raise `Differs`, an AssertionError, unless `ok`."""
        if not self.ok:
            raise Differs(f"\n{self}")

    @property
    def table(self) -> str:
        """Phases down, engines across."""
        compared = [c for c in self.comparisons if c.absent is None]
        names = list(dict.fromkeys(p.phase for c in compared for p in c.phases))
        cells = [["", *(c.theirs for c in compared)]]
        for name in names:
            found = [next((p for p in c.phases if p.phase == name), None) for c in compared]
            cells.append([name, *("-" if p is None else str(p) for p in found)])
        cells.append(["verdict", *(c.verdict for c in compared)])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])

    def __str__(self) -> str:
        parts = [self.title, self.table]
        parts += [f"{c.theirs} was not compared: {c.absent}" for c in self.comparisons if c.absent]
        parts += [f"note: {note}" for note in self.notes]
        for comparison in self.comparisons:
            if comparison.first is not None:
                told = str(comparison.first).replace("\n", "\n  ")
                parts.append(
                    f"First difference of {comparison.ours} and {comparison.theirs}\n  {told}"
                )
        return "\n".join(parts)

    def to_json(self) -> str:
        """Everything, and the verdicts; NaN and infinite numbers as strings."""
        compared = [
            {**dataclasses.asdict(c), "equal": c.equal, "ok": c.ok, "verdict": c.verdict}
            for c in self.comparisons
        ]
        whole = {"title": self.title, "equal": self.equal, "ok": self.ok, "notes": self.notes}
        return json.dumps(_plain({**whole, "comparisons": compared}), indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value

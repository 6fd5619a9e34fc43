"""The books of one comparison: what differed when, what rounding explains, and which came first.

[Note: the bound where sums have another order]
Of every value the distance from the other engine is measured as a share of its largest magnitude.
The same is measured between `none` and its shaken twin (see `whole`). In each phase an engine may
be as far off as `ALLOWANCE` times the twin's farthest value has been up to that step, and two units
of its dtype more once the twin has differed at all. Before that (the first forward), nothing is
allowed. A loss may be as far off as outputs, a norm as gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .findings import Count, Finding
from .observation import Kind, Place

ALLOWANCE = 4.0
_UNITS = 2.0
_MOST_SLACK = 0.2
_MADE_OF = {Kind.LOSS: Kind.OUTPUT, Kind.NORM: Kind.GRADIENT}
"""Of phases that are one number a rank, which the twin may hit by chance."""
_KEPT = 4000  # findings of the step in which the first difference is


class Rounding:
    """What rounding explains, learnt from the shaken twin a step at a time."""

    def __init__(self) -> None:
        self._explained: dict[Kind, float] = {}
        self._since: tuple[int, Kind] | None = None

    def learn(self, step: int, findings: Sequence[Finding]) -> None:
        """From all ranks' findings of the twin against `none`."""
        for found in findings:
            kind = found.place.kind
            self._explained[kind] = max(self._explained.get(kind, 0.0), found.worst)
        if findings and self._since is None:
            self._since = step, min(f.place.kind for f in findings)

    def allowed(self, found: Finding) -> float:
        """How far off `found` may be, relatively."""
        kind = found.place.kind
        at = (found.step, kind)
        floor = _UNITS * found.eps if self._since is not None and at >= self._since else 0.0
        explained = max(self._explained.get(k, 0.0) for k in (kind, _MADE_OF.get(kind, kind)))
        return ALLOWANCE * explained + floor


@dataclass
class Phase:
    """One phase over all steps and ranks."""

    count: Count = field(default_factory=Count)
    most_ulp: float = 0.0
    share: float = 0.0
    """Of what is allowed; infinite where nothing is."""


@dataclass
class Later:
    """A phase of a step in which something differed."""

    step: int
    kind: Kind
    names: int
    differing: int
    ranks: tuple[int, ...]


class Book:
    """One engine against another."""

    def __init__(self, ours: str, theirs: str, exact: bool) -> None:
        self.ours, self.theirs, self.exact = ours, theirs, exact
        self.phases: dict[Kind, Phase] = {}
        self.first: list[Finding] = []
        """All that differs, where it may not, in the phase and step of the first difference."""
        self.same_step: list[Finding] = []
        """And in all phases of that step."""
        self.later: list[Later] = []
        self.slack = 0.01
        """How far apart factors may be that are called one: more, where rounding hides them."""
        self.broken = False
        """Whether anything differed that may not."""

    def add(self, step: int, findings: Sequence[Finding], rounding: Rounding) -> None:
        """All ranks' findings of a step."""
        wrong = []
        for found in findings:
            phase = self.phases.setdefault(found.place.kind, Phase())
            phase.most_ulp = max(phase.most_ulp, found.most_ulp)
            if self.exact:
                wrong.append(found)
                continue
            allowed = rounding.allowed(found)
            share = found.worst / allowed if allowed else float("inf")
            phase.share = max(phase.share, share)
            if share > 1:
                wrong.append(self._scaled(found, allowed))
        wrong.sort(key=lambda f: (f.position, f.rank))
        if wrong and not self.broken:
            self.broken = True
            first = wrong[0].place
            self.same_step = wrong[:_KEPT]
            self.first = [f for f in wrong if self._is_of(f, first)]
        for kind in sorted({f.place.kind for f in wrong}):
            of_kind = [f for f in wrong if f.place.kind == kind]
            self.later.append(
                Later(
                    step,
                    kind,
                    len({f.place for f in of_kind}),
                    sum(f.differing for f in of_kind),
                    tuple(sorted({f.rank for f in of_kind})),
                )
            )

    def _scaled(self, found: Finding, allowed: float) -> Finding:
        """With a factor, if it has one up to what rounding explains."""
        if found.factor is not None or found.slope is None or found.off_slope > allowed:
            return found
        if abs(found.slope - 1) <= 2 * allowed:
            return found
        self.slack = max(self.slack, min(allowed, _MOST_SLACK))
        return found._replace(factor=found.slope)

    @staticmethod
    def _is_of(found: Finding, first: Place) -> bool:
        """Phases alternate within forward: one is then of one unit."""
        same = found.place.kind == first.kind and found.place.micro == first.micro
        in_forward = first.kind in (Kind.INPUT, Kind.GATHERED, Kind.OUTPUT)
        return same and (not in_forward or found.place.unit == first.unit)

    def count(self, counts: dict[Kind, Count]) -> None:
        """All ranks' counts of all steps."""
        for kind, count in counts.items():
            phase = self.phases.setdefault(kind, Phase())
            phase.count = phase.count.plus(count)

"""The first difference in words: where it is, how it spreads, and what it looks like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..layout import RowLayout
from .findings import Finding
from .judging import Book
from .observation import BY_ROWS, ONE, PHASES, Kind
from .report import Difference
from .symptoms import looks_like
from .units import Plan

_STEPS_TOLD = 3


class Norms(NamedTuple):
    """Of all gradients of the tested engine: norms of several orders."""

    one: float
    two: float
    infinity: float


def describe(
    book: Book, plan: Plan, world_size: int, accumulate: int, norms: Norms | None
) -> Difference:
    """The book's first difference."""
    first = book.first[0]
    kind, unit, name = first.place.kind, first.place.unit, first.place.name
    parameter = name if kind in (*BY_ROWS, Kind.GATHERED) else None
    row = first.index[0] if parameter and first.index else None
    rank = first.rank
    if kind == Kind.GATHERED and row is not None:
        shape = next(p.shape for p in plan.params if p.name == name)
        rank = row // RowLayout(shape[0], 1, world_size).rows_per_rank
    named = (unit or "root") if kind not in (Kind.LOSS, Kind.NORM, Kind.BUFFER) else ""
    return Difference(
        ours=book.ours,
        theirs=book.theirs,
        step=first.step,
        micro=first.place.micro,
        phase=ONE[kind],
        unit=named,
        parameter=parameter,
        row=row,
        index=first.index,
        rank=rank,
        seen_by=tuple(sorted({f.rank for f in book.first})),
        values=first.values,
        ulp=first.ulp,
        spread=tuple(_spread(book, plan, world_size)),
        looks_like=looks_like(book, plan, world_size, accumulate, norms),
    )


def _spread(book: Book, plan: Plan, world_size: int) -> list[str]:
    lines = [f"in that phase: {_extent(book.first, plan, world_size)}"]
    first = book.first[0]
    steps: dict[int, list[str]] = {}
    for later in book.later:
        if later.step > first.step or _is_after(later.kind, first.place.kind):
            some = len(later.ranks) < world_size
            where = f" ({_ranks(later.ranks, world_size)})" if some else ""
            told = f"{PHASES[later.kind]} {later.differing:,}{where}"
            steps.setdefault(later.step, []).append(told)
    for step, told in list(steps.items())[:_STEPS_TOLD]:
        lines.append(f"elements differing then in step {step}: {', '.join(told)}")
    if len(steps) > _STEPS_TOLD:
        lines.append(f"and in {len(steps) - _STEPS_TOLD} more steps, up to step {max(steps)}")
    if len(lines) == 1:
        lines.append("and nowhere else")
    return lines


def _is_after(kind: Kind, first: Kind) -> bool:
    """Within one step; inputs, parameters and outputs of units take turns."""
    return kind != first and (kind > first or Kind.START < kind < Kind.LOSS)


def _extent(found: Sequence[Finding], plan: Plan, world_size: int) -> str:
    first = found[0]
    if first.odd:
        return f"{first.odd}; {_ranks([f.rank for f in found], world_size)}"
    said = [
        f"{sum(f.differing for f in found):,} of {sum(f.numel for f in found):,} elements "
        "in what differs"
    ]
    if first.place.kind in (*BY_ROWS, Kind.GATHERED):
        names = {f.place.name for f in found}
        rows = {(f.place.name, row) for f in found for row in f.rows}
        some = any(f.rows_differing > len(f.rows) for f in found)
        said.append(f"{'over ' if some else ''}{len(rows)} row{'s' * (len(rows) != 1)}")
        said.append(f"{len(names)} of {_scope(found, plan)} parameters")
    said.append(_ranks([f.rank for f in found], world_size))
    return ", ".join(said)


def _scope(found: Sequence[Finding], plan: Plan) -> str:
    units = {f.place.unit for f in found}
    if len(units) > 1:
        return f"all {len(plan.params)}"
    of_unit = sum(p.unit in units for p in plan.params)
    return f"unit {units.pop() or 'root'}'s {of_unit}"


def _ranks(ranks: Sequence[int], world_size: int) -> str:
    which = sorted(set(ranks))
    if len(which) == world_size:
        return "on all ranks"
    return f"on rank{'s' * (len(which) > 1)} {' '.join(map(str, which))} of {world_size}"

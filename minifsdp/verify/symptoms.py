"""What a first difference looks like: a guess at its cause that says what it is read from."""

from __future__ import annotations

import math
from typing import Any

from ..layout import RowLayout
from .findings import Finding
from .judging import Book
from .observation import BY_ROWS, Kind
from .units import Plan

_NEARLY_ALL = 0.8
_LAST_BITS = 16.0  # roundings
_ROUNDED = 2.0**-7  # relative: what a rounding to bf16, twice, can do


def looks_like(book: Book, plan: Plan, world_size: int, accumulate: int, norms: Any) -> str:
    """In words. norms: of the tested engine's gradients, or None."""
    found = book.first
    first = found[0]
    kind = first.place.kind
    if first.odd:
        return _odd(first, plan)
    if kind == Kind.INPUT:
        return _input(found, world_size)
    if first.ulp == 0:
        return "0.0 against -0.0: equal as numbers, not as bits"
    narrow = {f.fits for f in found}
    if len(narrow) == 1 and None not in narrow and sum(f.differing for f in found) > 2:
        return _narrow(first, narrow.pop(), first.dtypes[1])
    return {
        Kind.START: _start,
        Kind.GATHERED: _gathered,
        Kind.OUTPUT: _output,
        Kind.LOSS: _loss,
        Kind.GRADIENT: _gradient,
        Kind.NORM: _norm,
        Kind.CLIPPED: _clipped,
        Kind.PARAMETER: _parameter,
        Kind.BUFFER: lambda *_: "a buffer that the engine copies, casts or shares between ranks",
    }[kind](book, plan, world_size, accumulate, norms)


def _odd(first: Finding, plan: Plan) -> str:
    kind, name = first.place.kind, first.place.name
    tied = next((p for p in plan.params if name in p.aliases), None)
    if tied is not None:
        return f"{name} was tied to {tied.name} and is now a parameter of its own: it was parted"
    if "only" in first.odd and kind in (Kind.GRADIENT, Kind.CLIPPED):
        side = "the tested engine lacks" if "theirs" in first.odd else "the other engine lacks"
        if "zeros" in first.odd:
            return f"{side} this gradient, which is zero: of a parameter that nothing used"
        return f"{side} this gradient: never reduced or handed out, or reset too early"
    if "only" in first.odd and kind in BY_ROWS:
        return "a parameter that was lost, or that the engine added"
    if "dtype" in first.odd:
        return "the same numbers in another dtype: a cast is missing, or one too many"
    return "rows were given out by another rule, or the forward makes other values"


def _input(found: list[Finding], world_size: int) -> str:
    first, ranks = found[0], sorted({f.rank for f in found})
    where = "all ranks" if len(ranks) == world_size else f"only rank {_list(ranks)}"
    if first.place.unit:
        return (
            f"{where}: what reaches unit {first.place.unit} differs, while parameters and outputs "
            "before it were equal: what the root computes between units, or the cast of inputs"
        )
    return (
        f"{where} computed on other data: the model's own input differs before anything else does "
        "(the batch is of another rank or step, or was changed or cast on the way)"
    )


def _narrow(first: Finding, narrow: str, meant: str) -> str:
    what = {
        Kind.GATHERED: "the parameters were cast before they were gathered",
        Kind.GRADIENT: "gradients were rounded before, in or after the reduction",
        Kind.PARAMETER: "the step was computed or kept in it",
        Kind.START: "parameters were cast when they were sharded",
    }.get(first.place.kind, "they passed through it")
    return f"all of ours fit {narrow} where {meant} was meant: {what}"


def _start(book: Book, *_: Any) -> str:
    return f"{_rows(book.first)}: the rows were cut wrongly, or changed, when the model was sharded"


def _gathered(book: Book, plan: Plan, *_: Any) -> str:
    found = book.first
    all_of_it = sum(p.unit == found[0].place.unit for p in plan.params)
    share = sum(f.differing for f in found) / sum(f.numel for f in found)
    unit = found[0].place.unit or "root"
    seen = f"after step {found[0].step - 1}" if found[0].step else "before the first step"
    read = f"rows were equal {seen}, so they were gathered wrongly or changed since"
    if all(f.zero for f in found):
        return (
            f"unit {unit} computed with zeros: {read}; memory was perhaps used before it was filled"
        )
    if all(f.stale for f in found):
        return (
            f"unit {unit} computed with the parameters of a step ago: {read}; they were not "
            "gathered anew, or used before the gather had arrived (a missing wait)"
        )
    if _single_row(found):
        return f"{_rows(found)}: {read}; that row was sent, placed or changed on its own"
    if all(f.misplaced for f in found):
        return f"{_names(found)}: the right values in the wrong places: {read}"
    if len({f.place.name for f in found}) == all_of_it and share > _NEARLY_ALL:
        return (
            f"unit {unit} computed with none of its true parameters: {read}; perhaps used "
            "before the gather had arrived (a missing wait), or freed"
        )
    perhaps = "perhaps used before all had arrived (a missing wait), or misplaced"
    return f"{_rows(found)}: {read}; {perhaps}"


def _output(book: Book, *_: Any) -> str:
    ranks = sorted({f.rank for f in book.first})
    showed = book.phases.get(Kind.GATHERED) and book.phases[Kind.GATHERED].count.numel
    known = "its inputs and parameters" if showed else "its inputs"
    return (
        f"unit {book.first[0].place.unit or 'root'} computes otherwise on rank {_list(ranks)}: "
        f"{known} were equal when it began, so parameters were changed, freed or filled while it "
        "ran (a missing wait), or random numbers, dtype or kernels differ"
    )


def _loss(*_: Any) -> str:
    return "outputs of all units are equal: something after them, such as a cast or a scale"


def _gradient(book: Book, plan: Plan, world_size: int, accumulate: int, *_: Any) -> str:
    found = book.first
    units = {f.place.unit or "root" for f in found}
    if said := _moved(found):
        return said
    every = len({f.place.name for f in found}) == len(plan.params)
    whose = "every gradient" if every else f"every gradient of unit {_list(sorted(units))}"
    of_units = {p.name for p in plan.params if (p.unit or "root") in units}
    whole = of_units <= {f.place.name for f in found}
    factors = [f.factor for f in found]
    ranks = sorted({f.rank for f in found})
    if None not in factors and max(factors) - min(factors) <= 2 * book.slack * abs(factors[0]):
        by = _middle(factors)
        times = f"{'about ' * (book.slack > 0.01)}{by:.4g}x the other's"
        if ranks != _holders(plan, of_units, world_size):
            which = f"rank{'s' * (len(ranks) > 1)} {_list(ranks)}"
            return f"only the rows of {which} are {times} ({_names(found)}): scaled there alone"
        if not whole:
            whose = f"each differing gradient ({_names(found)})"
        return f"{whose} is {times}: {_scale(by, world_size, accumulate, book.slack)}"
    if all(f.zero for f in found):
        return f"{_names(found)}: zero where a gradient is due: not reduced, or not handed out"
    if _single_row(found):
        return f"{_rows(found)}: losses are equal, so it is that row of the reduction that is wrong"
    said = f"losses are equal and gradients of {_names(found)} are not, by no constant factor: "
    if all(f.worst <= _LAST_BITS * f.eps for f in found):
        return said + "only the last bits, as by another order of summing or one rounding more"
    if accumulate > 1:
        most = max(f.worst for f in found)
        if most < _ROUNDED:
            return said + f"off by at most {most:.1g} of the largest: rounded while accumulating"
        return said + f"of {accumulate} micro-batches one was lost or counted twice"
    if ranks != _holders(plan, of_units, world_size) and len(ranks) == 1:
        return said + f"only rank {ranks[0]}'s rows, so its part of the reduction"
    return said + (
        "perhaps not summed over all ranks, or put in wrong places, or of another step, or "
        "backward computed with other parameters"
    )


def _moved(found: list[Finding]) -> str | None:
    """For gradients that are right ones, of another time or place."""
    if all(f.zero for f in found):
        return None
    if all(f.stale for f in found):
        return f"{_names(found)}: the gradients of the step before, handed out again"
    if all(f.is_of for f in found):
        others = list(dict.fromkeys(f.is_of for f in found))
        return f"{_names(found)}: the gradients of other parameters ({_list(others[:3])})"
    if all(f.misplaced for f in found):
        return f"{_names(found)}: the right values in the wrong places: rows or elements are moved"
    return None


def _holders(plan: Plan, names: set[str], world_size: int) -> list[int]:
    """The ranks that have rows of any of these parameters."""
    rows = [p.shape[0] if p.shape else 1 for p in plan.params if p.name in names]
    layouts = [RowLayout(n, 1, world_size) for n in rows]
    return [r for r in range(world_size) if any(len(x.rows_of(r)) for x in layouts)]


def _middle(factors: list[float]) -> float:
    return sorted(factors)[len(factors) // 2]


def _scale(factor: float, world_size: int, accumulate: int, slack: float) -> str:
    near = lambda wanted: abs(factor / wanted - 1) < slack  # noqa: E731
    guesses = []
    if world_size > 1 and near(world_size):
        guesses.append(f"the division by the number of ranks ({world_size}) is missing")
    if world_size > 1 and near(1 / world_size):
        guesses.append(f"it is divided by the number of ranks ({world_size}) once too often")
    if near(2):
        guesses.append("it is reduced or added twice")
    if accumulate > 1 and near(accumulate):
        guesses.append(f"it is counted for each of {accumulate} micro-batches")
    if accumulate > 1 and near(1 / accumulate):
        guesses.append(f"it is divided by the {accumulate} micro-batches")
    return ", or ".join(guesses) or "a factor that nothing here has"


def _norm(book: Book, plan: Plan, world_size: int, accumulate: int, norms: Any) -> str:
    ours, theirs = book.first[0].values
    ratio = ours / theirs if theirs else math.nan
    if norms is not None and math.isclose(ours, norms.one, rel_tol=1e-3):
        return "gradients are equal, and ours is their 1-norm"
    if norms is not None and math.isclose(ours, norms.infinity, rel_tol=1e-3):
        return "gradients are equal, and ours is their infinity norm"
    if world_size > 1 and math.isclose(ratio, math.sqrt(world_size), rel_tol=1e-3):
        return f"sqrt({world_size}) times too large: every rank counts gradients that it shares"
    if len({f.values[0] for f in book.first}) > 1:
        return "ranks have norms of their own: local squares were not summed over ranks"
    if book.first[0].most_ulp <= 64:
        return "only the last bits: squares were summed in another order"
    return f"gradients are equal, and the norm is {ratio:.4g}x: some are left out, or twice in it"


def _clipped(book: Book, *_: Any) -> str:
    factors = {round(f.factor, 3) if f.factor else None for f in book.first}
    if len(factors) == 1 and None not in factors:
        by = f"scaled to {factors.pop():.4g}x the other's"
        return f"gradients and norm are equal, and then {by}: another coefficient"
    return f"gradients and norm are equal, and {_names(book.first)} are not scaled alike"


def _parameter(book: Book, *_: Any) -> str:
    found = book.first
    if all(f.stale for f in found):
        return (
            f"{_names(found)}: as before the step, which did not reach {_them(found)}: the "
            "optimizer holds other tensors than the model, or the result was not kept"
        )
    if _single_row(found):
        return f"{_rows(found)}: gradients are equal, so it was changed in or after the step"
    return f"gradients are equal and {_names(found)} are not: the optimizer's step, or its state"


def _them(found: list[Finding]) -> str:
    return "it" if len({f.place.name for f in found}) == 1 else "them"


def _single_row(found: list[Finding]) -> bool:
    return all(f.rows_differing == 1 for f in found) and len({f.rows for f in found}) == 1


def _rows(found: list[Finding]) -> str:
    if _single_row(found) and len({f.place.name for f in found}) == 1:
        return f"one row, {found[0].rows[0]}, of {found[0].place.name}"
    return f"rows of {_names(found)}"


def _names(found: list[Finding]) -> str:
    names = list(dict.fromkeys(f.place.name for f in found))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _list(items: list[Any]) -> str:
    return ", ".join(map(str, items))

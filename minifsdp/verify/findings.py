"""Two engines' values of one phase side by side, and what is told of each that differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from . import ulp
from .observation import Kind, Observation, Place

_NARROW = (torch.bfloat16, torch.float16)
_SAME_FACTOR = 1e-3  # relative, for a ratio to count as constant


class Finding(NamedTuple):
    """A value that differs on this rank, in figures: no tensors are kept."""

    step: int
    position: int
    """Among the values of its step, in the order of computing."""
    place: Place
    rank: int
    numel: int
    differing: int
    rows: tuple[int, ...]
    """Which rows differ, the first few; of the whole parameter."""
    rows_differing: int
    rows_here: int
    index: tuple[int, ...]
    """Where the first differing element is, its row counted in the whole parameter."""
    values: tuple[float, float]
    ulp: float
    """Between these two."""
    most_ulp: float
    worst: float
    """Greatest distance, as a share of the largest magnitude."""
    eps: float
    """Of the values' dtype."""
    factor: float | None
    """Ours over theirs, where it is the same throughout and not 1."""
    fits: str | None
    """A narrower dtype that holds all of our differing values, and not all of theirs."""
    stale: bool
    """Ours is what it was a step ago, and theirs is not ours."""
    zero: bool
    """Ours is 0 wherever it differs."""
    dtypes: tuple[str, str]
    slope: float | None = None
    """The factor that fits ours to theirs best, and how far off that leaves the farthest value, as
    a share of our largest magnitude."""
    off_slope: float = float("inf")
    misplaced: bool = False
    """Ours are theirs in another order."""
    is_of: str | None = None
    """Whose values, of the other engine's in this phase, ours are."""
    odd: str | None = None
    """What cannot be compared: a shape, or a value that only one side has."""


class Count(NamedTuple):
    """Of one phase: values compared, values that differ, values that are not finite on both."""

    numel: int = 0
    differing: int = 0
    not_finite: int = 0

    def plus(self, other: Count) -> Count:
        return Count(*(a + b for a, b in zip(self, other, strict=True)))


class Pair(NamedTuple):
    ours: Observation | None
    theirs: Observation | None


def paired(ours: Iterable[Observation], theirs: Iterable[Observation]) -> Iterator[Pair]:
    """Values of the same place; one that only one side has alone, but for parameters in forward,
    which not every engine shows."""

    def keyed(seen: Iterable[Observation]) -> dict[tuple[Place, int], Observation]:
        uses: Counter[Place] = Counter()
        keys = {}
        for observation in seen:
            keys[observation.place, uses[observation.place]] = observation
            uses[observation.place] += 1
        return keys

    left, right = keyed(ours), keyed(theirs)
    for key in [*left, *(k for k in right if k not in left)]:
        pair = Pair(left.get(key), right.get(key))
        if None not in pair or key[0].kind != Kind.GATHERED:
            yield pair


def compare_pair(pair: Pair, step: int, position: int, rank: int) -> tuple[Count, Finding | None]:
    """Count, and tell what differs if anything does."""
    place = (pair.ours or pair.theirs).place
    a, b = (None if side is None else side.tensor for side in pair)
    if a is None and b is None:
        return Count(), None
    odd = None
    if a is None or b is None:
        side, there = ("ours", a) if b is None else ("theirs", b)
        odd = f"only {side} has it" + ("" if there.any() else ", all zeros")
    elif a.shape != b.shape:
        odd = f"shape {tuple(a.shape)} against {tuple(b.shape)}"
    if odd:
        there = a if a is not None else b
        size = max(1, there.numel())
        finding = _odd(odd, step, position, place, rank, size)
        return Count(size, size), finding
    if a.dtype == b.dtype:
        different = ulp.differs(a, b)
    else:
        dtypes, wide = (a.dtype, b.dtype), torch.promote_types(a.dtype, b.dtype)
        a, b = a.to(wide), b.to(wide)
        different = ulp.differs(a, b)
        if not different.any():
            names = [ulp.SHORT.get(d, str(d)) for d in dtypes]
            finding = _odd(f"dtype {names[0]} against {names[1]}", step, position, place, rank, 1)
            return Count(a.numel(), 1), finding
    wrong = int(different.sum())
    not_finite = (
        int((~torch.isfinite(a) & ~torch.isfinite(b)).sum()) if a.is_floating_point() else 0
    )
    count = Count(a.numel(), wrong, not_finite)
    if not wrong:
        return count, None
    return count, _finding(pair, a, b, different, step, position, rank)


def _odd(odd: str, step: int, position: int, place: Place, rank: int, size: int) -> Finding:
    infinite = float("inf")
    return Finding(
        step, position, place, rank, size, size, (), 0, 0, (), (float("nan"), float("nan")),
        infinite, infinite, infinite, 0.0, None, None, False, False, ("", ""), odd=odd,
    )  # fmt: skip


def _finding(
    pair: Pair,
    a: torch.Tensor,
    b: torch.Tensor,
    different: torch.Tensor,
    step: int,
    position: int,
    rank: int,
) -> Finding:
    first_row = pair.ours.first_row
    apart = ulp.distance(a, b)
    first = int(different.reshape(-1).nonzero()[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), a.shape))
    by_row = different.reshape(len(a), -1).any(1) if a.ndim else different.view(1)
    rows = by_row.nonzero().view(-1)
    left, right = a[different].double(), b[different].double()
    whole_a, whole_b = a.reshape(-1).double(), b.reshape(-1).double()
    slope, off_slope = _slope(whole_a, whole_b)
    return Finding(
        step=step,
        position=position,
        place=pair.ours.place,
        rank=rank,
        numel=a.numel(),
        differing=int(different.sum()),
        rows=tuple(int(r) + first_row for r in rows[:8]),
        rows_differing=len(rows),
        rows_here=len(by_row),
        index=(index[0] + first_row, *index[1:]) if index else (),
        values=(a.reshape(-1)[first].item(), b.reshape(-1)[first].item()),
        ulp=apart.reshape(-1)[first].item(),
        most_ulp=apart.max().item(),
        worst=_relative(whole_a, whole_b),
        eps=torch.finfo(b.dtype).eps if b.is_floating_point() else 0.0,
        factor=_factor(whole_a, whole_b),
        fits=_fits(a[different], b[different]),
        stale=False,
        zero=not left.any() and bool(right.any()),
        dtypes=tuple(ulp.SHORT.get(o.tensor.dtype, str(o.tensor.dtype)) for o in pair),
        slope=slope,
        off_slope=off_slope,
        misplaced=_misplaced(whole_a, whole_b),
    )


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """The greatest distance, as a share of the largest magnitude on either side."""
    both = torch.isfinite(a) & torch.isfinite(b)
    if not both.all() and (a[~both] != b[~both]).any():
        return float("inf")
    largest = max(a[both].abs().max().item(), b[both].abs().max().item()) if both.any() else 0.0
    return (a[both] - b[both]).abs().max().item() / largest if largest else 0.0


def _factor(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """The ratio of all elements, if it is one and not 1."""
    there = (a != 0) & (b != 0) & torch.isfinite(a) & torch.isfinite(b)
    if not there.any() or ((a != 0) != (b != 0)).any():
        return None
    ratios = a[there] / b[there]
    middle = ratios.median().item()
    same = (ratios - middle).abs().max().item() <= _SAME_FACTOR * abs(middle)
    return middle if same and abs(middle - 1) > 0.01 else None


def _slope(a: torch.Tensor, b: torch.Tensor) -> tuple[float | None, float]:
    if not b.any() or not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return None, float("inf")
    slope = (a @ b / (b @ b)).item()
    largest = a.abs().max().item()
    return slope, (a - slope * b).abs().max().item() / largest if largest else float("inf")


def _misplaced(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.aminmax() != b.aminmax():  # saves most of the sorting
        return False
    return torch.equal(a.sort().values, b.sort().values)


def _fits(a: torch.Tensor, b: torch.Tensor) -> str | None:
    if a.dtype not in (torch.float32, torch.float64) or not a.any():
        return None
    for narrow in _NARROW:
        if ulp.fits(a, narrow) and not ulp.fits(b, narrow):
            return ulp.SHORT[narrow]
    return None

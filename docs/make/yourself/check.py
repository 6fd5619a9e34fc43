"""Whether a function that a reader wrote does what the engine's own does."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minifsdp.collectives import packed, ring, use_collectives
from minifsdp.layout import RowLayout

from ..model import batch, build
from ..ranks import Job, on, play

_path: Path | None = None  # of the reader's file; ranks are forked and have it too


def load(path: Path, name: str) -> Callable[..., Any]:
    """The function `name` of a file. Raises ValueError if there is none."""
    spec = importlib.util.spec_from_file_location("yours", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{path} has no function {name}")
    return getattr(module, name)


def check(name: str, path: Path) -> str | None:
    """What is wrong with the function `name` of a file; None if nothing is.

    Raises ValueError for a name that is no exercise.
    """
    global _path
    if name not in _ALONE:
        raise ValueError(f"no such exercise: {name!r}; there are {', '.join(_ALONE)}")
    yours = load(path, name)
    try:
        wrong = _ALONE[name](yours)
    except NotImplementedError:
        return f"{name} is not written yet"
    if wrong:
        return wrong
    _path = path
    job = Job(__name__, f"{name}_in_a_step", 3)
    try:
        equal = [played.returned for played in play([job])[job]]
    except RuntimeError as error:
        return f"in the engine: {error}"
    return None if all(equal) else "in the engine's place it trains to other gradients"


# Alone, on made-up sizes


def _rows_of(yours: Callable[..., range]) -> str | None:
    for rows in range(12):
        for world_size in range(1, 6):
            for rank in range(world_size):
                wanted = list(RowLayout(rows, 1, world_size).rows_of(rank))
                got = list(yours(rows, world_size, rank))
                if got != wanted:
                    return f"{rows} rows, rank {rank} of {world_size}: {got} instead of {wanted}"
    return None


def _place_rows(yours: Callable[..., None]) -> str | None:
    for world_size in range(1, 5):
        for slot in range(5):
            for numel in range(world_size * slot + 1):
                gradient = torch.arange(1.0, numel + 1)
                got = torch.full((world_size, slot), torch.nan)
                yours(got, gradient)
                wanted = torch.zeros(world_size * slot)
                wanted[:numel] = gradient
                if not torch.equal(got.flatten(), wanted):
                    return (
                        f"{numel} elements in {world_size} slots of {slot}: "
                        f"{got.flatten().tolist()} instead of {wanted.tolist()}"
                    )
    return None


def _ring_sum(yours: Callable[..., torch.Tensor]) -> str | None:
    generator = torch.Generator().manual_seed(0)
    for world_size in range(2, 6):
        values = [torch.randn(64, generator=generator) for _ in range(world_size)]
        before = [value.clone() for value in values]
        for owner in range(world_size):
            first, *others = ring.summation_order(owner, world_size)
            wanted = before[first].clone()
            for rank in others:
                wanted += before[rank]
            got = yours(values, owner)
            if any(not torch.equal(a, b) for a, b in zip(values, before, strict=True)):
                return "it changes the values it was given"
            if not torch.equal(got, wanted):
                off = int((got != wanted).sum())
                return f"{world_size} ranks, owner {owner}: {off} of 64 sums have other bits"
    return None


_ALONE: dict[str, Callable[[Callable[..., Any]], str | None]] = {
    "rows_of": _rows_of,
    "place_rows": _place_rows,
    "ring_sum": _ring_sum,
}


# In the engine's place, on three ranks


def _same_gradients(change: Callable[[Callable[..., Any]], None], name: str) -> bool:
    """Whether a step has the same gradients once `change` has put the reader's function in."""
    results = []
    for changed in (False, True):
        if changed:
            change(load(_path, name))
        with use_collectives("direct"):
            model = build()
            data = batch(torch.distributed.get_rank() + 1)
            model(data).square().sum().backward()
        results.append([p.grad.to_local().clone() for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@on(3)
def rows_of_in_a_step() -> bool:
    def change(yours: Callable[..., range]) -> None:
        RowLayout.rows_of = lambda self, rank: yours(self.rows, self.world_size, rank)

    return _same_gradients(change, "rows_of")


@on(3)
def place_rows_in_a_step() -> bool:
    def change(yours: Callable[..., None]) -> None:
        packed.place_rows = yours

    return _same_gradients(change, "place_rows")


@on(3)
def ring_sum_in_a_step() -> bool:
    def change(yours: Callable[..., torch.Tensor]) -> None:
        def wait(self: Any) -> torch.Tensor:
            for work in self._works:
                work.wait()
            size, rank, itemsize = self.peers.size, self.peers.rank, self.dtype.itemsize
            parts = [
                yours([piece[start:stop] for piece in self._pieces], owner)
                for start, stop, owner in ring.spans(self.numel, size, itemsize, rank)
            ]
            total = torch.cat(parts)
            del self._pieces
            return total.div_(size) if self.average else total

        from minifsdp.collectives.direct import DirectReduction

        DirectReduction.wait = wait

    return _same_gradients(change, "ring_sum")

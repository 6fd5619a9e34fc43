"""Whether build and batch can be compared on: the same at every call, and on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..nest import map_tensors
from .engines import Whole
from .findings import compare_pair, paired
from .lane import Batches, digest, digest_of
from .observation import ONE, Kind, Place
from .settings import Settings
from .whole import WholeLane


@contextmanager
def on_all_ranks(group: dist.ProcessGroup) -> Iterator[None]:
    """If one rank raises a ValueError in the block, all do, once all have left it."""
    error: ValueError | None = None
    try:
        yield
    except ValueError as raised:
        error = raised
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, None if error is None else str(error), group=group)
    if error is not None:
        raise error
    for rank, said in enumerate(everyone):
        if said is not None:
            raise ValueError(f"rank {rank}: {said}")


class Builds:
    """Makes models that begin with the same bits, or says which parameter does not."""

    def __init__(self, build: Callable[[], nn.Module], settings: Settings, group: Any) -> None:
        self._build, self._settings, self._group = build, settings, group
        self._first: dict[str, str] | None = None

    def make(self) -> nn.Module:
        """A new model. Raises ValueError, on all ranks, if it is not as the ones before."""
        with on_all_ranks(self._group):
            model = self._make()
            made = digest(model)
            if self._first is not None and made != self._first:
                raise ValueError(
                    f"build() made {_other(made, self._first)} than before: it must make the same "
                    "bits at each call (torch.manual_seed is called before it; seed other sources "
                    "of chance inside it)"
                )
        if self._first is None:
            self._first = made
            self._same_on_ranks(made)
        return model.to(self._settings.device)

    def _make(self) -> nn.Module:
        torch.manual_seed(self._settings.seed)
        random.seed(self._settings.seed)
        try:
            model = self._build()
        except Exception as error:
            raise ValueError(f"build() raised {type(error).__name__}: {error}") from error
        if not isinstance(model, nn.Module):
            raise ValueError(f"build() gave a {type(model).__name__}: it has to give an nn.Module")
        if any(p.is_meta for p in model.parameters()):
            raise ValueError(
                "build() gave parameters on meta: fill them, as engines start from them"
            )
        return model

    def _same_on_ranks(self, made: dict[str, str]) -> None:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, made, group=self._group)
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise ValueError(
                    f"build() made {_other(theirs, everyone[0])} on rank {rank} than on rank 0: it "
                    "must make the same model on every rank"
                )


def _other(made: dict[str, str], before: dict[str, str]) -> str:
    names = [n for n in {**before, **made} if made.get(n) != before.get(n)]
    return f"another {names[0]!r}" + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def batches(batches: Batches, group: Any) -> list[str]:
    """Try the first step's batches; what to note about them.

    Raises ValueError, on all ranks, if they are not the same at each call and on each rank.
    """
    ranks = range(dist.get_world_size())
    with on_all_ranks(group):
        first = [_digest(batches.get(rank, 0, 0)) for rank in ranks]
        again = [_digest(batches.get(rank, 0, 0)) for rank in ranks]
        for rank in ranks:
            if first[rank] != again[rank]:
                raise ValueError(
                    f"batch({rank}, 0) gave other values at its second call: it must be a function "
                    "of its arguments (make a torch.Generator from them)"
                )
    everyone: list[Any] = [None] * len(ranks)
    dist.all_gather_object(everyone, first, group=group)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ValueError(
                f"batch gave other values on rank {rank} than on rank 0 for the same arguments: it "
                "must be a function of its arguments"
            )
    if len(ranks) > 1 and len(set(map(str, first))) < len(ranks):
        return ["ranks have equal batches: a reduction that is left out might not be noticed"]
    return []


def forwards(builds: Builds, batches: Batches, settings: Settings, group: Any) -> None:
    """Raise ValueError, on all ranks, if two new models' forwards give other bits.

    Both models are built before either runs, as engines' are: a build may seed what forward draws.
    """
    lanes = [WholeLane(Whole(), settings, batches) for _ in range(2)]
    for lane in lanes:
        model = builds.make()
        with on_all_ranks(group):
            lane.prepare(model)
    try:
        first, again = (lane.first_forward() for lane in lanes)
    except Exception:
        first, again = [], []  # the engines are going to say it, and which of them
    with on_all_ranks(group):
        for pair in paired(again, first):
            if compare_pair(pair, 0, 0, 0)[1] is not None:
                raise ValueError(not_the_same((pair.ours or pair.theirs).place))
    for lane in lanes:
        lane.watch.remove()


def not_the_same(place: Place) -> str:
    """What is wrong with a model whose forward showed other bits at `place` without a cause."""
    where = "" if place.kind == Kind.LOSS else f" of {place.unit or 'the root'}"
    return (
        f"the forward is not the same at each call (first in: {ONE[place.kind]}{where}): it draws "
        "from random, numpy or a generator of its own, or its kernels are not deterministic; draw "
        "from torch's default generator, which is seeded before each call, or seed or take out "
        "what differs"
    )


def _digest(nested: Any) -> list[str]:
    found: list[str] = []
    map_tensors(lambda t: found.append(digest_of(t)) or t, nested)
    return found or [repr(nested)]

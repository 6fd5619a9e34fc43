"""What would make a run fit: changes planned one after the other, no more of them than it takes.

[Note: what cannot be enough] A change says which categories it can make smaller. If all the others
alone hold more than is usable, by the books of the run as it is, it is not rehearsed: 70B takes
seconds each time.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .categories import Category
from .machines import GIB
from .settings import Change

if TYPE_CHECKING:
    from .report import Report

_ENOUGH = 3  # changes that fit

Replan = Callable[..., "Report"]
"""A plan with these keywords for `build` and `batch`, on so many ranks and GPUs a node, with these
settings."""


class Remedy(NamedTuple):
    """Changes that were planned, together."""

    names: tuple[str, ...]
    peak_bytes: int
    host_peak_bytes: int  # of a rank
    host_node_bytes: int  # of a node, its processes included; 0 where nothing is offloaded
    fits: bool
    world_size: int
    tokens_per_second: float  # of all ranks
    alters: bool  # what is learnt

    @property
    def cost(self) -> tuple[bool, bool, float]:
        """What to sort by: fits, learns the same, and GPU-seconds a token."""
        return not self.fits, self.alters, self.world_size / self.tokens_per_second


class Search:
    """Iterate over it: each change alone; where none is enough, the first two, three and so on,
    and what fits then also without those that take more GPUs or alter what is learnt.

    Each step plans once. It ends when enough was found that fits, or after
    `Settings.remedy_seconds`.
    """

    def __init__(self, report: Report, replan: Replan) -> None:
        self.tried: list[Remedy] = []
        self.cannot_be_enough: list[str] = []
        self.refused: list[str] = []
        """Names of changes that cannot be planned, each with the reason."""
        self.not_tried: list[str] = []
        """For want of time."""
        self._report, self._replan = report, replan
        self._bounds: dict[tuple[bool, frozenset[str]], int] = {}
        self._fitting: list[Change] = []
        self._steps = self._found()

    def __iter__(self) -> Iterator[Remedy]:
        """Goes on where whoever iterated before left off."""
        return self._steps

    def _found(self) -> Iterator[Remedy]:
        changes = self._report.settings.changes
        until = time.monotonic() + self._report.settings.remedy_seconds
        yield from self._try([[change] for change in changes], until, _ENOUGH)
        if not any(remedy.fits for remedy in self.tried):
            together = [list(changes[:number]) for number in range(2, len(changes) + 1)]
            yield from self._try(together, until, 1)
            dear = [c for c in self._fitting[:-1] if c.world_size is not None or c.alters]
            without = [[c for c in self._fitting if c is not left] for left in dear]
            yield from self._try(without, until, 1 + len(dear))

    def _try(self, candidates: list[list[Change]], until: float, enough: int) -> Iterator[Remedy]:
        for changes in candidates:
            name = " + ".join(change.name for change in changes)
            if sum(remedy.fits for remedy in self.tried) >= enough:
                return
            if self._in_vain(changes):
                self.cannot_be_enough.append(name)
            elif time.monotonic() > until:
                self.not_tried.append(name)
            else:
                try:
                    remedy = self._plan(changes)
                except (ValueError, RuntimeError) as reason:
                    self.refused.append(f"{name}: {str(reason).splitlines()[0]}")
                else:
                    self.tried.append(remedy)
                    if remedy.fits:
                        self._fitting = changes
                    yield remedy

    def _in_vain(self, changes: list[Change]) -> bool:
        """Whether what none of the changes makes smaller is too much by itself."""
        if any(change.lowers is None for change in changes):
            return False
        report = self._report
        lowered = frozenset(name for change in changes for name in change.lowers or ())
        if self._held_anyway(False, lowered) > report.cluster.gpu.usable_bytes:
            return True
        if report.host is None or report.settings.host_memory_gib is None:
            return False
        host = report.cluster.gpus_per_node * self._held_anyway(True, lowered)
        return host > report.settings.host_memory_gib * GIB

    def _held_anyway(self, on_host: bool, lowered: frozenset[str]) -> int:
        """Bytes of a rank at once of other categories than those."""
        if (on_host, lowered) not in self._bounds:
            out = frozenset(category for category in Category if category.value in lowered)
            self._bounds[on_host, lowered] = self._report.rehearsal.peak(on_host, out).nbytes
        return self._bounds[on_host, lowered]

    def _plan(self, changes: list[Change]) -> Remedy:
        before, settings = self._report, replace(self._report.settings, changes=())
        keywords: dict[str, Any] = {}
        for change in changes:
            keywords |= change.keywords
            given = change.settings
            settings = replace(settings, **(given(settings) if callable(given) else given))
        size = max([before.world_size, *(c.world_size for c in changes if c.world_size)])
        per_node = before.cluster.gpus_per_node
        if settings.nodes is None and size % 8 == 0:
            per_node = 8
        report = self._replan(
            keywords,
            size,
            replace(before.cluster, gpus_per_node=per_node),
            settings,
        )
        return Remedy(
            tuple(change.name for change in changes),
            report.device.nbytes,
            report.host.nbytes if report.host else 0,
            report.host_node_bytes,
            report.fits,
            size,
            report.tokens_per_second,
            any(change.alters for change in changes),
        )


def with_keywords(function: Callable[..., Any], keywords: dict[str, Any]) -> Callable[[], Any]:
    """`function` as a plan calls it, with what changes gave it."""
    return functools.partial(function, **keywords) if keywords else function

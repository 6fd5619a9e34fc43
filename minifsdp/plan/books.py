"""The books of one step: what was held, done and sent, whatever the GPU.

[Note: micro-batches that repeat] A step of many micro-batches does the second of them over and
over: the first makes gradients that the others add to, and the last may reduce alone. So at most
three are rehearsed and the second stands for all between first and last, in every figure: what it
holds, does and sends is counted as often as it is done. If each leaves something behind, its last
time holds the most.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from . import costs
from .categories import Category
from .ledger import Change, Moment, Place


class Volume(NamedTuple):
    """Messages of one kind in a step, and the bytes of all ranks' pieces together."""

    count: int
    nbytes: int


class Peak(NamedTuple):
    """The most that was held at once."""

    nbytes: int
    by_category: dict[Category, int]
    phase: str
    unit: str
    own_peaks: dict[Category, int] = {}  # noqa: RUF012  (of each category, whenever it was)


class Repeated(NamedTuple):
    """The part of the books that is done several times, and written down once."""

    begin: Place
    end: Place
    times: int


@dataclass
class Rehearsal:
    """What one step of one rank does, whatever the GPU."""

    world_size: int
    device_type: str
    parameters: int  # of the whole model
    trained: int  # of them, those that learn
    tokens: int  # of this rank in a step
    held: Counter[tuple[bool, Category]]  # bytes at the step's start, by (on the host, category)
    changes: list[Change]
    moments: list[Moment]  # their `change` counts into `changes`
    trace: list[costs.Step]
    ranks: tuple[int, ...]  # that units are sharded over
    repeated: Repeated | None = None

    def counted(self) -> Iterator[tuple[costs.Step, int]]:
        """The trace, with how often each step of it is done."""
        if self.repeated is None:
            return zip(self.trace, itertools.repeat(1))
        (_, begin, _), (_, end, _), times = self.repeated
        rest = len(self.trace) - end
        often = [(1, begin), (times, end - begin), (1, rest)]
        return zip(
            self.trace,
            itertools.chain.from_iterable(itertools.repeat(*pair) for pair in often),
            strict=True,
        )

    @property
    def messages(self) -> dict[str, Volume]:
        """Messages of units by kind."""
        volumes: dict[str, Volume] = {}
        for step, times in self.counted():
            if isinstance(step, costs.Told) and step.nbytes:
                before = volumes.get(step.kind, Volume(0, 0))
                nbytes = before.nbytes + times * step.nbytes
                volumes[step.kind] = Volume(before.count + times, nbytes)
        return volumes

    @property
    def model_flops(self) -> int:
        """FLOPs of this rank's step by the usual formula, (6 N tokens + 12 L d T^2 a sequence).

        Attention's part is three times what its operators do in forward, masked or not; a frozen
        parameter saves 2 of its 6.
        """
        frozen = self.parameters - self.trained
        attention, phase = 0, ""
        for step, times in self.counted():
            if isinstance(step, costs.Mark):
                phase = step.phase
            elif isinstance(step, costs.Work) and phase == "forward" and costs.is_attention(step):
                attention += times * step.unmasked_flops
        return (6 * self.trained + 4 * frozen) * self.tokens + 3 * attention

    def peak(self, on_host: bool, leaving_out: frozenset[Category] = frozenset()) -> Peak:
        """The most bytes held at once on the device or the host, and when.

        leaving_out: categories whose bytes do not count.
        """

        def counts(host: bool, category: Category) -> bool:
            return host == on_host and category not in leaving_out

        live = Counter({c: n for (host, c), n in self.held.items() if counts(host, c)})
        total = most = sum(live.values())
        at_most, of_category, fullest = dict(live), dict(live), -1
        for number, change in self._changes_that_matter():
            block, delta = change.block, change.delta
            if not counts(block.on_host, block.category):
                continue
            live[block.category] += delta
            total += delta
            of_category[block.category] = max(
                of_category.get(block.category, 0), live[block.category]
            )
            if total > most:
                most, at_most, fullest = total, dict(live), number
        phase, unit = "before the step", ""
        if fullest >= 0:
            found = bisect.bisect_right(self.moments, fullest, key=lambda moment: moment.change)
            _, phase, unit = self.moments[found - 1]
        return Peak(most, at_most, phase, unit, of_category)

    def _changes_that_matter(self) -> Iterator[tuple[int, Change]]:
        """All changes with their numbers; of repeated ones, where each time leaves something
        behind, the first time and the last."""
        if self.repeated is None or self.repeated.times < 2:
            yield from enumerate(self.changes)
            return
        (begin, _, _), (end, _, _), times = self.repeated
        once = list(enumerate(self.changes[begin:end], begin))
        yield from enumerate(self.changes[:begin])
        yield from once
        left: dict[tuple[bool, Category], Change] = {}
        for _, change in once:
            key = change.block.on_host, change.block.category
            before = left[key].delta if key in left else 0
            left[key] = change._replace(delta=before + change.delta)
        if any(change.delta for change in left.values()):
            for change in sorted(left.values(), key=lambda change: change.delta):
                yield end - 1, change._replace(delta=(times - 2) * change.delta)
            yield from once
        yield from enumerate(self.changes[end:], end)

    def flops_by_operator(self) -> dict[str, int]:
        """FLOPs done, recomputed ones too."""
        counted: Counter[str] = Counter()
        for step, times in self.counted():
            if isinstance(step, costs.Work) and step.flops:
                counted[step.operator] += times * step.flops
        return dict(counted.most_common())

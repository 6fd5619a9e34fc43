"""The books of one step: what was held, done and sent, whatever the GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from . import costs
from .categories import Category
from .ledger import Change, Moment


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
    messages: dict[str, Volume]
    ranks: tuple[int, ...]  # that units are sharded over

    @property
    def model_flops(self) -> int:
        """FLOPs of this rank's step by the usual formula, (6 N tokens + 12 L d T^2 a sequence).

        Attention's part is three times what its operators do in forward, masked or not; a frozen
        parameter saves 2 of its 6.
        """
        frozen = self.parameters - self.trained
        attention, phase = 0, ""
        for step in self.trace:
            if isinstance(step, costs.Mark):
                phase = step.phase
            elif isinstance(step, costs.Work) and phase == "forward" and costs.is_attention(step):
                attention += step.unmasked_flops
        return (6 * self.trained + 4 * frozen) * self.tokens + 3 * attention

    def peak(self, on_host: bool) -> Peak:
        """The most bytes held at once on the device or the host, and when."""
        live = Counter({c: n for (host, c), n in self.held.items() if host == on_host})
        total = sum(live.values())
        best = Peak(total, dict(live), "before the step", "")
        of_category = dict(live)
        at = iter([*self.moments, Moment(len(self.changes) + 1, "", "")])
        moment, following = next(at), next(at)
        for number, change in enumerate(self.changes):
            while following.change <= number:
                moment, following = following, next(at)
            block, delta = change.block, change.delta
            if block.on_host != on_host:
                continue
            live[block.category] += delta
            total += delta
            of_category[block.category] = max(
                of_category.get(block.category, 0), live[block.category]
            )
            if total > best.nbytes:
                best = Peak(total, dict(live), moment.phase, moment.unit)
        return best._replace(own_peaks=of_category)

    def flops_by_operator(self) -> dict[str, int]:
        """FLOPs done, recomputed ones too."""
        counted: Counter[str] = Counter()
        for step in self.trace:
            if isinstance(step, costs.Work) and step.flops:
                counted[step.operator] += step.flops
        return dict(counted.most_common())

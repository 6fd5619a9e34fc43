"""What a plan assumes of the run, besides model, batch, ranks and GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from .categories import Category

_NODE = 8  # ranks, where nobody says how many
_MOST_RANKS = 100_000


def summed(output: Any) -> torch.Tensor:
    """The loss a plan takes unless it is told one: the sum of what the model returns.

    Raises ValueError if that is not one tensor.
    """
    if not isinstance(output, torch.Tensor):
        raise ValueError(
            f"the model returns a {type(output).__name__}, which a plan cannot sum up to a loss: "
            "say what to take of it with loss (--loss MODULE:FUNCTION), from what it returns to a "
            "tensor without dimensions"
        )
    return output if output.dim() == 0 else output.sum()


class Change(NamedTuple):
    """Something to change about a run.

    `build` and `batch` are called with `keywords` then; `settings`, or what that function makes of
    those before, go before the plan's own.
    """

    name: str
    keywords: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    world_size: int | None = None
    settings: dict[str, Any] | Callable[[Settings], dict[str, Any]] = {}  # noqa: RUF012
    alters: bool = False
    """Whether what is learnt becomes another thing (shorter sequences, adapters alone)."""
    lowers: Sequence[str] | None = None
    """Categories of memory, such as "activations", that it can make smaller at all, on device or
    host; None: any. What holds too much without them is not tried."""


@dataclass(frozen=True)
class Settings:
    """Keywords of `plan`."""

    micro_batches: int = 1
    """Forward and backward passes in a step."""
    no_sync: bool = False
    """Reduce gradients in the last of them alone."""
    clip_norm: float | None = 1.0
    """Clip gradients to this norm; None: do not."""
    loss: Callable[[Any], torch.Tensor] = summed
    """From the model's output to a loss without dimensions."""
    collectives: str = "backend"
    """How messages travel (see `minifsdp.collectives`); a GPU's always by the backend."""

    nodes: int | None = None
    """Machines that the ranks are spread over; None: eight ranks on each."""
    network_gb_s: float = 200.0
    """Bytes (1e9) a second that a node sends, and receives, by all its network cards together."""
    steps: int | None = None
    """Steps of the whole run, to say how long it takes."""
    price: float | None = None
    """Of a GPU for an hour, to say what it costs."""
    host_memory_gib: float | None = None
    """Of a node, in GiB, to say whether what is offloaded fits there."""
    changes: Sequence[Change] = ()
    """What to try where the run does not fit, the cheapest first."""
    remedy_seconds: float = 60.0
    """No further change is tried after so long."""

    def gpus_per_node(self, world_size: int) -> int:
        """Ranks on each node; torchrun starts as many on all.

        Raises ValueError if they cannot be spread evenly.
        """
        if not 1 <= world_size <= _MOST_RANKS:
            raise ValueError(
                f"a world of {world_size} ranks cannot be planned: give 1 to {_MOST_RANKS:,}"
            )
        if self.nodes is None:
            if world_size > _NODE and world_size % _NODE:
                raise ValueError(
                    f"{world_size} ranks are not whole nodes of {_NODE}: say with nodes (--nodes) "
                    "how many machines they are on, each with as many GPUs"
                )
            return min(_NODE, world_size)
        if world_size % self.nodes == 0:
            return world_size // self.nodes
        raise ValueError(
            f"nodes {self.nodes} (--nodes) cannot share {world_size} ranks evenly, and torchrun "
            f"starts as many on each: give one of {', '.join(map(str, _divisors(world_size)))}"
        )

    @classmethod
    def of(cls, keywords: dict[str, Any]) -> Settings:
        """From `plan`'s keywords. Raises ValueError for one that is not known or impossible."""
        known = [field.name for field in fields(cls)]
        for name in keywords:
            if name not in known:
                raise ValueError(f"plan has no setting {name!r}; it has {', '.join(known)}")
        settings = cls(**keywords)
        if settings.collectives not in ("backend", "direct"):
            raise ValueError(
                f"collectives {settings.collectives!r} cannot be planned: choose backend or direct"
            )
        for name in ("micro_batches", "nodes", "steps"):
            value = getattr(settings, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} {value} must be a whole number, 1 or more")
        for name in ("network_gb_s", "price", "host_memory_gib", "clip_norm"):
            value = getattr(settings, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} {value} must be above 0, and not infinite")
        if settings.price is not None and settings.steps is None:
            raise ValueError(
                f"price {settings.price:g} says what a run costs only if its length is known: give "
                "steps (--steps) too"
            )
        names = [category.value for category in Category]
        for change in settings.changes:
            for category in change.lowers or ():
                if category not in names:
                    raise ValueError(
                        f"{change.name}: no category {category!r}; there are {', '.join(names)}"
                    )
        return settings


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]

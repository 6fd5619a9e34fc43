"""What a plan assumes of the run, besides model, batch, ranks and GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch


def summed(output: torch.Tensor) -> torch.Tensor:
    """The loss a plan takes unless it is told one: the sum of what the model returns."""
    return output if output.dim() == 0 else output.sum()


class Change(NamedTuple):
    """Something to change about a run.

    `build` and `batch` are called with `keywords` then; `settings` go before the plan's own.
    """

    name: str
    keywords: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    world_size: int | None = None
    settings: dict[str, Any] = {}  # noqa: RUF012
    alters: bool = False
    """Whether what is learnt becomes another thing (shorter sequences, adapters alone)."""


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
    changes: Sequence[Change] = ()
    """What to try where the run does not fit, the cheapest first."""

    def gpus_per_node(self, world_size: int) -> int:
        """Ranks on each node."""
        return min(8, world_size) if self.nodes is None else -(-world_size // self.nodes)

    @classmethod
    def of(cls, keywords: dict[str, Any]) -> Settings:
        """From `plan`'s keywords. Raises ValueError for one that is not known or impossible."""
        known = [field.name for field in fields(cls)]
        for name in keywords:
            if name not in known:
                raise ValueError(f"plan has no setting {name!r}; it has {', '.join(known)}")
        settings = cls(**keywords)
        if settings.micro_batches < 1:
            raise ValueError(f"micro_batches {settings.micro_batches} must be 1 or more")
        if settings.collectives not in ("backend", "direct"):
            raise ValueError(
                f"collectives {settings.collectives!r} cannot be planned: choose backend or direct"
            )
        if settings.nodes is not None and settings.nodes < 1:
            raise ValueError(f"nodes {settings.nodes} must be 1 or more")
        for name in ("network_gb_s", "price", "steps"):
            value = getattr(settings, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} {value} must be above 0")
        return settings

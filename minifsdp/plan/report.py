"""What a plan says: whether it fits, what is held when, what is sent, how long it takes."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from .books import Peak, Rehearsal
from .categories import Category
from .machines import (
    FRAGMENTATION,
    LINK_EFFICIENCY,
    RESERVE_BYTES,
    Cluster,
    gpu_named,
)
from .rehearsal import Batch, Build, rehearse
from .settings import Change, Settings
from .timeline import Timing, simulate
from .world import GPU


def plan(build: Build, batch: Batch, world_size: int, gpu: str | float, **settings: Any) -> Report:
    """Plan one step of rank 0 of `world_size`, and what follows from it for the run.

    build: makes the model on meta, sharded by minifsdp, and returns it with a function that makes
        an optimizer from it.
    batch: makes what the model is called with, a tuple of arguments or a dict of keywords.
    gpu: a name of `GPUS`, or a number of GB.
    settings: the fields of `Settings`.

    Takes no GPU and little memory (70B parameters: about 0.4 GB and 20 s). Raises ValueError for
    arguments that cannot be, RuntimeError in a process that has a process group.
    """
    chosen = Settings.of(settings)
    machine = gpu_named(gpu)
    cluster = Cluster(machine, chosen.gpus_per_node(world_size), chosen.network_gb_s)
    first = _planned(build, batch, world_size, cluster, chosen)
    if not first.fits and chosen.changes:
        first.remedies = _remedies(build, batch, world_size, cluster, chosen)
    return first


def _planned(
    build: Build, batch: Batch, world_size: int, cluster: Cluster, settings: Settings
) -> Report:
    rehearsal = rehearse(build, batch, world_size, GPU, settings)
    return Report(rehearsal, cluster, settings, simulate(rehearsal, cluster))


class Remedy(NamedTuple):
    """Changes that were planned, together."""

    names: tuple[str, ...]
    peak_bytes: int
    host_peak_bytes: int
    fits: bool
    world_size: int
    tokens_per_second: float  # of all ranks
    alters: bool  # what is learnt

    @property
    def cost(self) -> tuple[bool, bool, float]:
        """What to sort by: fits, learns the same, and GPU-seconds a token."""
        return not self.fits, self.alters, self.world_size / self.tokens_per_second


def _remedies(
    build: Build, batch: Batch, world_size: int, cluster: Cluster, settings: Settings
) -> list[Remedy]:
    """Each change alone; where none is enough, the changes one after the other until they are."""

    def tried(changes: list[Change]) -> Remedy:
        keywords: dict[str, Any] = {}
        changed: dict[str, Any] = {}
        for change in changes:
            keywords |= change.keywords
            changed |= change.settings
        size = max([world_size, *(c.world_size for c in changes if c.world_size)])
        per_node = cluster.gpus_per_node if settings.nodes else settings.gpus_per_node(size)
        report = _planned(
            functools.partial(build, **keywords),
            functools.partial(batch, **keywords),
            size,
            replace(cluster, gpus_per_node=per_node),
            replace(settings, **changed),
        )
        names = tuple(change.name for change in changes)
        host = report.host.nbytes if report.host else 0
        speed = report.tokens_per_second
        alters = any(change.alters for change in changes)
        return Remedy(names, report.device.nbytes, host, report.fits, size, speed, alters)

    alone = [tried([change]) for change in settings.changes]
    if not any(remedy.fits for remedy in alone):
        for number in range(2, len(settings.changes) + 1):
            alone.append(tried(list(settings.changes[:number])))
            if alone[-1].fits:
                break
    return sorted(alone, key=lambda remedy: remedy.cost)


@dataclass
class Report:
    """A plan. `print` it, `save` it as .json or .html, or read its fields."""

    rehearsal: Rehearsal
    cluster: Cluster
    settings: Settings
    timing: Timing

    def __post_init__(self) -> None:
        self.remedies: list[Remedy] = []
        self.device: Peak = self.rehearsal.peak(on_host=False)
        offloads = self.rehearsal.held[True, Category.PARAMETERS] > 0
        self.host: Peak | None = self.rehearsal.peak(on_host=True) if offloads else None
        """None where nothing is offloaded: a few numbers on the host do not count."""

    @property
    def world_size(self) -> int:
        return self.rehearsal.world_size

    @property
    def fits(self) -> bool:
        """Whether the peak leaves room for context, NCCL and fragmentation."""
        return self.device.nbytes <= self.cluster.gpu.usable_bytes

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.rehearsal.tokens * self.world_size / self.timing.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the GPU could do in half precision, dense."""
        peak = self.cluster.gpu.half_tflops * 1e12
        return self.rehearsal.model_flops / self.timing.seconds / peak

    @property
    def hours(self) -> float | None:
        """Of `Settings.steps` steps."""
        steps = self.settings.steps
        return None if steps is None else steps * self.timing.seconds / 3600

    @property
    def cost(self) -> float | None:
        """What all GPUs cost for that long, in the unit of `Settings.price`."""
        if self.hours is None or self.settings.price is None:
            return None
        return self.hours * self.settings.price * self.world_size

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON. Bytes, seconds, tokens."""
        gpu, timing = self.cluster.gpu, self.timing
        return {
            "gpu": gpu.name,
            "world_size": self.world_size,
            "gpus_per_node": self.cluster.gpus_per_node,
            "parameters": self.rehearsal.parameters,
            "trained_parameters": self.rehearsal.trained,
            "tokens_per_step_and_rank": self.rehearsal.tokens,
            "fits": self.fits,
            "memory_bytes": gpu.memory_bytes,
            "usable_bytes": gpu.usable_bytes,
            "device": _peak_as_dict(self.device),
            "host": None if self.host is None else _peak_as_dict(self.host),
            "messages": {k: v._asdict() for k, v in self.rehearsal.messages.items()},
            "flops": self.rehearsal.flops_by_operator(),
            "model_flops": self.rehearsal.model_flops,
            "seconds": {
                "step": timing.seconds,
                "compute": timing.compute,
                "messages": timing.messages,
                "messages_exposed": timing.exposed,
                "pcie": timing.pcie,
                "host": timing.host,
                "by_phase": timing.by_phase,
            },
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_and_gpu": self.tokens_per_second / self.world_size,
            "mfu": self.mfu,
            "hours": self.hours,
            "cost": self.cost,
            "assumed": {
                "compute_efficiency": gpu.efficiency,
                "link_efficiency": LINK_EFFICIENCY,
                "network_gb_s": self.cluster.network_gb_s,
                "reserve_bytes": RESERVE_BYTES,
                "fragmentation": FRAGMENTATION,
            },
            "remedies": [remedy._asdict() for remedy in self.remedies],
        }

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON or, with the picture of its memory, as a page (.html).

        Raises ValueError for another ending.
        """
        path = Path(path)
        if path.suffix == ".json":
            path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        elif path.suffix == ".html":
            from .page import page

            path.write_text(page(self))
        else:
            raise ValueError(f"a plan is saved as .json or .html, not as {path.name!r}")

    def __str__(self) -> str:
        from .text import text

        return text(self)


def _peak_as_dict(peak: Peak) -> dict[str, Any]:
    return {
        "peak_bytes": peak.nbytes,
        "phase": peak.phase,
        "unit": peak.unit,
        "by_category": {c.value: n for c, n in peak.by_category.items() if n},
        "own_peaks": {c.value: n for c, n in peak.own_peaks.items() if n},
    }

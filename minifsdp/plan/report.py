"""What a plan says: whether it fits, what is held when, what is sent, how long it takes."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .books import Peak, Rehearsal
from .categories import Category
from .given import Batch, Build
from .machines import (
    FRAGMENTATION,
    GIB,
    HOST_RESERVE_BYTES,
    LINK_EFFICIENCY,
    RESERVE_BYTES,
    Cluster,
    gpu_named,
)
from .rehearsal import rehearse
from .remedies import Remedy, Search, with_keywords
from .settings import Settings
from .timeline import Timing, simulate
from .world import GPU


def plan(build: Build, batch: Batch, world_size: int, gpu: str | float, **settings: Any) -> Report:
    """Plan one step of rank 0 of `world_size`, and what follows from it for the run.

    build: makes the model on meta, sharded by minifsdp, and returns it with a function that makes
        an optimizer from it.
    batch: makes what the model is called with: a tensor, a tuple of arguments, a dict of keywords.
    gpu: a name of `GPUS`, or a number of GB.
    settings: the fields of `Settings`.

    Takes no GPU and little memory (70B parameters: about 0.4 GB and 20 s). Rank 0 holds the most of
    the engine's own, since trailing ranks hold fewer rows; an optimizer that gives whole matrices
    to ranks in turn may give another one more. Raises ValueError for arguments that cannot be,
    RuntimeError in a process that has a process group.
    """
    chosen = Settings.of(settings)
    machine = gpu_named(gpu)
    cluster = Cluster(machine, chosen.gpus_per_node(world_size), chosen.network_gb_s)

    def planned(
        keywords: dict[str, Any], world_size: int, cluster: Cluster, settings: Settings
    ) -> Report:
        functions = with_keywords(build, keywords), with_keywords(batch, keywords)
        rehearsal = rehearse(*functions, world_size, GPU, settings)
        return Report(rehearsal, cluster, settings, simulate(rehearsal, cluster))

    report = planned({}, world_size, cluster, chosen)
    if not report.fits and chosen.changes:
        report.search = Search(report, planned)
    return report


@dataclass
class Report:
    """A plan. `print` it, `save` it as .json or .html, or read its fields."""

    rehearsal: Rehearsal
    cluster: Cluster
    settings: Settings
    timing: Timing

    def __post_init__(self) -> None:
        self.search: Search | None = None
        """Where it does not fit and `Settings.changes` are given: what may be tried."""
        self.device: Peak = self.rehearsal.peak(on_host=False)
        offloads = self.rehearsal.held[True, Category.PARAMETERS] > 0
        self.host: Peak | None = self.rehearsal.peak(on_host=True) if offloads else None
        """None where nothing is offloaded: a few numbers on the host do not count."""

    @property
    def world_size(self) -> int:
        return self.rehearsal.world_size

    @property
    def host_node_bytes(self) -> int:
        """What a node needs of host memory for its ranks; 0 where nothing is offloaded."""
        if self.host is None:
            return 0
        return self.cluster.gpus_per_node * (self.host.nbytes + HOST_RESERVE_BYTES)

    @property
    def fits_device(self) -> bool:
        """Whether the peak leaves room for context, NCCL and fragmentation."""
        return self.device.nbytes <= self.cluster.gpu.usable_bytes

    @property
    def fits_host(self) -> bool:
        """Whether a node has the host memory it needs; True where nobody said how much it has."""
        given = self.settings.host_memory_gib
        return given is None or self.host_node_bytes <= given * GIB

    @property
    def fits(self) -> bool:
        """On the device, and on the host as far as that is known."""
        return self.fits_device and self.fits_host

    @functools.cached_property
    def remedies(self) -> list[Remedy]:
        """What was tried where it does not fit: first what fits, learns the same and costs least.

        Found when they are asked for first; to have each as soon as it is found, iterate over
        `search` before.
        """
        if self.search is None:
            return []
        for _ in self.search:  # those not found yet
            pass
        return sorted(self.search.tried, key=lambda remedy: remedy.cost)

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
            "timed_as": gpu.timed_as or gpu.name,
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
            "host_node_bytes": self.host_node_bytes,
            "host_memory_gib": self.settings.host_memory_gib,
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
                "host_reserve_bytes": HOST_RESERVE_BYTES,
            },
            "remedies": [remedy._asdict() for remedy in self.remedies],
            "remedies_not_tried": self.search.not_tried if self.search else [],
        }

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON or, with the picture of its memory, as a page (.html).

        A file that is there stays whole until the new one is. Raises ValueError for another ending.
        """
        path = Path(path)
        if path.suffix == ".json":
            content = json.dumps(self.as_dict(), indent=1) + "\n"
        elif path.suffix == ".html":
            from .page import page

            content = page(self)
        else:
            raise ValueError(f"a plan is saved as .json or .html, not as {path.name!r}")
        whole = Path(os.path.realpath(path))  # a link stays one
        aside = whole.with_name(f".{whole.name}.{os.getpid()}")
        try:
            aside.write_text(content, encoding="utf-8")
            os.replace(aside, whole)
        finally:
            aside.unlink(missing_ok=True)

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

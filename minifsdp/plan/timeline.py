"""How long a step takes: its operators and messages laid on streams, in the order they were issued.

[Note: three clocks]
The host issues; the device computes in that order; messages run on a stream for each process group.
A message starts when the device has reached the place it was launched at and the one before it is
over; what waits for it stalls the device until it has arrived. Copies over PCIe are issued on the
computing stream, as the engine does, and stall it. The host stalls only where it asks for a value
or waits for a copy; optimizers of offloaded units run on it, or on a thread of its own that is
waited for when the unit is gathered. What an operator takes is the longer of its arithmetic and its
memory traffic, by the efficiency of the GPU (see `machines`). Not seen: launching operators,
kernels and messages that slow each other down, ranks that differ, the input pipeline.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from . import costs
from .books import Rehearsal
from .machines import HOST_GB_S, LINK_EFFICIENCY, Cluster


class Timing(NamedTuple):
    """Seconds of a step, and where they go."""

    seconds: float
    compute: float  # of all operators on the device
    messages: float  # of all messages, hidden or not
    exposed: float  # of them, that the device stood still for
    pcie: float
    host: float  # optimizer and casts on the host
    by_phase: dict[str, float]
    at: list[float]
    """When the device has done each step of the trace, from the start of the step."""


def simulate(rehearsal: Rehearsal, cluster: Cluster) -> Timing:
    """Lay a step's trace on the streams."""
    run = _Run(cluster)
    at: list[float] = []
    by_phase: Counter[str] = Counter()
    phase, before = "", 0.0
    for step in rehearsal.trace:
        run.take(step)
        now = max(run.device, run.host)
        by_phase[phase] += now - before
        if isinstance(step, costs.Mark):
            phase = step.phase
        before = now
        at.append(now)
    run.join()
    total = max(run.device, run.host, *run.streams.values(), 0.0)
    by_phase[phase] += total - before
    spent = run.spent
    return Timing(
        total, spent["compute"], spent["messages"], spent["exposed"], spent["pcie"], spent["host"],
        {name: seconds for name, seconds in by_phase.items() if name and seconds > 0}, at,
    )  # fmt: skip


class _Run:
    """Clocks, in seconds from the start of the step."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.host = self.device = self.worker = 0.0
        self.streams: dict[tuple[int, ...], float] = {}
        self.spent: Counter[str] = Counter()
        self._launched: tuple[str, float] = ("", 0.0)  # the last message, and its end
        self._gathers: dict[str, float] = {}  # unit: when its parameters are there
        self._reductions: dict[str, float] = {}
        self._copies: dict[int, float] = {}  # when copies are over
        self._reducing = ""
        self._steps: dict[str, float] = {}  # unit: when its step on the worker is over
        self._on_worker = False

    def take(self, step: costs.Step) -> None:
        if isinstance(step, costs.Work):
            self._work(step)
        elif isinstance(step, costs.Transfer):
            seconds = step.nbytes / (self.cluster.gpu.pcie_gb_s * 1e9 * LINK_EFFICIENCY)
            self._on_device(seconds, "pcie")
            if step.blocking:
                self.host = max(self.host, self.device)
        elif isinstance(step, costs.Message):
            self._launch(step)
        elif isinstance(step, costs.Told):
            self._told(step)
        elif isinstance(step, costs.Sync):
            self.host = max(self.host, self.device)
        elif isinstance(step, costs.Copied):
            if step.awaited:
                self.host = max(self.host, self._copies.pop(step.number, 0.0))
            else:
                self._copies[step.number] = max(self.device, self.host)
        elif isinstance(step, costs.Submitted):
            self._submitted(step)
        elif step.phase in ("clipping", "optimizer") and not self._on_worker:
            self.join()

    def _work(self, step: costs.Work) -> None:
        if step.on_host:
            seconds = step.nbytes / (HOST_GB_S * 1e9)
            self.spent["host"] += seconds
            if self._on_worker:
                self.worker += seconds
            else:
                self.host += seconds
            return
        gpu = self.cluster.gpu
        arithmetic = step.flops / gpu.flops_per_second(step.dtype)
        self._on_device(max(arithmetic, step.nbytes / (gpu.memory_gb_s * 1e9)) / gpu.efficiency)

    def _on_device(self, seconds: float, kind: str = "compute") -> None:
        self.device = max(self.device, self.host) + seconds
        self.spent[kind] += seconds

    def _launch(self, step: costs.Message) -> None:
        seconds = self.cluster.seconds(step.kind, step.nbytes, step.ranks)
        start = max(self.device, self.host, self.streams.get(step.ranks, 0.0))
        end = self.streams[step.ranks] = start + seconds
        self.spent["messages"] += seconds
        self._launched = step.kind, end
        if step.kind == "reduce_scatter":
            self._reductions[self._reducing] = end

    def _told(self, step: costs.Told) -> None:
        kind, end = self._launched
        if step.kind == "all_gather" and kind == "all_gather":
            self._gathers[step.unit] = end
            self.host = max(self.host, self._steps.pop(step.unit, 0.0))
        elif step.kind == "unshard":
            self._wait(self._gathers.pop(step.unit, 0.0))
        elif step.kind == "reduce_scatter":
            self._reducing = step.unit
        elif step.kind == "all_reduce":
            self._wait(self._reductions.get(step.unit, 0.0))
            self._reductions[step.unit] = end
        elif step.kind == "reduced":
            self._wait(self._reductions.pop(step.unit, 0.0))

    def _wait(self, end: float) -> None:
        """The device stands still until a message is there."""
        now = max(self.device, self.host)
        if end > now:
            self.spent["exposed"] += end - now
            self.device = end

    def _submitted(self, step: costs.Submitted) -> None:
        self._on_worker = not step.ends
        if step.ends:
            self._steps[step.unit] = self.worker
        else:  # its gradients have come down by then
            self.worker = max(self.worker, self.host, self.device)

    def join(self) -> None:
        """The host waits for the worker."""
        self.host = max(self.host, self.worker)

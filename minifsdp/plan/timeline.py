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

import math
import sys
from collections import Counter, deque
from typing import Any, NamedTuple

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
    repeated = rehearsal.repeated
    for number, step in enumerate(rehearsal.trace, 1):
        run.take(step)
        if repeated is not None and number == repeated.end.step:
            again = rehearsal.trace[repeated.begin.step : number]
            run.repeat(again, repeated.times - 1)
    run.join()
    total = max(run.device, run.host, *run.streams.values(), 0.0)
    run.by_phase[run.phase] += total - run.now
    spent = run.spent
    return Timing(
        total, spent["compute"], spent["messages"], spent["exposed"], spent["pcie"], spent["host"],
        {name: seconds for name, seconds in run.by_phase.items() if name and seconds > 0}, run.at,
    )  # fmt: skip


# [Note: clocks that repeat] What is done over and over soon moves every clock on by as much each
# time. Then the times that are left are a multiplication, up to where a clock that is behind
# another but faster would catch up with it: there it is laid step by step once more.
_SAME = 1e-9  # relative
_MOST_TIMES = 100  # laid step by step; then the last one stands for the rest
_PENDING = ("_gathers", "_reductions", "_steps")  # clocks by the unit that is waited for
_COPIES = 10_000  # that are remembered: far more than are issued before one is waited for
_Clock = tuple[str, Any]


class _Run:
    """Clocks, in seconds from the start of the step."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.host = self.device = self.worker = 0.0
        self.streams: dict[tuple[int, ...], float] = {}
        self.spent: Counter[str] = Counter()
        self.by_phase: Counter[str] = Counter()
        self.at: list[float] = []
        self.phase, self.now = "", 0.0
        self._launched: tuple[str, float] = ("", 0.0)  # the last message, and its end
        self._gathers: dict[str, float] = {}  # unit: when its parameters are there
        self._reductions: dict[str, float] = {}
        self._copies: deque[float] = deque(maxlen=_COPIES)  # when each was over
        self._reducing = ""
        self._steps: dict[str, float] = {}  # unit: when its step on the worker is over
        self._on_worker = False

    def take(self, step: costs.Step) -> None:
        """Do a step of the trace that is written down here for the first time."""
        self._take(step)
        self.at.append(self.now)

    def repeat(self, trace: list[costs.Step], times: int) -> None:
        """Do part of the trace so many times more; see [Note: clocks that repeat]."""
        laid, rates, before = 0, {}, self._clocks()
        while times > 0:
            last, spent, by_phase = rates, self.spent.copy(), self.by_phase.copy()
            for step in trace:
                self._take(step)
            laid, times, after = laid + 1, times - 1, self._clocks()
            rates = {clock: end - before.get(clock, 0.0) for clock, end in after.items()}
            free = 0
            if laid >= _MOST_TIMES:
                free = times
            elif _same(rates, last, self.now):
                free = min(times, _times_until_caught_up(after, rates, self.now))
            if free:
                self._move(rates, free)
                for counter, old in ((self.spent, spent), (self.by_phase, by_phase)):
                    for key in counter:
                        counter[key] += free * (counter[key] - old[key])
                times -= free
            before = self._clocks()

    def _clocks(self) -> dict[_Clock, float]:
        own = {("", name): getattr(self, name) for name in ("host", "device", "worker", "now")}
        named = {
            (name, key): end
            for name in ("streams", *_PENDING)
            for key, end in getattr(self, name).items()
        }
        return own | named

    def _move(self, rates: dict[_Clock, float], times: int) -> None:
        """Let so many times go by, in each of which every clock moves on at its rate."""
        for (name, key), rate in rates.items():
            if name:
                getattr(self, name)[key] += rate * times
            else:
                setattr(self, key, getattr(self, key) + rate * times)
        later = rates["", "device"] * times
        self._launched = self._launched[0], self._launched[1] + later
        self._copies = deque((end + later for end in self._copies), self._copies.maxlen)

    def _take(self, step: costs.Step) -> None:
        self._do(step)
        now = max(self.device, self.host)
        self.by_phase[self.phase] += now - self.now
        if isinstance(step, costs.Mark):
            self.phase = step.phase
        self.now = now

    def _do(self, step: costs.Step) -> None:
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
        elif isinstance(step, costs.Awaited):
            self._wait(self._launched[1])
        elif isinstance(step, costs.Sync):
            self.host = max(self.host, self.device)
        elif isinstance(step, costs.Copied):
            if step.ago and step.ago <= len(self._copies):
                self.host = max(self.host, self._copies[-step.ago])
            elif not step.ago:
                self._copies.append(max(self.device, self.host))
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


def _same(rates: dict[_Clock, float], last: dict[_Clock, float], now: float) -> bool:
    return rates.keys() == last.keys() and all(
        math.isclose(rate, last[clock], rel_tol=_SAME, abs_tol=_rounding(now))
        for clock, rate in rates.items()
    )


def _rounding(now: float) -> float:
    """Seconds by which a clock's rate may be off, for many small sums."""
    return 1e-12 * max(1.0, now)


def _times_until_caught_up(
    clocks: dict[_Clock, float], rates: dict[_Clock, float], now: float
) -> int:
    """How often each clock can surely move on at its rate without meeting a slower one."""
    ends = [(clocks[k], rates[k]) for k in clocks if k[0] in ("", "streams")]
    fastest = max(rate for _, rate in ends)
    times = math.inf
    for ahead, slow in ends:
        for behind, fast in ends:
            if behind < ahead and fast - slow > _SAME * fastest + _rounding(now):
                times = min(times, (ahead - behind) / (fast - slow) - 2)
    return max(0, int(times)) if times < math.inf else sys.maxsize

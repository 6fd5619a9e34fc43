"""When something happened: by the host's clock, or on the stream that computes.

On an accelerator the host runs ahead: what it times is how fast work is queued. There a stamp is an
event on the current stream, whose time is known once the stream has come by.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Clock(Protocol):
    name: str

    def stamp(self) -> Any:
        """Now, in a form that costs little."""

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """Each stamp in seconds after the first. Blocks until all have come to pass."""


class HostClock:
    """One clock for all processes of a host."""

    name = "host"
    stamp = staticmethod(time.perf_counter_ns)

    def seconds(self, stamps: Sequence[int]) -> list[float]:
        return [(stamp - stamps[0]) * 1e-9 for stamp in stamps]


class DeviceClock:
    """The stream that computes. device: an accelerator, "cuda" say."""

    name = "device"

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def stamp(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def seconds(self, stamps: Sequence[torch.Event]) -> list[float]:
        if stamps:
            stamps[-1].synchronize()
        return [
            stamps[0].elapsed_time(stamp) * 1e-3 if stamp is not stamps[0] else 0.0
            for stamp in stamps
        ]


def clock(name: str | None) -> Clock:
    """The clock of that name; None: the device's if there is an accelerator.

    Raises ValueError for another name, and for "device" on a machine that has none.
    """
    if name not in (None, "host", "device"):
        raise ValueError(f"no clock named {name!r}: choose 'host' or 'device'")
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    if name == "device" and accelerator is None:
        raise ValueError("clock='device' needs an accelerator, and there is none: leave it out")
    if name == "host" or accelerator is None:
        return HostClock()
    return DeviceClock(accelerator.type)

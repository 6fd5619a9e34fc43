"""Between host and device: rows go up as messages need them, gradients come down behind backward.

[Note: CPU offload as a pipeline]
Rows, gradients and so the optimizer's state lie on the host. A gather casts a unit's rows on the
host if they travel in a narrower dtype, so that no more bytes go up than are computed with, and the
copy runs while the device computes. Reduced rows come down in the dtype they were reduced in, while
backward goes on, and are cast on the host. Both ways lead through two fixed page-locked buffers
used in turn: copies to and from other host memory would block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def is_staged(device: torch.device, pinned: bool) -> bool:
    """Whether what goes between host and `device` needs a page-locked buffer on its way."""
    return pinned and device.type != "cpu"


class Staging:
    """Two host buffers, leased in turn; each is waited for before it is leased again."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._until: list[Callable[[], object] | None] = [None, None]
        self._turn = 0

    def lease(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat host tensor, (numel,), once whoever had the buffer before has done with it."""
        self._turn = 1 - self._turn
        wait, self._until[self._turn] = self._until[self._turn], None
        if wait is not None:
            wait()
        nbytes = numel * dtype.itemsize
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.numel() < nbytes:
            pin = torch.accelerator.is_available()
            with torch.inference_mode(False):  # it is kept for training
                buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin)
            self._buffers[self._turn] = buffer
        return buffer[:nbytes].view(dtype)

    def busy_until(self, wait: Callable[[], object]) -> None:
        """The buffer leased last is in use until `wait` returns."""
        self._until[self._turn] = wait


_up, _down = Staging(), Staging()


def _copied(device: torch.device) -> Callable[[], None]:
    """Blocks until the copies that were issued on `device` so far are over."""
    if device.type == "cpu":
        return lambda: None
    event = torch.Event(device)
    event.record()
    return event.synchronize


def bring_up(rows: torch.Tensor, target: torch.Tensor) -> None:
    """Copy host `rows` into `target` on the device, cast on the host, without blocking for it."""
    buffer = _up.lease(rows.numel(), target.dtype)
    buffer.copy_(rows)
    target.copy_(buffer, non_blocking=True)
    _up.busy_until(_copied(target.device))


class Descent:
    """Reduced rows on their way down to the host."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._host = _down.lease(rows.numel(), rows.dtype)
        self.held = 0  # the buffer is always there
        self._host.copy_(rows, non_blocking=True)
        self._wait = _copied(rows.device)
        _down.busy_until(self._wait)

    def wait(self) -> torch.Tensor:
        """The rows in a host buffer, which is used again for the descent after the next."""
        self._wait()
        return self._host

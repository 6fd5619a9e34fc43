"""A model under some engine, and the timed step that is the same for all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .works import Work, loss_of

LEARNING_RATE = 3e-4


class Setup(NamedTuple):
    """What all engines of a run share."""

    work: Work
    device: torch.device
    seed: int
    offload: bool

    def model(self) -> nn.Module:
        return self.work.model(self.seed)

    @property
    def pins(self) -> bool:
        """Whether offloaded tensors are pinned: only where a GPU reads them."""
        return self.device.type == "cuda"


class Step(NamedTuple):
    """What one rank saw of one step: wall seconds of its phases, CPU seconds, the loss."""

    forward: float
    backward: float
    optimizer: float
    whole: float
    cpu: float
    loss: float

    @property
    def passes(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward


def adamw(parameters: Any) -> torch.optim.AdamW:
    """The optimizer of every engine."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


@dataclass
class Built:
    """A model under an engine, ready to step.

    `optimizer` is None where the backward pass steps. `around` is entered for every step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    device: torch.device
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def step(self, tokens: Tensor) -> Step:
        """Train on `tokens` (batch, seq + 1), timing each phase."""
        with self.around():
            cpu, start = time.process_time(), self._now()
            loss = loss_of(self.model, tokens)
            forward = self._now()
            self.backward(loss)
            backward = self._now()
            self.update()
            end = self._now()
            cpu = time.process_time() - cpu
        phases = (forward - start, backward - forward, end - backward, end - start)
        return Step(*phases, cpu, loss.item())

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class DeepSpeedBuilt(Built):
    """DeepSpeed's engine runs backward and the optimizer itself."""

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss)

    def update(self) -> None:
        self.model.step()

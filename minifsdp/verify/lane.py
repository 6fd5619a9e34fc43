"""One engine's training, a phase at a time, so that several can run side by side.

[Note: a lane]
Every lane builds the model from the same seed, gets the same batches, and begins each micro-batch
of a rank with the same random numbers (dropout draws alike). `step` is a generator: each `next`
runs one phase and gives what was seen in it. Between two phases another lane runs; only the phase's
copies are held.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..nest import map_tensors
from .engines import Engine
from .observation import Kind, Observation, Place, Watch, copy_of
from .rows import own_rows
from .settings import Settings
from .ulp import numbers
from .units import Plan, clean, plan_units

Seen = Iterator[list[Observation]]


class Batches:
    """What the models are called with, by rank, step and micro-batch."""

    def __init__(self, batch: Callable[..., Any], accumulate: int, device: str) -> None:
        self._batch, self._accumulate, self._device = batch, accumulate, device

    def get(self, rank: int, step: int, micro: int) -> Any:
        """Made anew at every call. Raises ValueError naming the call if `batch` raises."""
        given = (rank, step, micro) if self._accumulate > 1 else (rank, step)
        try:
            made = self._batch(*given)
        except Exception as error:
            raise ValueError(
                f"batch{given} raised {type(error).__name__}: {error}; it is called for every rank "
                "and step" + (", and micro-batch" if self._accumulate > 1 else "")
            ) from error
        return move(made, self._device)


def move(nested: Any, device: str) -> Any:
    """Copies of its tensors on a device."""
    return map_tensors(lambda t: t.to(device, copy=True), nested)


class Lane:
    """A model sharded by an engine, its optimizer, and a step of both."""

    def __init__(self, engine: Engine, settings: Settings, batches: Batches) -> None:
        self.engine, self.settings, self.batches = engine, settings, batches
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.at: Callable[[str], None] = lambda what: None
        """Told of each phase as it begins."""

    @property
    def name(self) -> str:
        return self.engine.name

    def prepare(self, model: nn.Module) -> None:
        """Shard what was built."""
        self.plan: Plan = plan_units(model, self.settings.units)
        modules = dict(model.named_modules())
        units = [modules[name] for name in self._built_names(model)]
        self.model = self._shard(model, units)
        self.inner = self.engine.inner(self.model)
        self.watch = Watch(self.inner, self.plan)
        self.optimizer = self.settings.make_optimizer(
            [p for p in self.model.parameters() if p.requires_grad]
        )

    def _built_names(self, model: nn.Module) -> list[str]:
        names = {clean(name): name for name, _ in model.named_modules()}
        return [names[unit] for unit in self.plan.units]

    def _shard(self, model: nn.Module, units: list[nn.Module]) -> nn.Module:
        return self.engine.shard(model, units, self.settings)

    # One step

    def step(self, number: int) -> Seen:
        """Run a step; what each of its phases shows."""
        self.model.train()
        for micro in range(self.settings.accumulate):
            is_last = micro == self.settings.accumulate - 1
            with self.engine.syncing(self.model, is_last):
                self.at("forward")
                loss, seen = self.forward(self.rank, number, micro)
                yield seen
                del seen
                self.at("backward")
                loss.backward()
        yield from self.after_backward()

    def forward(self, rank: int, step: int, micro: int) -> tuple[torch.Tensor, list[Observation]]:
        """The loss of a rank's micro-batch, and what was seen on the way."""
        seed_for(self.settings.seed, rank, step, micro)
        batch = self.batches.get(rank, step, micro)
        with self.watch.watching(micro) as seen:
            output = call(self.model, batch)
        loss = loss_of(output, batch, self.settings.loss)
        seen.append(Observation(Place(Kind.LOSS, micro, "", ""), copy_of(loss).view(1)))
        return loss, seen

    def after_backward(self) -> Seen:
        """Gradients, clipping, and the optimizer's step."""
        yield self.rows(Kind.GRADIENT)
        if self.settings.clip is not None:
            self.at("clipping")
            norm = copy_of(self.clip(self.settings.clip)).view(1)
            place = Place(Kind.NORM, 0, "", "")
            yield [Observation(place, norm), *self.rows(Kind.CLIPPED)]
        self.at("optimizer step")
        self.optimizer.step()
        self.optimizer.zero_grad()
        yield self.rows(Kind.PARAMETER) + self.buffers()

    def clip(self, max_norm: float) -> torch.Tensor:
        return self.engine.clip(self.model, max_norm)

    # What is seen between phases

    def rows(self, kind: Kind) -> list[Observation]:
        """This rank's rows of all parameters, or gradients, in the order of computing."""
        gradients = kind in (Kind.GRADIENT, Kind.CLIPPED)
        held = self.engine.tensors(self.model, gradients)
        seen = []
        for param in reversed(self.plan.params) if gradients else self.plan.params:
            tensor, rows, first = held.pop(param.name, None), None, 0
            if tensor is not None:
                what = f"{'gradient' if gradients else 'parameter'} {param.name!r} of {self.name}"
                rows, first = own_rows(tensor, param.shape, self.rank, self.world_size, what)
            seen.append(Observation(Place(kind, 0, param.unit, param.name), rows, first))
        if not gradients:
            for name, tensor in held.items():  # such as a tied parameter that was parted
                place = Place(kind, 0, "", name)
                rows = own_rows(tensor, tuple(tensor.shape), self.rank, self.world_size, name)
                seen.append(Observation(place, *rows))
        return seen

    def buffers(self) -> list[Observation]:
        return [
            Observation(Place(Kind.BUFFER, 0, "", clean(name)), copy_of(buffer).reshape(-1))
            for name, buffer in self.inner.named_buffers()
        ]


def seed_for(seed: int, rank: int, step: int, micro: int) -> None:
    """The random numbers of a rank's micro-batch, the same in every engine."""
    torch.manual_seed((((seed * 1009 + step) * 1009 + micro) * 1009 + rank) % 2**31)


def call(model: nn.Module, batch: Any) -> Any:
    """`model(*batch)` for a tuple or list, `model(**batch)` for a dict, else `model(batch)`."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def loss_of(output: Any, batch: Any, loss: Callable[[Any, Any], torch.Tensor] | None):
    """The loss: what `loss(output, batch)` gives, or the output itself, a scalar."""
    value = output if loss is None else loss(output, batch)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.squeeze()
    shape = f"a tensor {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__
    if loss is None:
        raise ValueError(
            f"the model returns {shape}, which is no loss: give loss, a function "
            "loss(output, batch) -> scalar (--loss package.module:loss)"
        )
    raise ValueError(f"loss(output, batch) gave {shape}: it has to give one number")


def digest(model: nn.Module) -> dict[str, str]:
    """The bits of each parameter and buffer, hashed."""
    return {
        name: digest_of(tensor)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


def digest_of(tensor: torch.Tensor) -> str:
    """Shape, dtype and bits, hashed."""
    with torch.no_grad():
        raw = numbers(tensor.detach()).cpu().contiguous().view(-1).view(torch.uint8)
    said = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=8)
    said.update(raw.numpy().data)
    return said.hexdigest()

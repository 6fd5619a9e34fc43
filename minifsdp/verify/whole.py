"""`none`: no sharding and no messages, the reference that a reader can check by eye.

[Note: what unsharded training on several ranks' data is]
Every rank holds the whole model and runs all ranks' batches on it, one rank's after the other. The
gradient is their mean: summed from the first rank to the last in the dtype that messages would
have, then divided by the number of ranks. With a dtype for computing, parameters are kept as built
and cast for each step, and units cast their inputs, as mixed precision of FSDP2 does.

[Note: what rounding explains]
Engines that sum in another order differ in the last bits, and a step of Adam can make much of
little. How much is measured: `Shaken` is the same training with every gradient moved, up or down at
random, as far as 2 W roundings could (W ranks; unit roundoff of the messages' dtype; of the mean of
the ranks' magnitudes), and the norm by sqrt(n) roundings for n gradients. Its distance from `none`
is what rounding explains. On one rank nothing is summed, and nothing but the norm may differ.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ..nest import cast_floating
from .lane import Lane, Seen
from .observation import Observation


class WholeLane(Lane):
    """Trains the whole model on all ranks' batches."""

    def _shard(self, model: nn.Module, units: list[nn.Module]) -> nn.Module:
        dtype = self.settings.dtype
        if dtype is not None:
            for module in [model, *units]:
                module.register_forward_pre_hook(_casting(dtype), with_kwargs=True, prepend=True)
        self._buffers: dict[int, list[torch.Tensor]] = {}
        return model

    def step(self, number: int) -> Seen:
        self.model.train()
        masters = self._cast_parameters()
        seen: list[list[Observation]] = []
        total: dict[nn.Parameter, torch.Tensor] = {}
        magnitude: dict[nn.Parameter, torch.Tensor] = {}
        for rank in range(self.world_size):
            self.at(f"forward and backward of rank {rank}'s data")
            for param, grad in self._gradients(rank, number, seen).items():
                size = grad.float().abs()
                total[param] = total[param].add_(grad) if param in total else grad
                magnitude[param] = magnitude[param].add_(size) if param in magnitude else size
        self._use_buffers(self.rank)
        for param, master in masters.items():
            param.data = master
        for param in list(total):
            mean = total.pop(param).div_(self.world_size)
            size = magnitude.pop(param).div_(self.world_size)
            param.grad = self._rounded(mean, size).to(param.dtype)
        yield from seen
        yield from self.after_backward()

    def first_forward(self) -> list[Observation]:
        """What the first forward of this rank shows; no step is taken."""
        self.model.train()
        masters = self._cast_parameters()
        _, seen = self.forward(self.rank, 0, 0)
        for param, master in masters.items():
            param.data = master
        return seen

    def _cast_parameters(self) -> dict[nn.Parameter, torch.Tensor]:
        """Cast for a step; returns what was cast."""
        dtype, masters = self.settings.dtype, {}
        for param in self.model.parameters():
            if dtype is not None and param.is_floating_point() and param.dtype != dtype:
                masters[param] = param.data
                param.data = param.data.to(dtype)
        return masters

    def _gradients(
        self, rank: int, number: int, seen: list[list[Observation]]
    ) -> dict[nn.Parameter, torch.Tensor]:
        """A rank's gradients, its micro-batches added as one that reduces at the end adds them."""
        self._use_buffers(rank)
        grads: dict[nn.Parameter, torch.Tensor] = {}
        for micro in range(self.settings.accumulate):
            loss, observed = self.forward(rank, number, micro)
            if rank == self.rank:
                seen.append(observed)
            loss.backward()
            for param in self.model.parameters():
                grad, param.grad = param.grad, None
                if grad is None:
                    continue
                if param in grads:
                    grads[param].add_(grad)
                else:
                    grads[param] = grad.to(self.settings.reduce_dtype or grad.dtype)
        return grads

    def _use_buffers(self, rank: int) -> None:
        """Buffers as the rank left them: sharding engines do not share them."""
        buffers = list(self.model.buffers())
        with torch.no_grad():
            if not self._buffers:
                self._holder = rank
                for other in range(self.world_size):
                    self._buffers[other] = [b.clone() for b in buffers]
            self._buffers[self._holder] = [b.clone() for b in buffers]
            for buffer, kept in zip(buffers, self._buffers[rank], strict=True):
                buffer.copy_(kept)
        self._holder = rank

    def _rounded(self, mean: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
        """The gradient to step with, from the mean and the mean of magnitudes."""
        return mean


class Shaken(WholeLane):
    """The same with every gradient and norm off by what rounding could do."""

    _chance: torch.Generator | None = None

    @property
    def name(self) -> str:
        return "rounding"

    def _rounded(self, mean: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
        if self.world_size == 1:
            return mean
        if self._chance is None:
            self._chance = torch.Generator(mean.device).manual_seed(self.settings.seed)
        roundings = 2 * self.world_size * torch.finfo(mean.dtype).eps / 2
        up = torch.rand(mean.shape, generator=self._chance, device=mean.device) < 0.5
        shift = magnitude.double() * roundings
        return (mean.double() + torch.where(up, shift, -shift)).to(
            torch.promote_types(mean.dtype, torch.float32)
        )

    def clip(self, max_norm: float) -> torch.Tensor:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        norm *= 1 + norm_roundings(norm.dtype, sum(g.numel() for g in grads))
        params = [p for p in self.model.parameters() if p.grad is not None]
        nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return norm


def norm_roundings(dtype: torch.dtype, numel: int) -> float:
    """How far, relatively, a norm of so many numbers may be off: a random walk's sqrt."""
    return torch.finfo(dtype).eps * math.sqrt(max(1, numel))


def _casting(dtype: torch.dtype) -> Any:
    def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    return cast

"""Engines without a fault in their numbers: somebody's own, and those that die, hang or raise."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

from minifsdp.verify.engines import MiniFSDP
from minifsdp.verify.settings import Settings


def own_fsdp2(model: nn.Module, units: list[nn.Module], settings: Settings) -> nn.Module:
    """Which here is torch's."""
    for unit in units:
        fsdp.fully_shard(unit)
    return fsdp.fully_shard(model)


class Averaging(nn.Module):
    """Whole parameters on every rank, whose gradients are averaged one by one as they come."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(self._average)

    def _average(self, param: nn.Parameter) -> None:
        param.grad /= dist.get_world_size()
        dist.all_reduce(param.grad)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.module(*args, **kwargs)


def own_ddp(model: nn.Module, units: list[nn.Module], settings: Settings) -> nn.Module:
    return Averaging(model)


class _AtBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, act: Callable[[], None]) -> torch.Tensor:
        ctx.act = act
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.act()
        return grad, None


def _on_rank_1_in_backward(act: Callable[[], None]) -> Callable[..., nn.Module]:
    def shard(model: nn.Module, units: list[nn.Module], settings: Settings) -> nn.Module:
        model = MiniFSDP().shard(model, units, settings)
        if dist.get_rank() == 1:
            model.layers[0].register_forward_hook(lambda m, a, out: _AtBackward.apply(out, act))

        return model

    return shard


def _raise() -> None:
    raise KeyError("planted")


dies_on_rank_1 = _on_rank_1_in_backward(lambda: os._exit(3))
hangs_on_rank_1 = _on_rank_1_in_backward(lambda: time.sleep(1000))
raises_on_rank_1 = _on_rank_1_in_backward(_raise)

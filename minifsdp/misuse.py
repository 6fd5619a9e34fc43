"""Mistakes that would train nothing, or lose an edit, without a word: found where they happen.

An optimizer built before sharding holds parameters that nobody uses any more; one built while a
unit is whole holds full parameters whose rows are trained instead of them. Both step happily. And
an in-place edit of a full parameter is gone when its unit reshards, since the rows are the truth.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

_ROLE = "_minifsdp_role"  # on parameters that must not be optimized: what they are
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_watching = False


def mark(param: nn.Parameter, role: str) -> None:
    """Remember what a parameter that no optimizer may step on is."""
    setattr(param, _ROLE, role)


def role_of(param: torch.Tensor) -> str | None:
    """What `mark` said of it."""
    return getattr(param, _ROLE, None)


def watch_optimizers() -> None:
    """From now on, look at every optimizer's parameters at its first step."""
    global _watching
    if not _watching:
        register_optimizer_step_pre_hook(_check_optimizer)
        _watching = True


def _check_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _checked.get(optimizer) == count:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if (role := role_of(param)) is not None:
                raise RuntimeError(
                    f"this {type(optimizer).__name__} holds {role}, so its step would train "
                    "nothing: build the optimizer after fully_shard, from model.parameters(), "
                    "while the model is sharded (before a forward, or after model.reshard())"
                )
    _checked[optimizer] = count

"""What a plan's caller gives it, checked: the model, what it is called with, its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..hooks import ScheduledUnit, unit_of
from .world import GPU

Build = Callable[[], tuple[nn.Module, Callable[[nn.Module], Any]]]
Batch = Callable[[], Any]


def built_by(build: Build) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    """The model and what makes its optimizer. Raises ValueError for something else."""
    try:
        built = build()
    except NotImplementedError as error:
        if f"'{GPU.capitalize()}'" not in str(error):
            raise
        raise ValueError(
            "build() makes or moves tensors with real memory, such as weights, and a plan's device "
            "has none: build on torch.device('meta') and leave out to_empty and weights"
        ) from error
    if isinstance(built, tuple) and len(built) == 2 and callable(built[1]):
        return built
    raise ValueError(
        f"build() returned a {type(built).__name__}: return the sharded model and a function that "
        "makes its optimizer from it"
    )


def units_of(model: nn.Module) -> dict[str, ScheduledUnit]:
    """The model's units by name. Raises ValueError if it has none, or has real memory."""
    found: dict[str, ScheduledUnit] = {}
    for path, module in model.named_modules():
        unit = unit_of(module)
        if unit is not None and unit not in found.values():
            found[path or "root"] = unit
    if not found:
        raise ValueError(
            "build() returned a model that is not sharded: call minifsdp.fully_shard in it"
        )
    real = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    if real:
        raise ValueError(
            f"build() gave {real[0]!r} and {len(real) - 1} others real memory: build on "
            "torch.device('meta') and leave out to_empty and weights, which a plan needs none of"
        )
    return found


def arguments(given: Any) -> dict[str, Any] | list[Any]:
    """What the model is called with: keywords, or arguments; a bare tensor is one of them.

    Raises ValueError for anything else.
    """
    if isinstance(given, dict):
        return given
    if isinstance(given, torch.Tensor):
        return [given]
    if isinstance(given, (list, tuple)):
        return list(given)
    raise ValueError(
        f"batch() returned a {type(given).__name__}: return a tensor, a tuple of arguments, or a "
        "dict of keywords"
    )


def checked(loss: Any) -> torch.Tensor:
    """A loss that backward can begin at. Raises ValueError for anything else."""
    if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.requires_grad:
        return loss
    found = f"a {type(loss).__name__}"
    if isinstance(loss, torch.Tensor):
        found = f"a tensor of shape {tuple(loss.shape)}" if loss.dim() else "one without gradient"
    raise ValueError(f"the loss must be a tensor without dimensions that has a gradient: {found}")


def tokens_in(inputs: Any) -> int:
    """Tokens of a micro-batch: elements of its first integer tensor, or rows of its first one."""
    values = list(inputs.values()) if isinstance(inputs, dict) else list(inputs)
    given = [value for value in values if isinstance(value, torch.Tensor)]
    whole = [t for t in given if not t.is_floating_point() and t.dim() > 1]
    return whole[0].numel() if whole else (len(given[0]) if given else 0)

"""Tensors inside the nested arguments and results of a module's forward."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with `fn` applied to every tensor in its lists, tuples, dicts and dataclasses.

    Containers in which nothing changed are returned as they are, so identity survives a no-op.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        items = {k: map_tensors(fn, v) for k, v in value.items()}
        if all(items[k] is v for k, v in value.items()):
            return value
        if type(value) is dict:
            return items
        copied = copy.copy(value)
        for key, item in items.items():  # some subclasses forbid `update`
            copied[key] = item
        return copied
    if isinstance(value, (list, tuple)):
        mapped = [map_tensors(fn, v) for v in value]
        if all(a is b for a, b in zip(mapped, value, strict=True)):
            return value
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        mapped = {name: map_tensors(fn, old) for name, old in fields.items()}
        if all(mapped[name] is old for name, old in fields.items()):
            return value
        copied = copy.copy(value)
        for name, item in mapped.items():  # past a frozen dataclass's own guard
            object.__setattr__(copied, name, item)
        return copied
    return value


def grad_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in `value` that require gradients, in order."""
    found: list[torch.Tensor] = []

    def visit(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(visit, value)
    return found


def replace_grad_tensors(value: Any, replacements: list[torch.Tensor]) -> Any:
    """`value` with its gradient-requiring tensors replaced, in the order of `grad_tensors`."""
    remaining = iter(replacements)
    return map_tensors(lambda t: next(remaining) if t.requires_grad else t, value)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor cast to `dtype`."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)

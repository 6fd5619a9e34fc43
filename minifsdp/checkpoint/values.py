"""A nested state, taken apart into named tensors and JSON, and put together again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

# What JSON cannot say is an object with one key of these.
_TENSOR, _TUPLE, _ITEMS, _FLOAT = "$tensor", "$tuple", "$items", "$float"


def split(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors of `state` by dotted name, as torch's checkpoints name them; the rest as JSON.

    In the JSON a tensor is a reference to its name; tuples, keys that are not strings, and floats
    that are not finite keep what they are. Raises ValueError, with the name, for a value of another
    kind, and for two tensors of one name.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _encode(state, "", tensors)


def _encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    def inner(key: Any, item: Any) -> Any:
        return _encode(item, f"{name}.{key}" if name else str(key), tensors)

    if isinstance(value, torch.Tensor):
        if name in tensors:
            raise ValueError(f"two tensors of the state are called {name!r}: rename one")
        tensors[name] = value
        return {_TENSOR: name}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if isinstance(value, list):
        return [inner(i, item) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TUPLE: [inner(i, item) for i, item in enumerate(value)]}
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: inner(key, item) for key, item in value.items()}
        return {_ITEMS: [[key, inner(key, item)] for key, item in value.items()]}
    raise ValueError(
        f"{name!r} of the state is of class {type(value).__name__}: a checkpoint takes tensors, "
        "numbers, strings, booleans, None, and lists, tuples and dicts of them"
    )


def join(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What `split` took apart, with these tensors. Raises KeyError or TypeError for other JSON."""
    if isinstance(tree, list):
        return [join(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _TENSOR in tree:
        return tensors[tree[_TENSOR]]
    if _TUPLE in tree:
        return tuple(join(item, tensors) for item in tree[_TUPLE])
    if _ITEMS in tree:
        return {key: join(item, tensors) for key, item in tree[_ITEMS]}
    if _FLOAT in tree:
        return float(tree[_FLOAT])
    return {key: join(item, tensors) for key, item in tree.items()}


def absent(state: Mapping[Any, Any], loaded: Any, prefix: str = "") -> list[str]:
    """The names of values in `state` for which `loaded` has none."""
    names = []
    for key, value in state.items():
        if not isinstance(loaded, Mapping) or key not in loaded:
            names.append(f"{prefix}{key}")
        elif isinstance(value, Mapping):
            names += absent(value, loaded[key], f"{prefix}{key}.")
    return names


def update(state: Any, loaded: Mapping[Any, Any]) -> None:
    """Put what was `loaded` into `state`; dicts stay the same objects."""
    for key, value in loaded.items():
        if isinstance(value, Mapping) and isinstance(state.get(key), Mapping):
            update(state[key], value)
        else:
            state[key] = value

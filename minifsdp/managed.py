"""What `fully_shard` is given: which parameters become the unit's, and what it must refuse."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from .hooks import unit_of
from .misuse import role_of
from .param import Owner, ShardedParam
from .placement import Home, near_home
from .unit import shard


def check_module(module: object) -> None:
    """Raise ValueError for what cannot be a unit."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"fully_shard takes modules, not {type(module).__name__}: {module!r}")
    name = type(module).__name__
    has_forward = type(module).forward is not nn.Module.forward
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not has_forward:
        raise ValueError(f"{name} has no forward to hook: shard the modules inside it instead")
    if unit_of(module) is not None:
        raise ValueError(f"{name} is already sharded: call fully_shard once for each module")


def reshard_mode(
    reshard_after_forward: bool | int | None, home: Home
) -> tuple[bool | None, Home | None]:
    """Whether to reshard after forward (None: unless root), and to which few ranks, if not all.

    As upstream, an int of 1 means False and one of all ranks True, with a warning.
    """
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward, None
    size, whole = reshard_after_forward, home.shards.size
    if not isinstance(size, int) or size < 1 or whole % size:
        raise ValueError(
            f"reshard_after_forward={size!r} must be True, False, None, or a divisor of the "
            f"{whole} ranks that the parameters are sharded over"
        )
    if size in (1, whole):
        meant = size == whole and whole > 1
        warnings.warn(f"reshard_after_forward={size} means {meant}: say so", stacklevel=3)
        return meant, None
    return True, near_home(home, size)


def _walk(modules: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of `modules` and everything inside them that is no unit yet."""
    seen: set[nn.Module] = set()
    waiting = [("", module) for module in reversed(modules)]
    while waiting:
        path, module = waiting.pop()
        if module in seen or unit_of(module) is not None:
            continue
        seen.add(module)
        yield path, module
        children = [(f"{path}.{name}" if path else name, m) for name, m in module.named_children()]
        waiting += reversed(children)


def own_params(
    modules: list[nn.Module], ignored: set[nn.Parameter], home: Home
) -> list[ShardedParam]:
    """Describe the parameters that become the new unit's, each once, with all its owners."""
    owners: dict[nn.Parameter, list[Owner]] = {}
    names: dict[nn.Parameter, str] = {}
    for path, module in _walk(modules):
        for attribute, param in module._parameters.items():
            if param is None or param in ignored:
                continue
            owners.setdefault(param, []).append(Owner(weakref.ref(module), attribute))
            names.setdefault(param, f"{path}.{attribute}" if path else attribute)
    described = []
    for param, its_owners in owners.items():
        name = names[param]
        if isinstance(param, DTensor):
            raise ValueError(
                f"parameter {name!r} is a DTensor already. If its parent was sharded first: shard "
                "inner modules first, their parents after them"
            )
        if (role := role_of(param)) is not None:
            raise ValueError(
                f"parameter {name!r} is tied to {role}, which is another unit's: shard both "
                "modules as one unit, fully_shard([module_a, module_b])"
            )
        described.append(shard(name, param, its_owners, home))
    return described


def check_placements(
    choose: Callable[[nn.Parameter], Shard | None] | None, params: list[ShardedParam]
) -> None:
    """Raise NotImplementedError for a parameter that is wanted sharded by other than rows."""
    if choose is None:
        return
    for param in params:
        placement = choose(param.registered())
        if placement is not None and placement != Shard(0):
            raise NotImplementedError(
                f"shard_placement_fn wants {placement} for parameter {param.name!r}; only "
                "Shard(0), rows, is supported"
            )


def move_to_device(
    modules: list[nn.Module], params: list[ShardedParam], device: torch.device
) -> None:
    """Bring whole parameters and buffers to the unit's device, unless they are on meta."""
    for param in params:
        whole = param.registered()
        if not whole.is_meta and whole.device != device:
            whole.data = whole.data.to(device)
    for _, module in _walk(modules):
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                module._buffers[name] = buffer.to(device)

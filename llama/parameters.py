"""A model's parameters by their canonical names, and the rows of each that this rank holds."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

# What wrappers put into names: checkpoint_wrapper, FSDP1, torch.compile.
_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod)\.")


def named_parameters(model: nn.Module, allow_meta: bool = False) -> dict[str, nn.Parameter]:
    """Parameters by the names they have in a bare Llama, a tied one once.

    Units that a sharding engine left unsharded after a forward are resharded first, so that what
    is read or written is what the optimizer steps. ValueError for parameters still on meta, unless
    `allow_meta`.
    """
    for module in model.modules():
        reshard = getattr(module, "reshard", None)  # FSDP2's method; any engine that has it
        if callable(reshard):
            reshard()
    parameters = {_WRAPPERS.sub("", name): p for name, p in model.named_parameters()}
    on_meta = [name for name, parameter in parameters.items() if parameter.is_meta]
    if on_meta and not allow_meta:
        raise ValueError(
            f"{len(on_meta)} parameters are on the meta device ({on_meta[0]}, ...): give them "
            "memory first, with model.to_empty(device=...)"
        )
    return parameters


def own_rows(parameter: Tensor) -> slice:
    """The rows of the full parameter that `local_part` is: as torch.chunk deals them over the
    ranks, or all of them for a plain tensor."""
    rows = parameter.shape[0]
    if not isinstance(parameter, DTensor):
        return slice(0, rows)
    first, count = 0, rows
    mesh = parameter.device_mesh
    for axis, placement in enumerate(parameter.placements):
        if placement == Replicate():
            continue
        if placement != Shard(0) or count != rows:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} has placements "
                f"{parameter.placements}; only one Shard(0) beside Replicate() is understood"
            )
        per_rank = -(-rows // mesh.size(axis))
        first = min(rows, per_rank * mesh.get_local_rank(axis))
        count = min(rows - first, per_rank)
    return slice(first, first + count)


def local_part(parameter: Tensor) -> Tensor:
    """The plain tensor of `own_rows(parameter)`, sharing the parameter's memory."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def rows_to_write(parameter: Tensor, first_rank: bool) -> slice:
    """The rows that this rank is to write, so that all ranks together write each row once.

    Those are its own, of which replicas on a mesh take a part each; a plain tensor of a sharded
    model, which every rank has whole, is for the first rank.
    """
    rows = own_rows(parameter)
    if not isinstance(parameter, DTensor):
        return rows if first_rank else slice(0, 0)
    mesh, first, last = parameter.device_mesh, rows.start, rows.stop
    for axis, placement in enumerate(parameter.placements):
        if placement == Replicate():
            share = -(-(last - first) // mesh.size(axis))
            first = min(last, first + share * mesh.get_local_rank(axis))
            last = min(last, first + share)
    return slice(first, last)


class Owners:
    """The modules that register each parameter of a model, and under which name."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            named = module.named_parameters(recurse=False, remove_duplicate=False)
            for attribute, parameter in named:
                self._places.setdefault(id(parameter), []).append((module, attribute))

    def replace(self, parameter: nn.Parameter, new: nn.Parameter) -> None:
        """Register `new` wherever `parameter` is."""
        for module, attribute in self._places[id(parameter)]:
            setattr(module, attribute, new)


def materialise(parameter: nn.Parameter, owners: Owners) -> nn.Parameter:
    """A parameter with memory, not yet filled, in the place of one on the meta device.

    A plain one lies on the CPU, the local rows of a sharded one on its mesh's device. Engines that
    shard take over what modules hold then, as they do after `load_state_dict(assign=True)`.
    """
    local = local_part(parameter)
    sharded = isinstance(parameter, DTensor)
    device = parameter.device_mesh.device_type if sharded else "cpu"
    filled: Tensor = torch.empty(local.shape, dtype=local.dtype, device=device)
    if sharded:
        filled = DTensor.from_local(
            filled,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    new = nn.Parameter(filled, requires_grad=parameter.requires_grad)
    owners.replace(parameter, new)
    return new

"""A model's parameters by their canonical names, and the rows of each that this rank holds."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

# What wrappers put into names: checkpoint_wrapper, FSDP1, torch.compile.
_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod)\.")


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the names they have in a bare Llama, a tied one once.

    Units that a sharding engine left unsharded after a forward are resharded first, so that what
    is read or written is what the optimizer steps. ValueError for parameters still on meta.
    """
    for module in model.modules():
        reshard = getattr(module, "reshard", None)  # FSDP2's method; any engine that has it
        if callable(reshard):
            reshard()
    parameters = {_WRAPPERS.sub("", name): p for name, p in model.named_parameters()}
    on_meta = [name for name, parameter in parameters.items() if parameter.is_meta]
    if on_meta:
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


def full_copy(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The whole parameter as a plain tensor in `dtype`, gathered if sharded: all ranks call it.

    Rows are cast before they travel. It may share memory with the parameter.
    """
    local = local_part(parameter).detach().to(dtype or parameter.dtype)
    if not isinstance(parameter, DTensor):
        return local
    mesh = parameter.device_mesh
    # Offloaded rows lie on the CPU, where a mesh of GPUs cannot gather them.
    sharded = DTensor.from_local(
        local.to(mesh.device_type),
        mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return sharded.full_tensor()

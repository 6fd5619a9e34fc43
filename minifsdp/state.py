"""The whole state of a sharded model in and out, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


def full_state_dict(model: nn.Module, rank0_only: bool = True) -> dict[str, torch.Tensor]:
    """`model.state_dict()` with whole tensors in host memory; every rank calls it.

    One tensor is gathered at a time, so no rank holds more than its shard, one whole tensor and, if
    it keeps them, the copies. With `rank0_only` other ranks get an empty dict. Names that share a
    tensor (tied weights) share its copy.
    """
    keeps = not rank0_only or dist.get_rank() == 0
    result: dict[str, torch.Tensor] = {}
    copies: dict[int, torch.Tensor] = {}  # by identity: a state dict lists tied weights twice
    sources = model.state_dict(keep_vars=True)
    for name, tensor in sources.items():
        if not isinstance(tensor, torch.Tensor):
            if keeps:
                result[name] = tensor
            continue
        if id(tensor) not in copies:
            whole = _gather(tensor.detach())
            copies[id(tensor)] = whole.to("cpu", copy=True) if keeps else whole.new_empty(0)
        if keeps:
            result[name] = copies[id(tensor)]
    return result


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to(tensor.device_mesh.device_type).full_tensor()


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, torch.Tensor] | None) -> None:
    """Fill `model` from whole tensors; every rank calls it.

    If every rank brings the state, each keeps its rows of it and nothing travels. If rank 0 alone
    does (others pass None or an empty dict), it sends each rank its rows, one tensor at a time.
    Raises ValueError on every rank, before anything is changed, for missing or unknown names and
    for shapes that differ.
    """
    targets = model.state_dict(keep_vars=True)
    mine = None if not state_dict else {n: tuple(t.shape) for n, t in state_dict.items()}
    brought: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(brought, mine)
    if brought[0] is None:
        raise ValueError("rank 0 has no state to load: it must pass the whole state dict")
    _check(brought[0], {name: tuple(t.shape) for name, t in targets.items()})
    everywhere = all(shapes == brought[0] for shapes in brought)
    if not everywhere and any(shapes is not None for shapes in brought[1:]):
        raise ValueError("ranks bring different states: pass the whole one on rank 0, or on all")
    done: set[int] = set()
    with torch.no_grad():
        for name, target in targets.items():
            if id(target) in done:
                continue
            done.add(id(target))
            source = state_dict[name] if state_dict else None
            if isinstance(target, DTensor):
                _fill_rows(target, source, everywhere)
            else:
                _fill_whole(target, source, everywhere)


def _check(brought: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> None:
    problems = [f"{name}: missing from the state" for name in wanted if name not in brought]
    problems += [f"{name}: not in the model" for name in brought if name not in wanted]
    problems += [
        f"{name}: {brought[name]} in the state, {shape} in the model"
        for name, shape in wanted.items()
        if brought.get(name, shape) != shape
    ]
    if problems:
        raise ValueError("the state does not fit the model: " + "; ".join(problems))


def _fill_rows(target: DTensor, source: torch.Tensor | None, everywhere: bool) -> None:
    mesh, local = target.device_mesh, target.detach().to_local()
    if source is None:
        source = torch.empty(target.shape, dtype=target.dtype, device=mesh.device_type)
    source = source.detach().to(dtype=target.dtype, device=mesh.device_type)
    sender = None if everywhere else 0
    rows = distribute_tensor(source, mesh, target.placements, src_data_rank=sender)
    local.copy_(rows.to_local())


def _fill_whole(target: torch.Tensor, source: torch.Tensor | None, everywhere: bool) -> None:
    if everywhere:
        target.copy_(source)
        return
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    whole = (
        target.detach().to(device, copy=True) if source is None else source.to(target).to(device)
    )
    dist.broadcast(whole, src=0)
    target.copy_(whole)

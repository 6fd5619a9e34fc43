"""Clipping by the norm of all gradients, sharded ones included."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def _local_norms(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """One norm a tensor; empty tensors count for nothing, where torch's norms may raise."""
    nothing = float("inf") if norm_type == float("-inf") else 0.0
    norms = [t.new_full((), nothing) for t in tensors]
    filled = [i for i, t in enumerate(tensors) if t.numel()]
    if filled:
        measured = torch._foreach_norm([tensors[i] for i in filled], norm_type)
        for i, norm in zip(filled, measured, strict=True):
            norms[i] = norm
    return torch.stack(norms)


def _over_ranks(norms: torch.Tensor, norm_type: float, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    """Norms of whole gradients from the norms of their rows, by one all-reduce along `axis`."""
    group = mesh.get_group(axis)
    if norm_type in (float("inf"), float("-inf")):
        op = dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN
        dist.all_reduce(norms, op=op, group=group)
        return norms
    powers = norms**norm_type
    dist.all_reduce(powers, group=group)
    return powers ** (1.0 / norm_type)


_STEPPED = "_minifsdp_stepped_in_backward"  # on parameters whose gradients nobody sees


def refuse_clipping(params: Iterable[torch.Tensor]) -> None:
    """Have `clip_grad_norm_` refuse `params`, because backward steps on their gradients."""
    for param in params:
        setattr(param, _STEPPED, True)


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` over sharded parameters, right on ranks without rows too.

    All ranks call it. Scales gradients in place so that their total norm is at most `max_norm`;
    returns the norm from before, a 0-d tensor, the same on all ranks. Replicas are counted once.
    Raises RuntimeError if `error_if_nonfinite` and the norm is not finite, and for parameters that
    `step_in_backward` steps in backward.
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if any(hasattr(param, _STEPPED) for param in params):
        raise RuntimeError(
            "these parameters are stepped on in backward, before there is a norm to clip by: use "
            "step_in_backward(model, make_optimizer, max_norm=...)"
        )
    grads = [p.grad for p in params if p.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    norm_type = float(norm_type)
    groups: dict[tuple[object, ...], list[torch.Tensor]] = {}
    for grad in grads:
        if isinstance(grad, DTensor):
            axes = tuple(i for i, p in enumerate(grad.placements) if p.is_shard())
            key = (grad.device_mesh, axes, grad.device, grad.dtype)
            groups.setdefault(key, []).append(grad.to_local())
        else:
            groups.setdefault((None, (), grad.device, grad.dtype), []).append(grad)
    totals = []
    for (mesh, axes, *_), locals_ in groups.items():
        norms = _local_norms(locals_, norm_type)
        for axis in axes:
            norms = _over_ranks(norms, norm_type, mesh, axis)
        totals.append(torch.linalg.vector_norm(norms, norm_type))
    total = totals[0]
    if len(totals) > 1:
        total = torch.linalg.vector_norm(
            torch.stack([t.to(total.device) for t in totals]), norm_type
        )
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the gradients' norm of order {norm_type} is {total.item()} and cannot be clipped by; "
            "pass error_if_nonfinite=False to scale them by it all the same"
        )
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for locals_ in groups.values():
        torch._foreach_mul_(locals_, coefficient.to(locals_[0].device))
    return total

"""What a user can ask of a unit besides its mesh: precision and offloading.

Frozen dataclasses only. Fields and meaning are those of `torch.distributed.fsdp`'s policies, whose
objects are accepted too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch.distributed import fsdp as upstream


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Precision of a unit's computation and of its gradient reduction."""

    param_dtype: torch.dtype | None = None
    """Dtype of unsharded parameters, so of all-gather and computation; None: as they are."""
    reduce_dtype: torch.dtype | None = None
    """Dtype of gradients while they are reduced or accumulated unsynced; None: as computed."""
    output_dtype: torch.dtype | None = None
    """Floating-point outputs of the unit's forward are cast to it; None: left alone."""
    cast_forward_inputs: bool = True
    """Cast floating-point inputs of the unit's forward to `param_dtype`."""


@dataclass(frozen=True)
class OffloadPolicy:
    """Keep shards, gradients and optimizer state on the device: no offloading."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards, gradients and so optimizer state in host memory."""

    pin_memory: bool = True
    """Page-lock the host buffers, for faster copies. Without an accelerator it means nothing."""


def as_mixed_precision(policy: object) -> MixedPrecisionPolicy:
    """`policy` as ours, if it is ours or upstream's. Raises ValueError for anything else."""
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if isinstance(policy, upstream.MixedPrecisionPolicy):
        values = {f.name: getattr(policy, f.name) for f in fields(MixedPrecisionPolicy)}
        return MixedPrecisionPolicy(**values)
    raise ValueError(f"mp_policy must be a MixedPrecisionPolicy, not {policy!r}")


def as_offload(policy: object) -> OffloadPolicy:
    """`policy` as ours, if it is ours or upstream's. Raises ValueError for anything else."""
    if isinstance(policy, OffloadPolicy):
        return policy
    if isinstance(policy, upstream.CPUOffloadPolicy):
        return CPUOffloadPolicy(pin_memory=policy.pin_memory)
    if isinstance(policy, upstream.OffloadPolicy):
        return OffloadPolicy()
    raise ValueError(f"offload_policy must be an OffloadPolicy, not {policy!r}")

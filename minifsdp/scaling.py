"""How a sum of gradients becomes their mean without overflow."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Scaling(NamedTuple):
    """What happens to a gradient message before, during and after it is reduced."""

    divide_before: float = 1.0
    multiply_before: float = 1.0
    average_shards: bool = False
    average_replicas: bool = False
    divide_after: float = 1.0


def scaling(
    dtype: torch.dtype,
    shards: int,
    replicas: int,
    factor: float | None = None,
    force_sum: bool = False,
) -> Scaling:
    """The scaling for messages of `dtype` over `shards` x `replicas` ranks.

    fp32 and bf16 cannot overflow, so they are averaged as they are reduced. Others are divided by
    about the square root of the divisor before, and by the rest after. `factor` replaces the number
    of ranks as the divisor; `force_sum` reduces by sums only. Source: upstream's
    `_get_gradient_divide_factors`; at one rank, where it divides twice by `factor`, we divide once.
    """
    roomy = dtype in (torch.float32, torch.bfloat16)
    if roomy and not force_sum:
        if factor is None:
            return Scaling(average_shards=shards > 1, average_replicas=replicas > 1)
        if factor == shards:
            return Scaling(average_shards=shards > 1)
        return Scaling(divide_after=factor) if shards == 1 else Scaling(multiply_before=1 / factor)
    divisor = float(shards * replicas) if factor is None else float(factor)
    if roomy:
        return Scaling(divide_after=divisor)
    before = 1.0
    while divisor % before == 0 and divisor / before > before:
        before *= 2
    return Scaling(divide_before=before, divide_after=divisor / before)

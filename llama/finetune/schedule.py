"""The learning rate of every optimizer step: a linear warm-up, then one of three curves."""

import math
from collections.abc import Callable

# How much of the way from `lr` to `min_lr` is still to go, by the share of the curve that is done.
CURVES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "linear": lambda done: 1.0 - done,
    "constant": lambda done: 1.0,
}


def lr_at(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int,
    lr: float,
    min_lr: float = 0.0,
    curve: str = "cosine",
) -> float:
    """The learning rate of optimizer step `step`, counted from 0.

    It rises in equal parts, the first step's already above 0, to `lr` at step `warmup_steps`, and
    from there falls on a cosine (SGDR without restarts: Loshchilov and Hutter, arXiv:1608.03983)
    or a line that would reach `min_lr` at step `total_steps`, one after the last, or stays there
    ("constant"). Raises ValueError for numbers that describe no such curve.
    """
    if step < 0:
        raise ValueError(f"step {step} is negative: steps count from 0")
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"warmup_steps ({warmup_steps}) must be 0 or more and below total_steps ({total_steps})"
        )
    if not 0 <= min_lr <= lr:
        raise ValueError(f"min_lr ({min_lr}) must be 0 or more and at most lr ({lr})")
    if curve not in CURVES:
        raise ValueError(f"unknown curve {curve!r}; there are {', '.join(CURVES)}")
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    return min_lr + (lr - min_lr) * CURVES[curve](done)

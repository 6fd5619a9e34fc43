"""How the engines that are compared are to train; the same for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Settings:
    """What `compare` and the command line take besides model, batch and engines.

    Raises ValueError for a value that cannot be.
    """

    steps: int = 5
    dtype: torch.dtype | str | None = None
    """Of parameters while they compute (`param_dtype` of mixed precision); None: as built."""
    reduce_dtype: torch.dtype | str | None = None
    """Of gradients while they are summed over ranks; None: as computed."""
    accumulate: int = 1
    """Micro-batches a step; gradients are reduced after the last."""
    clip: float | None = None
    """Norm to clip to; None: no clipping."""
    offload: bool = False
    """Keep rows, gradients and optimizer on the host, where the engine can."""
    lr: float = 1e-2
    optimizer: str | Callable[[Any], torch.optim.Optimizer] = "adamw"
    """ "adamw" or "sgd" (momentum 0.9), neither fused; or a function from parameters to one."""
    loss: str | Callable[[Any, Any], torch.Tensor] | None = None
    """`loss(output, batch)`; None where the model returns the loss."""
    units: str | Callable[[Any], Any] | None = None
    """Which modules are units: a glob of names, or a function from the model; see `units`."""
    seed: int = 0
    device: str = "cpu"
    rounding: bool = False
    """Allow every engine what rounding explains, those too of which equal bits are expected."""
    timeout_seconds: float = 300.0
    """How long a rank may go without progress before launched ranks are ended."""

    def __post_init__(self) -> None:
        for name in ("dtype", "reduce_dtype"):
            object.__setattr__(self, name, _dtype(getattr(self, name), name))
        for name, least in (("steps", 1), ("accumulate", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}: give a whole number of at least {least}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip is {self.clip}: give a norm above 0, or leave it out")
        if not self.timeout_seconds > 0:
            raise ValueError(f"timeout is {self.timeout_seconds}: give seconds above 0")
        if not callable(self.optimizer) and self.optimizer not in ("adamw", "sgd"):
            raise ValueError(
                f"optimizer is {self.optimizer!r}: give adamw, sgd or a function of parameters"
            )
        if str(self.device).partition(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device!r}: give cpu or cuda")

    @classmethod
    def of(cls, **given: Any) -> Settings:
        """From keywords. Raises ValueError for one that is none."""
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(f"compare has no setting {name!r}; it has {', '.join(known)}")
        return cls(**given)

    def make_optimizer(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Not fused: fused AdamW rounds a flat parameter otherwise than its rows on their own."""
        if callable(self.optimizer):
            return self.optimizer(params)
        if self.optimizer == "sgd":
            return torch.optim.SGD(params, lr=self.lr, momentum=0.9)
        return torch.optim.AdamW(params, lr=self.lr, fused=False)


def _dtype(given: torch.dtype | str | None, name: str) -> torch.dtype | None:
    if isinstance(given, str):
        if given not in DTYPES:
            raise ValueError(f"{name} is {given!r}: give one of {', '.join(DTYPES)}")
        return DTYPES[given]
    return given

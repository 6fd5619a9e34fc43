"""The processes of a run: how they find one another, and how all of them end where one must."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def connect() -> None:
    """Join torchrun's process group, or make one of this process alone, which needs no port."""
    # gloo as well on GPUs: for what lies on the CPU, such as offloaded parameters.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def everywhere(work: Callable[[], T]) -> T:
    """Do `work` on every rank; if any has bad input, rank 0 says which and all exit with 2."""
    result, error = None, None
    try:
        result = work()
    except (ValueError, OSError) as reason:
        error = str(reason)
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    if not any(errors):
        return result
    leave(2, next(filter(None, errors)))


def leave(code: int, message: str) -> NoReturn:
    """End every rank with `code`, rank 0 saying why; all ranks call it."""
    if dist.get_rank() == 0:
        print(f"train.py: error: {message}", file=sys.stderr, flush=True)
    # torchrun ends the others as soon as one leaves.
    dist.all_gather_object([None] * dist.get_world_size(), None)
    sys.exit(code)

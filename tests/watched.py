"""Ranks that come to harm under a watchdog: what tests/test_watchdog.py starts.

Each function is what one rank does between entering and leaving; `happen` marks when it came to
harm. As a script, for torchrun, it runs the one it is told to.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import minifsdp
from llama.finetune.processes import connect
from minifsdp.collectives import use_collectives
from minifsdp.watchdog import Watchdog

TIMEOUT = 2.0
LONG = 60.0  # seconds that no test waits for


def rank() -> int:
    return int(os.environ["RANK"])


def happen() -> None:
    """Note the time at which this rank comes to harm."""
    Path(os.environ["STAMP"]).write_text(str(time.monotonic()))


def hang() -> None:
    happen()
    time.sleep(LONG)


def freeze() -> None:
    time.sleep(0.5)  # so that others have heard where
    happen()
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    time.sleep(0.5)
    happen()
    os.kill(os.getpid(), signal.SIGKILL)


class Block(nn.Module):
    """A linear layer whose forward and backward call what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.in_forward: Callable[[], None] = lambda: None
        self.in_backward: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.in_forward()
        x = self.linear(x)
        x.register_hook(lambda grad: self.in_backward())
        return torch.tanh(x)


class Net(nn.Module):
    """Four blocks, of which one can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.left_out = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x) if index != self.left_out else x
        return x


def train(watchdog: Watchdog, harm: Callable[[Net], None], steps: int = 4) -> None:
    """Train, the last rank coming to `harm` before step 2."""
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        minifsdp.fully_shard(block)
    minifsdp.fully_shard(model)
    for step in range(1, steps + 1):
        watchdog.at(step, "training")
        if step == 2 and rank() == dist.get_world_size() - 1:
            harm(model)
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()
        watchdog.at(step, "optimizer")


# ---- Harm -----------------------------------------------------------------------------------


def hangs_in_forward(watchdog: Watchdog) -> None:
    train(watchdog, lambda model: setattr(model.blocks[1], "in_forward", hang))


def hangs_in_backward(watchdog: Watchdog) -> None:
    train(watchdog, lambda model: setattr(model.blocks[2], "in_backward", hang))


def freezes(watchdog: Watchdog) -> None:
    train(watchdog, lambda model: setattr(model.blocks[1], "in_forward", freeze))


def dies(watchdog: Watchdog) -> None:
    """The others are in a call that does not notice, as those of a device are."""
    watchdog.at(3, "training")
    if rank() == 2:
        die()
    time.sleep(LONG)


def hang_in_data(watchdog: Watchdog) -> None:
    """All but one; see tests/stage_watched.py: once one has ended, it kills the others."""
    watchdog.at(1, "reading data")
    if rank() > 0:
        hang()
    watchdog.at(1, "training")
    dist.barrier()


def leaves_out_a_unit(watchdog: Watchdog) -> None:
    def harm(model: Net) -> None:
        happen()
        model.left_out = 2

    train(watchdog, harm)


def waits_for_each_other(watchdog: Watchdog) -> None:
    watchdog.at(5, "evaluating", patience_seconds=TIMEOUT)
    happen()
    dist.recv(torch.zeros(1), src=1 - rank())


def raises(watchdog: Watchdog) -> None:
    watchdog.at(3, "training")
    if rank() == 1:
        happen()
        raise ValueError("no such example")
    time.sleep(LONG)


def comes_late(watchdog: Watchdog) -> None:
    """See `run`: the last rank sleeps before it enters, and then finds the others gone."""
    watchdog.at(1, "training")
    time.sleep(LONG)


def loses_the_store(watchdog: Watchdog) -> None:
    """Rank 0 keeps it, and dies."""
    watchdog.at(3, "training")
    if rank() == 0:
        die()
    time.sleep(LONG)


def store_freezes(watchdog: Watchdog) -> None:
    """See tests/stage_watched.py: it does once this has happened."""
    watchdog.at(3, "training")
    dist.barrier()  # all have entered
    if rank() == 0:
        happen()
    time.sleep(LONG)


def hangs_in_the_first_start(watchdog: Watchdog) -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        hangs_in_forward(watchdog)
    else:
        train(watchdog, lambda model: None)
        print("trained", flush=True)


# ---- No harm --------------------------------------------------------------------------------


def saves_for_long(watchdog: Watchdog) -> None:
    watchdog.at(2, "saving", patience_seconds=math.inf)
    if rank() == 0:
        time.sleep(2 * TIMEOUT)
    else:
        watchdog.at(2, "waiting")
    dist.barrier()


def all_load_for_long(watchdog: Watchdog) -> None:
    watchdog.at(None, "loading")
    time.sleep(2 * TIMEOUT)
    if rank() == 0:
        time.sleep(0.5)
    watchdog.at(1, "training")
    dist.barrier()


def moves_slowly(watchdog: Watchdog) -> None:
    """One rank is late by most of what is allowed, again and again, and between units too."""

    def harm(model: Net) -> None:
        model.blocks[0].in_forward = model.blocks[3].in_forward = lambda: time.sleep(0.6 * TIMEOUT)

    train(watchdog, harm)


def leaves_early(watchdog: Watchdog) -> None:
    """One rank is done long before the other, which goes on alone."""
    watchdog.at(1, "training")
    if rank() == 0:
        for step in range(2, 6):
            watchdog.at(step, "summing up")
            time.sleep(TIMEOUT / 2)


def machine_sleeps(watchdog: Watchdog) -> None:
    """See tests/stage_watched.py: all processes are stopped for some time."""
    watchdog.at(1, "training")
    dist.barrier()
    if rank() == 0:
        happen()
    for step in range(2, 5):
        watchdog.at(step, "training")
        time.sleep(0.5 * (1 + rank()))
        dist.barrier()


# ---- One rank -------------------------------------------------------------------------------


def run(name: str) -> None:
    """What one rank does."""
    use_collectives(os.environ.get("COLLECTIVES", "auto"))
    connect()
    if name == "hang_in_data":  # so that one finds out before the others
        time.sleep(0.06 * rank())
    if name == "comes_late" and rank() == 1:
        happen()
        time.sleep(1.5 * TIMEOUT)
    with Watchdog(TIMEOUT) as watchdog:
        globals()[name](watchdog)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(sys.argv[1])

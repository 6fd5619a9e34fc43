"""Functions run on real ranks: processes in a gloo group, forked from this one.

Forked and not spawned: torch is imported once for all of them. So this process must not have run
torch's autograd or a process group before, whose threads a fork leaves behind.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

_LIMIT_SECONDS = 120.0  # for all jobs of one number of ranks
_kept: Path | None = None


class Job(NamedTuple):
    """A function of a module, by name, and on how many ranks it runs."""

    module: str
    function: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.module}.{self.function}"


class Played(NamedTuple):
    """What one rank printed and returned."""

    printed: str
    returned: Any


def on(ranks: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say on how many ranks a function of the guide runs."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function.ranks = ranks
        return function

    return mark


def kept_folder() -> Path:
    """A folder that all jobs and what is drawn from them share: jobs of fewer ranks come first."""
    global _kept
    if _kept is None:
        folder = tempfile.mkdtemp(prefix="minifsdp-guide-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _kept = Path(folder)
    return _kept


def play(jobs: Sequence[Job]) -> dict[Job, list[Played]]:
    """Run every job once, each rank's outcome in order. Raises RuntimeError for one that fails."""
    kept_folder()  # before ranks are forked
    outcomes: dict[Job, list[Played]] = {}
    for world_size in sorted({job.ranks for job in jobs}):
        together = list(dict.fromkeys(job for job in jobs if job.ranks == world_size))
        for job, played in zip(together, _play(together, world_size), strict=True):
            outcomes[job] = played
    return outcomes


def _play(jobs: list[Job], world_size: int) -> list[list[Played]]:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            args = (rank, world_size, folder, jobs, there)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            return _collect(jobs, pipes)
        except _Died as died:
            words = Path(folder, f"rank{died.rank}").read_text(errors="replace")
            raise RuntimeError(f"{died}\n{words[-2000:]}") from None
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


class _Died(Exception):
    def __init__(self, what: str, rank: int) -> None:
        super().__init__(what)
        self.rank = rank


def _collect(jobs: list[Job], pipes: list[Connection]) -> list[list[Played]]:
    deadline = time.monotonic() + _LIMIT_SECONDS
    outcomes = []
    for job in jobs:
        played = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"{job}: rank {rank} does not answer")
            try:
                error, outcome = pipe.recv()
            except EOFError:
                raise _Died(f"{job}: the process of rank {rank} died", rank) from None
            if error:
                raise RuntimeError(f"{job} failed on rank {rank}:\n{error}")
            played.append(outcome)
        outcomes.append(played)
    return outcomes


def _serve(rank: int, world_size: int, folder: str, jobs: list[Job], pipe: Connection) -> None:
    """A rank: joins the group and runs the jobs in turn. What C++ says goes into a file."""
    said = os.open(os.path.join(folder, f"rank{rank}"), os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(said, 1)
    os.dup2(said, 2)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    rendezvous = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    from minifsdp.collectives import use_collectives

    for job in jobs:
        printed = io.StringIO()
        try:
            function = getattr(importlib.import_module(job.module), job.function)
            with contextlib.redirect_stdout(printed):
                returned = function()
            pipe.send(("", Played(printed.getvalue(), returned)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
            return
        use_collectives("auto")
    dist.barrier()
    pipe.close()

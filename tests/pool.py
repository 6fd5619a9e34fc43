"""Worker processes in a real gloo group, which run functions that they are sent by name."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["minifsdp.checkpoint", "llama.finetune.job", "torch.distributed.fsdp"]
)
_GRACE_SECONDS = 10.0  # for other ranks to answer once one has failed


def _serve(rank: int, world_size: int, store: str, pipe: Any) -> None:
    """A worker: joins the group, then runs the functions it is sent until told to stop."""
    os.environ.update(OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(world_size))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    from minifsdp.collectives import use_collectives

    while (message := pipe.recv()) is not None:
        module, name, args = message
        try:
            result = getattr(importlib.import_module(module), name)(*args)
            answer = ("ok", result)
        except BaseException:
            answer = ("error", traceback.format_exc())
        use_collectives("auto")
        gc.collect()
        pipe.send(answer)
    dist.destroy_process_group()


class RanksFailed(AssertionError):
    """A rank raised, died or did not answer; its traceback, where there is one."""


class Pool:
    """`world_size` processes in one gloo group, forked from one that has imported torch."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._pipes, self.processes = [], []
        for rank in range(world_size):
            here, there = SERVER.Pipe()
            args = (rank, world_size, store, there)
            process = SERVER.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """What `function(*args)` returns on each rank; fails with the first rank's traceback."""
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__qualname__, args))
        answers: dict[int, Any] = {}
        failed: str | None = None
        deadline = time.monotonic() + timeout
        while len(answers) < self.world_size and time.monotonic() < deadline:
            for rank, pipe in enumerate(self._pipes):
                if rank in answers or not pipe.poll(0.002):
                    continue
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    kind, value = "error", "the process died"
                answers[rank] = value
                if kind == "error" and failed is None:
                    failed = f"rank {rank} of {self.world_size}: {value}"
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if len(answers) < self.world_size:
            missing = sorted(set(range(self.world_size)) - set(answers))
            self.stop()
            raise RanksFailed(f"no answer from ranks {missing}; {failed or 'no rank failed'}")
        if failed:
            self.stop()  # its group may be out of step
            raise RanksFailed(failed)
        return [answers[rank] for rank in range(self.world_size)]

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._folder.cleanup()

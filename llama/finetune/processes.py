"""The processes of a run: how they find one another, and how all of them end where one must."""

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

T = TypeVar("T")


def connect() -> None:
    """Join torchrun's process group, or make one of this process alone, which needs no port."""
    # gloo as well on GPUs: for what lies on the CPU, such as offloaded parameters.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "WORLD_SIZE" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    store, rank, world_size = next(rendezvous("env://"))
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared:
        # torchrun keeps one store over all its starts, and in it the addresses of processes that
        # have died: those of this start go under a name of their own (pytorch#135712).
        starts = _agree_on_start(store, rank, world_size)
        store = dist.PrefixStore(f"start-{starts}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    if shared:
        before = starts - 1
    else:
        counts = torch.tensor(restarts())
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        before = int(counts)
    # Several torchruns count each their own: one whose ranks only followed others' counts nothing.
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(before)


def _agree_on_start(store: dist.Store, rank: int, world_size: int) -> int:
    """Count the starts of ranks that used `store`, this one included; all get the same number.

    Rank 0 counts it and answers whoever asks. What dead ranks of starts before asked is still in
    the store: each asks under a name of its own, and rank 0 answers until all have confirmed.
    """
    mine = secrets.token_hex(8)
    if rank:
        store.set(f"asks/{rank}", mine)
        start = int(store.get(f"answer/{mine}"))
        store.set(f"knows/{start}/{rank}", "")
        return start
    start, answered, waiting = store.add("starts", 1), set(), set(range(1, world_size))
    deadline = time.monotonic() + store.timeout.total_seconds()
    while waiting:
        for other in sorted(waiting):
            if store.check([f"knows/{start}/{other}"]):
                waiting.remove(other)
            elif store.check([f"asks/{other}"]):
                asking = store.get(f"asks/{other}").decode()
                if asking not in answered:
                    store.set(f"answer/{asking}", str(start))
                    answered.add(asking)
        if time.monotonic() > deadline:
            raise RuntimeError(f"ranks {sorted(waiting)} did not start")
        time.sleep(0.02)
    return start


def everywhere(work: Callable[[], T], done: Callable[[], object] | None = None) -> T:
    """Do `work` on every rank; if any has bad input, rank 0 says which and all exit with 2.

    `done` is called before a rank waits for the others.
    """
    result, error = None, None
    try:
        result = work()
    except (ValueError, OSError) as reason:
        error = str(reason)
    if done is not None:
        done()
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


class Termination:
    """Notes, while it is entered, that this process was asked to end, instead of ending it.

    Schedulers send SIGTERM some time before they kill.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> "Termination":
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: Any) -> None:
        self.asked = True


def restarts() -> int:
    """How often torchrun has started these processes again; after `connect`, alike on all ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def launch() -> str | None:
    """What all starts by one torchrun have in common, and no two torchruns; None without it."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id != "none":  # what it calls all runs that were given no --rdzv-id
        return run_id
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"

"""Ranks of one comparison as processes of their own, watched until they answer."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_LOOK_SECONDS = 0.05
_START_SECONDS = 120.0  # at least, for a process to begin and to import what it needs
_GRACE_SECONDS = 2.0  # for the rank at fault to speak, once another has failed


class _Rank:
    """A process, and what it last said."""

    def __init__(self, number: int, process: Any, pipe: Any) -> None:
        self.number, self.process, self.pipe = number, process, pipe
        self.where, self.notes = "starting", 0
        self.answer: tuple[str, Any] | None = None

    def hear(self) -> bool:
        """Take in what it has said; whether that was anything."""
        heard = False
        try:
            while self.pipe.poll():
                kind, value = self.pipe.recv()
                heard = True
                if kind == "at":
                    self.where, self.notes = value, self.notes + 1
                else:
                    self.answer = (kind, value)
        except (EOFError, OSError):
            pass
        return heard


def launch(work: Callable[..., Any], args: tuple[Any, ...], world_size: int, device: str,
           timeout_seconds: float) -> Any:  # fmt: skip
    """What `work(*args, note)` returns on rank 0, of `world_size` new ranks in a process group.

    note: a function that a rank tells where it is; a rank that is silent for the timeout ends all.

    Raises ValueError if ranks cannot be given `args`, and what a rank raised as ValueError;
    RuntimeError, naming rank and place, for another exception, or a rank that dies or hangs.
    """
    check(world_size, device)
    try:
        payload = pickle.dumps((work, args))
    except Exception as error:
        raise ValueError(
            f"ranks cannot be given what to compare ({error}): functions must be at the top level "
            "of a module that can be imported, or named as package.module:name"
        ) from error
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, _without_warnings_of_torch():
        ranks = []
        try:
            for number in range(world_size):
                here, there = context.Pipe(duplex=False)
                given = (number, world_size, device, timeout_seconds, folder, payload, there)
                process = context.Process(target=_serve, args=given, daemon=True)
                process.start()
                there.close()
                ranks.append(_Rank(number, process, here))
            _wait(ranks, timeout_seconds, Path(folder))
        finally:
            for rank in ranks:
                rank.process.kill()
            for rank in ranks:
                rank.process.join()
                rank.pipe.close()
    return ranks[0].answer[1]


@contextmanager
def _without_warnings_of_torch() -> Iterator[None]:
    """For processes that begin in it; DDP warns of settings that no engine but it needs."""
    before = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TORCH_CPP_LOG_LEVEL")


def check(world_size: int, device: str) -> None:
    """Raise ValueError for ranks that there cannot be."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}: give a whole number of at least 1")
    if torch.device(device).type == "cuda" and torch.cuda.device_count() < world_size:
        raise ValueError(
            f"device cuda has {torch.cuda.device_count()} GPUs for {world_size} ranks: each rank "
            "needs one; use fewer ranks, or device cpu"
        )


def _serve(
    rank: int,
    world_size: int,
    device: str,
    timeout_seconds: float,
    folder: str,
    payload: bytes,
    pipe: Any,
) -> None:
    """A rank's whole life. Ends its process, whatever came of it."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks
    with open(os.path.join(folder, f"stack.{rank}"), "w", encoding="utf-8") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        try:
            torch.set_num_threads(1)
            on_gpu = torch.device(device).type == "cuda"
            if on_gpu:
                torch.cuda.set_device(rank)
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=4 * timeout_seconds + 60),  # the parent's comes first
            )
            work, args = pickle.loads(payload)
            result = work(*args, lambda where: pipe.send(("at", where)))
            pipe.send(("done", result if rank == 0 else None))
            dist.barrier()  # another rank may still be in its last message
        except ValueError as error:
            pipe.send(("mistake", str(error)))
        except BaseException as error:
            pipe.send(("error", (str(error) or type(error).__name__, traceback.format_exc())))
        finally:
            # Python's own end would tear groups down; threads of gloo may abort the process then.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def _wait(ranks: list[_Rank], timeout_seconds: float, folder: Path) -> None:
    """Return when all are done; raise for the first that is not going to be."""
    last = time.monotonic()
    while not all(r.answer and r.answer[0] == "done" for r in ranks):
        time.sleep(_LOOK_SECONDS)
        if any([r.hear() for r in ranks]):
            last = time.monotonic()
        if any(_has_failed(r) for r in ranks):
            _raise_failure(ranks)
        patience = timeout_seconds if all(r.notes for r in ranks) else _START_SECONDS
        if time.monotonic() - last > max(timeout_seconds, patience):
            _raise_hang(ranks, timeout_seconds, folder)


def _has_failed(rank: _Rank) -> bool:
    if rank.answer is not None:
        return rank.answer[0] != "done"
    if rank.process.is_alive():
        return False
    rank.hear()
    return rank.answer is None or rank.answer[0] != "done"


def _raise_failure(ranks: list[_Rank]) -> None:
    """For the rank whose failure explains the others': a death, a mistake, else the first error."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline and not any(_is_dead(r) for r in ranks):
        time.sleep(_LOOK_SECONDS)
        for rank in ranks:
            rank.hear()
        if any(r.answer and r.answer[0] == "mistake" for r in ranks):
            break
    for rank in ranks:
        if _is_dead(rank):
            code = rank.process.exitcode
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise RuntimeError(
                f"rank {rank.number} {how} at: {rank.where}; run that engine alone to see why"
            )
    for rank in ranks:
        if rank.answer and rank.answer[0] == "mistake":
            raise ValueError(rank.answer[1])
    failed = [r for r in ranks if r.answer and r.answer[0] == "error"]
    first = min(failed, key=lambda r: ("onnection" in r.answer[1][0], r.notes, r.number))
    message, trace = first.answer[1]
    error = RuntimeError(f"rank {first.number}: {message}")
    error.add_note(trace)
    raise error


def _is_dead(rank: _Rank) -> bool:
    """Ended without a word, and not by its own exception."""
    return not rank.process.is_alive() and not rank.hear() and rank.answer is None


def _raise_hang(ranks: list[_Rank], timeout_seconds: float, folder: Path) -> None:
    waiting = [r for r in ranks if r.answer is None]
    for rank in waiting:
        os.kill(rank.process.pid, signal.SIGUSR1)  # it writes its stack
    time.sleep(0.5)
    behind = min(r.notes for r in waiting)
    late = [r for r in waiting if r.notes == behind]
    if len(late) == len(waiting):
        who = f"ranks {_list(late)} all stand" if len(late) > 1 else f"rank {late[0].number} stands"
    else:
        who = f"rank{'s' * (len(late) > 1)} {_list(late)} lag{'s' * (len(late) == 1)} behind"
    error = RuntimeError(
        f"no progress for {timeout_seconds:g} s: {who} at: {late[0].where}; "
        + "; ".join(f"rank {r.number} in {_innermost(folder, r.number)}" for r in waiting)
    )
    error.add_note("\n".join(f"rank {r.number}\n{_stack(folder, r.number)}" for r in waiting))
    raise error


def _list(ranks: list[_Rank]) -> str:
    return ", ".join(str(r.number) for r in ranks)


def _stack(folder: Path, number: int) -> str:
    file = folder / f"stack.{number}"
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def _innermost(folder: Path, number: int) -> str:
    """The innermost call outside torch and Python's own library, else the innermost."""
    lines = [x.strip() for x in _stack(folder, number).splitlines() if x.strip().startswith("File")]
    own = [x for x in lines if "site-packages" not in x and f"{os.sep}lib{os.sep}python" not in x]
    return (own or lines or ["an unknown place"])[0].removeprefix("File ")

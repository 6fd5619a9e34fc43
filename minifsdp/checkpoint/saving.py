"""Writing a checkpoint, at once or behind the training, so that it is complete or not there."""

from __future__ import annotations

import atexit
import json
import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta

from minifsdp import events

from .folder import abandon, partial_of, path_of, prepare, publish
from .manifest import Digest, digest, write_manifest, write_synced
from .ranks import Outcome, Ranks
from .values import split

VALUES = "values.json"
_OVERHEAD_BYTES = 4096  # about what names, sizes and alignment take for one rank's rows of a tensor


class SaveError(RuntimeError):
    """A checkpoint was not written; every rank raises it, and no trace of it is left."""


def save(
    directory: str | Path,
    step: int,
    state: dict[str, Any],
    asynchronous: bool = False,
    keep_last: int | None = None,
) -> Path:
    """Save `state` as the checkpoint of `step`; every rank calls it. Returns its folder.

    state: a nested dict of tensors, DTensors and plain values, as `get_model_state_dict` and
        `get_optimizer_state_dict` of torch give it; values that are not tensors are rank 0's.
    asynchronous: return once the state is copied to host memory, and write the copy in a thread.
        There is never a second one: the next `save`, and `wait`, wait for it and raise its error.
        Call `wait` before the process group is destroyed; a process that ends waits by itself.
    keep_last: once this one is complete, delete earlier ones but for the `keep_last` - 1 latest.

    A checkpoint of the same step is replaced. Raises SaveError on every rank if any could not
    write, or if the disk has no room for it; earlier checkpoints are then as they were.
    """
    if step < 0:
        raise ValueError(f"step {step} is negative: steps count from 0")
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last {keep_last} keeps nothing: give 1 or more")
    wait()
    ranks, final = Ranks(), path_of(Path(os.path.abspath(directory)), step)
    tensors, values = split(state)
    needed_bytes = _needed_bytes(tensors, ranks.size)
    _agree(
        ranks.outcomes(lambda: prepare(final, needed_bytes) if ranks.rank == 0 else None),
        f"cannot prepare checkpoint {final}",
    )
    saving = _Saving(final, step, keep_last, tensors, values, ranks)
    if asynchronous:
        _start(saving._replace(tensors=_copied_to_host(tensors), ranks=Ranks(behind=True)))
    else:
        _write(saving)
    return final


def wait() -> None:
    """Wait for an asynchronous `save`, if one is going on, and raise its error if it failed."""
    global _pending
    if _pending is None:
        return
    _pending.join()
    error, _pending = _pending.error, None
    if error is not None:
        raise error


class _Saving(NamedTuple):
    """One checkpoint to be written."""

    final: Path
    step: int
    keep_last: int | None
    tensors: dict[str, torch.Tensor]
    values: Any
    ranks: Ranks


class _Writer(FileSystemWriter):
    """torch's writer, whose errors tell the cause: a full disk, not a file that ends too early."""

    def storage_meta(self) -> StorageMeta:
        """Without the path of the folder: it is renamed, and would be an object of its own."""
        return StorageMeta()

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's rows, and wait until they are on the disk."""
        try:
            written = super().write_data(plan, planner)
            if events.listeners and threading.current_thread() is threading.main_thread():
                events.emit("written", "checkpoint")
            return written
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise OSError(str(cause or error).partition("\n")[0]) from None


def _write(saving: _Saving) -> None:
    """Write a checkpoint and publish it (see [Note: what is a checkpoint])."""
    final, ranks = saving.final, saving.ranks
    partial, failure = partial_of(final), f"cannot write checkpoint {final}"

    def own_files() -> dict[str, Digest]:
        paths = partial.glob(f"__{ranks.rank}_*")
        files = {path.name: digest(path) for path in paths}
        if ranks.rank == 0:
            write_synced(partial / VALUES, json.dumps(saving.values, allow_nan=False) + "\n")
            files |= {name: digest(partial / name) for name in (VALUES, ".metadata")}
        return files

    def complete() -> None:
        if ranks.rank == 0:
            files = {name: file for mine in written for name, file in mine.items()}
            about = {"step": saving.step, "world_size": ranks.size, "torch": torch.__version__}
            write_manifest(partial, files, **about)
            publish(final, saving.keep_last)

    try:
        try:
            dcp.save(
                dict(saving.tensors),
                storage_writer=_Writer(str(partial)),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
        except CheckpointException as error:
            raise SaveError(f"{failure}: {failed_rank(error)}") from None
        written = _agree(ranks.outcomes(own_files), failure)
        _agree(ranks.outcomes(complete), failure)
    except SaveError:
        if ranks.rank == 0:
            abandon(final)
        raise


def _agree(outcomes: list[Outcome], failure: str) -> list[Any]:
    """The results of all ranks, or the same SaveError on each."""
    for rank, (error, _) in enumerate(outcomes):
        if error is not None:
            raise SaveError(f"{failure}: rank {rank}: {error}")
    return [result for _, result in outcomes]


def failed_rank(error: CheckpointException) -> str:
    """The first line of what the lowest of the failed ranks met."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {str(cause).partition(chr(10))[0]}"


def _needed_bytes(tensors: dict[str, torch.Tensor], world_size: int) -> int:
    """What a checkpoint of whole `tensors` takes on the disk, a little more than less."""
    # FSDP1's ShardedTensor, too, knows these two.
    content = sum(tensor.size().numel() * tensor.dtype.itemsize for tensor in tensors.values())
    return content + (len(tensors) + 1) * world_size * _OVERHEAD_BYTES


# ---- Behind the training --------------------------------------------------------------------


class _Thread(threading.Thread):
    """Writes one checkpoint; no daemon, so that Python does not end before it does."""

    def __init__(self, saving: _Saving) -> None:
        super().__init__(name="minifsdp-checkpoint")
        self._saving: _Saving | None = saving
        self.error: BaseException | None = None

    def run(self) -> None:
        """Keep the error for whoever waits."""
        try:
            _write(self._saving)
        except BaseException as error:
            self.error = error
        self._saving = None  # the copy


_pending: _Thread | None = None
atexit.register(wait)  # an error that nobody waited for is shown at the end


def _start(saving: _Saving) -> None:
    global _pending
    thread = _Thread(saving)
    thread.start()
    _pending = thread


def _copied_to_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies that later steps do not change, DTensors with the rows that they have here."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

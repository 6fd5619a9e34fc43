"""Sharded checkpoints on `torch.distributed.checkpoint`: each rank writes and reads its own rows.

A run's checkpoints are the folders `step-00000042` of one directory. A folder has that name only
when it is complete: ranks write to a hidden neighbour, which is renamed once all have finished, so
a run that dies while saving leaves nothing that `latest` would find.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

_COMPLETE = re.compile(r"step-(\d{8,})")


def save(directory: str | Path, step: int, state: dict[str, Any], keep: int | None = None) -> Path:
    """Save `state` as the checkpoint of `step`; every rank calls it. Returns its folder.

    `state` is a nested dict of tensors, DTensors and plain values, as `get_model_state_dict` and
    `get_optimizer_state_dict` of torch give it. A checkpoint of the same step is replaced. With
    `keep`, once this one is complete, those of earlier steps are deleted but for the `keep` - 1
    latest. Raises RuntimeError on every rank if any rank could not write.
    """
    directory = Path(directory)
    final = directory / f"step-{step:08d}"
    partial = directory / f".partial-{final.name}"

    def prepare() -> None:
        for leftover in (partial, *directory.glob(".replaced-*")):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)

    def publish() -> None:
        replaced = [_hide(final)] if final.exists() else []
        os.rename(partial, final)
        if keep is not None:
            earlier = [path for path in _complete_in(directory) if step_of(path) < step]
            replaced += [_hide(path) for path in earlier[: max(0, len(earlier) - (keep - 1))]]
        for path in replaced:
            shutil.rmtree(path, ignore_errors=True)

    _on_first_rank(prepare, f"cannot prepare checkpoint {final}")
    try:
        dcp.save(state, checkpoint_id=partial, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise RuntimeError(f"cannot write checkpoint {final}: {_reason(error)}") from None
    _on_first_rank(publish, f"cannot complete checkpoint {final}")
    return final


def load(directory: str | Path, state: dict[str, Any]) -> Path:
    """Load a checkpoint into `state`, tensors in place; every rank calls it. Returns its folder.

    `directory` is a checkpoint, or the directory of a run's checkpoints: then the latest is read.
    The world size may differ from the one that saved. Raises FileNotFoundError where there is no
    complete checkpoint, and ValueError, on every rank, where it is damaged or, before anything is
    read, where it holds other tensors or shapes than `state`.
    """
    path = Path(directory)
    if not _is_complete(path):
        found = latest(path)
        if found is None:
            raise FileNotFoundError(
                f"{path} holds no complete checkpoint (a folder 'step-NNNNNNNN')"
            )
        path = found
    remedy = "delete that folder to go on from the checkpoint before it, if there is one"
    saved, damage = {}, None
    try:
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # whatever unpickling makes of other bytes
        damage = f"its .metadata is unreadable: {type(error).__name__}"
    if damage := _first_of_any_rank(damage):
        raise ValueError(f"checkpoint {path} is damaged ({damage}): {remedy}")
    saved_shapes = {name: tuple(m.size) for name, m in saved.items() if hasattr(m, "size")}
    shapes = {name: tuple(tensor.shape) for name, tensor in _tensors(state)}
    wrong = [
        f"{name}: {saved_shapes.get(name, 'absent')} there, {shapes.get(name, 'absent')} here"
        for name in sorted(saved_shapes.keys() | shapes.keys())
        if saved_shapes.get(name) != shapes.get(name)
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"checkpoint {path} is of another shape ({'; '.join(wrong[:3])}{more}): "
            "use the model and optimizer settings that it was saved with"
        )
    try:
        dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise ValueError(f"checkpoint {path} is damaged ({_reason(error)}): {remedy}") from None
    return path


def latest(directory: str | Path) -> Path | None:
    """The complete checkpoint of the highest step in `directory`, or None if there is none."""
    return next(reversed(_complete_in(Path(directory))), None)


def step_of(path: Path) -> int:
    """The step of the checkpoint folder `path`."""
    matched = _COMPLETE.fullmatch(path.name)
    if matched is None:
        raise ValueError(f"{path} is not a checkpoint: its name is not 'step-NNNNNNNN'")
    return int(matched[1])


def _complete_in(directory: Path) -> list[Path]:
    """Complete checkpoints by rising step; none where there is no such directory."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _is_complete(path)), key=step_of)


def _hide(path: Path) -> Path:
    """Rename a checkpoint, so that one deleted in part is not taken for complete."""
    hidden = path.with_name(f".replaced-{path.name}")
    os.rename(path, hidden)
    return hidden


def _reason(error: CheckpointException) -> str:
    """The first line of what one of the ranks met."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {str(cause).partition(chr(10))[0]}"


def _first_of_any_rank(error: str | None) -> str | None:
    """The error of the lowest rank that has one."""
    errors = [error]
    if dist.is_initialized():
        errors *= dist.get_world_size()
        dist.all_gather_object(errors, error)
    return next(filter(None, errors), None)


def _is_complete(path: Path) -> bool:
    return _COMPLETE.fullmatch(path.name) is not None and (path / ".metadata").is_file()


def _tensors(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a nested dict with the dotted names that torch's checkpoints give them."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from _tensors(value, f"{prefix}{key}.")


def _on_first_rank(action: Callable[[], None], failure: str) -> None:
    """Run `action` on rank 0 only; every rank waits for it, and all raise if it failed."""
    error: list[str | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            action()
        except OSError as reason:
            error = [str(reason)]
    if dist.is_initialized():
        dist.broadcast_object_list(error, src=0)
    if error[0] is not None:
        raise RuntimeError(f"{failure}: {error[0]}")

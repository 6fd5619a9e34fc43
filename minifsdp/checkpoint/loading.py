"""Reading a checkpoint: first whether it is whole and fits, then every rank its own rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from .folder import is_intact, is_named, newest_first
from .manifest import DamagedError, check_hashes, check_sizes, read_manifest
from .metadata import Reader, read_metadata
from .ranks import Ranks
from .saving import VALUES, failed_rank
from .values import absent, join, split, update


def load(
    directory: str | Path,
    state: dict[str, Any],
    on_damaged: Callable[[DamagedError], None] | None = None,
) -> Path:
    """Load a checkpoint into `state`, tensors in place; every rank calls it. Returns its folder.

    directory: a checkpoint, or the directory of a run's checkpoints: then the latest is read.
    state: as it was saved; values that are not tensors are replaced, and those it lacks added.
    on_damaged: if the latest is not what was written, call this with the error, on every rank, and
        read the newest that is.

    The world size may differ from the one that saved. Raises FileNotFoundError where there is no
    complete checkpoint, DamagedError, a ValueError that names checkpoint and file, where it is not
    what was written, and ValueError where it holds other tensors, shapes or dtypes than `state` or
    lacks a value: on every rank, and before anything is read into `state`.
    """
    ranks = Ranks()
    candidates = ranks.first(lambda: _candidates(Path(directory), on_damaged is not None))
    for path in candidates:
        try:
            _load(path, state, ranks)
        except DamagedError as error:
            if on_damaged is None or path == candidates[-1]:
                raise
            on_damaged(error)
        else:
            return path
    raise AssertionError("unreachable: there is a candidate, and the last one raises")


def _candidates(path: Path, damaged_too: bool) -> list[Path]:
    """What may be read, the best first: in a directory, those that look complete, if any does."""
    if is_named(path):
        if not path.is_dir():
            raise FileNotFoundError(f"{path}: no such checkpoint")
        return [path]
    found = newest_first(path)
    if not damaged_too:
        found = [candidate for candidate in found if is_intact(candidate)] or found[:1]
    if not found:
        raise FileNotFoundError(f"{path} holds no complete checkpoint (a folder 'step-NNNNNNNN')")
    return found


def _load(path: Path, state: dict[str, Any], ranks: Ranks) -> None:
    tensors, _ = split(state)

    def inspect() -> tuple[Metadata, dict[str, Any]]:
        """Whether all is as it was written, each rank hashing its share of the files."""
        files = read_manifest(path)
        check_sizes(path, files)
        check_hashes(path, files, sorted(files)[ranks.rank :: ranks.size])
        try:
            metadata = read_metadata(path, set(files))
            _check_tensors(path, metadata, tensors)
            return metadata, _values(path, files.keys(), tensors)
        except (DamagedError, _MisfitError):
            raise
        except ValueError as error:
            raise DamagedError(path, str(error)) from None

    def compare() -> None:
        if missing := absent(state, values):
            raise ValueError(
                f"checkpoint {path} has no value for {', '.join(missing[:3])}: it is another "
                "program's"
            )

    outcome: list[tuple[Metadata, dict[str, Any]]] = []
    ranks.each(lambda: outcome.append(inspect()))
    metadata, values = outcome[0]
    ranks.each(compare)
    try:
        dcp.load(
            dict(tensors),
            storage_reader=Reader(path, metadata),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    except CheckpointException as error:
        raise DamagedError(path, failed_rank(error)) from None
    update(state, values)


class _MisfitError(ValueError):
    """A whole checkpoint, but of something else."""


def _check_tensors(path: Path, metadata: Metadata, tensors: dict[str, torch.Tensor]) -> None:
    """ValueError unless the checkpoint has these tensors, of these shapes and dtypes."""

    def about(size: torch.Size, dtype: torch.dtype) -> tuple[tuple[int, ...], str]:
        return tuple(size), str(dtype).removeprefix("torch.")

    saved = metadata.state_dict_metadata
    there = {name: about(item.size, item.properties.dtype) for name, item in saved.items()}
    here = {name: about(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    wrong = []
    for name in sorted(there.keys() | here.keys()):
        sides = [there.get(name), here.get(name)]
        if sides[0] == sides[1]:
            continue
        shapes = ["absent" if side is None else side[0] for side in sides]
        dtypes = [side[1] for side in sides if side is not None]
        told = dtypes if shapes[0] == shapes[1] else shapes
        wrong.append(f"{name}: {told[0]} there, {told[1]} here")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise _MisfitError(
            f"checkpoint {path} is of another shape ({'; '.join(wrong[:3])}{more}): "
            "use the model and optimizer settings that it was saved with"
        )


def _values(path: Path, files: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The state as it was saved, with `tensors` in it."""
    if VALUES not in files:
        raise ValueError(f"it has no {VALUES}")
    try:
        values = join(json.loads((path / VALUES).read_text(encoding="utf-8")), tensors)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"its {VALUES} is unreadable: {type(error).__name__}") from None
    if not isinstance(values, dict):
        raise ValueError(f"its {VALUES} holds no state")
    return values

"""The folders of a run's checkpoints: their names, which of them count, and how one is published.

[Note: when each rename happens]
`.partial-step-N` becomes `step-N` in one rename, last of all. Only then are older ones deleted,
under a name of their own first (`.deleted-step-M`), since a folder is deleted file by file. Where
`step-N` is there already, it steps aside as `.replaced-step-N` and is deleted after the rename; a
run that dies between the two finds it there, as `latest` looks under that name as well.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from .manifest import DamagedError, check_hashes, check_sizes, read_manifest, sync_folder

_PARTIAL, _DELETED, _REPLACED = ".partial-", ".deleted-", ".replaced-"
_CHECKPOINT = re.compile(rf"({re.escape(_REPLACED)})?step-(\d{{8,}})")


def path_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of `step` is published."""
    return directory / f"step-{step:08d}"


def partial_of(final: Path) -> Path:
    """Where the checkpoint `final` is written."""
    return final.with_name(_PARTIAL + final.name)


def is_named(path: Path) -> bool:
    """Whether `path` has a checkpoint's name."""
    return _CHECKPOINT.fullmatch(path.name) is not None


def step_of(path: Path) -> int:
    """The step of the checkpoint folder `path`."""
    matched = _CHECKPOINT.fullmatch(path.name)
    if matched is None:
        raise ValueError(f"{path} is not a checkpoint: its name is not 'step-NNNNNNNN'")
    return int(matched[2])


def latest(directory: str | Path, verify: bool = False) -> Path | None:
    """The complete checkpoint of the highest step in `directory`, or None if there is none.

    One whose manifest or files are missing, or of another size, is passed over; with `verify`, also
    one whose bytes have changed, which takes reading them all.
    """
    return next((path for path in newest_first(Path(directory)) if is_intact(path, verify)), None)


def newest_first(directory: Path) -> list[Path]:
    """Whatever has a checkpoint's name, by falling step; none where there is no such directory."""
    if not directory.is_dir():
        return []
    paths = [path for path in directory.iterdir() if is_named(path)]
    return sorted(paths, key=lambda p: (-step_of(p), p.name.startswith(_REPLACED)))


def is_intact(path: Path, verify: bool = False) -> bool:
    """Whether all files are there, of the right size; with `verify`, also with the right bytes."""
    try:
        files = read_manifest(path)
        check_sizes(path, files)
        if verify:
            check_hashes(path, files, files)
    except DamagedError:
        return False
    except ValueError:
        return True  # of a later program, for all that can be told: `load` refuses it
    return True


def prepare(final: Path, needed_bytes: int) -> None:
    """Make the folder that `final` is written to, without what earlier attempts left.

    OSError, with the figures, if the disk has no room for `needed_bytes`.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    for leftover in final.parent.iterdir():
        if leftover.name.startswith((_PARTIAL, _DELETED)):
            _remove(leftover)
    free_bytes = shutil.disk_usage(final.parent).free
    if free_bytes < needed_bytes:
        raise OSError(
            f"it needs {needed_bytes:,} bytes and {free_bytes:,} are free in {final.parent}: make "
            "room, or keep fewer checkpoints"
        )
    partial_of(final).mkdir()


def publish(final: Path, keep_last: int | None) -> None:
    """Rename what was written to `final` (see [Note: when each rename happens])."""
    directory, partial = final.parent, partial_of(final)
    sync_folder(partial)
    if final.exists():
        replaced = final.with_name(_REPLACED + final.name)
        shutil.rmtree(replaced, ignore_errors=True)  # `final` itself is there
        os.rename(final, replaced)
    os.rename(partial, final)
    sync_folder(directory)
    _delete_superseded(final, keep_last)


def abandon(final: Path) -> None:
    """Delete what was written so far."""
    shutil.rmtree(partial_of(final), ignore_errors=True)


def _delete_superseded(final: Path, keep_last: int | None) -> None:
    """Delete those that `final` replaces, and of the earlier ones all but `keep_last` - 1."""
    superseded = []
    step, earlier = step_of(final), 0
    for path in newest_first(final.parent):
        if path.name.startswith(_REPLACED):
            superseded.append(path)
        elif keep_last is not None and step_of(path) < step and is_intact(path):
            earlier += 1
            if earlier >= keep_last:
                superseded.append(path)
    for path in superseded:
        hidden = path.with_name(_DELETED + path.name)
        os.rename(path, hidden)
        _remove(hidden)


def _remove(path: Path) -> None:
    """Delete what lies at `path`; of a link, to another disk perhaps, the link only."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)

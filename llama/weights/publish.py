"""A folder that ranks write together and that appears at its name whole, or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """Those who save together: every rank of a sharded model, or this process alone."""

    def __init__(self, sharded: bool) -> None:
        self.rank = dist.get_rank() if sharded else 0
        self.size = dist.get_world_size() if sharded else 1

    def each(self, action: Callable[[], T]) -> list[T]:
        """What `action` returns on each rank. If it raises on any, every rank raises: that one its
        own error, others a RuntimeError that names it."""
        failure, result = None, None
        try:
            result = action()
        except Exception as error:
            failure = error
        reason = None if failure is None else f"{type(failure).__name__}: {failure}"
        answers: list[Any] = [(reason, result)]
        if self.size > 1:
            answers = [None] * self.size
            dist.all_gather_object(answers, (reason, result))
        if failure is not None:
            raise failure
        for rank, (reason, _) in enumerate(answers):
            if reason is not None:
                raise RuntimeError(f"nothing was saved: rank {rank} failed with {reason}")
        return [result for _, result in answers]

    def first(self, action: Callable[[], T]) -> T | None:
        """What `action`, done by rank 0 alone, returns there; all ranks get it, or raise."""
        return self.each(action if self.rank == 0 else lambda: None)[0]


@contextlib.contextmanager
def published(target: Path, ranks: Ranks) -> Iterator[Path]:
    """A new folder beside `target`, moved there once the block has ended without an error.

    All ranks enter and leave together, and must see the same file system. ValueError if `target`
    exists and is not an empty folder, or while another process saves to it. What a killed process
    left unfinished for the same target is deleted.

    [Note: whose unfinished folder it is]
    Rank 0 keeps its folder locked (flock) until it is renamed or deleted. The system lets go of the
    lock however the process ends, so a folder that can be locked is a dead process's: process ids,
    which are used again and mean nothing on another host, could not tell. Where the file system has
    no locks (some are mounted so) nothing can tell, and unfinished folders are left to the user.
    """
    target = Path(os.path.abspath(target))
    lock: list[int | None] = []

    def begin() -> Path:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"{target}: exists; remove it or choose another folder to save to")
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        folder = target.with_name(f".{target.name}.unfinished-{secrets.token_hex(4)}")
        folder.mkdir()
        lock.append(_lock(folder))
        return folder

    def end() -> None:
        for path in sorted(folder.iterdir()):
            sync(path)
        sync(folder)
        folder.rename(target)
        sync(target.parent)

    def is_seen() -> None:
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder}, which rank 0 made, is not there: all ranks must see one file system"
            )

    folder = ranks.first(begin)
    try:
        if ranks.size > 1:
            ranks.each(is_seen)
        yield folder
        ranks.first(end)
    finally:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            if lock[0] is not None:
                os.close(lock[0])


def _sweep(target: Path) -> None:
    """Delete unfinished folders of killed saves to `target`; ValueError if one is not dead."""
    pattern = re.compile(re.escape(f".{target.name}.unfinished-") + "[0-9a-f]{8}")
    for path in target.parent.iterdir():
        if not pattern.fullmatch(path.name) or not path.is_dir():
            continue
        try:
            lock = _lock(path)
        except BlockingIOError:
            raise ValueError(f"{target}: another process is saving to it, in {path}") from None
        except FileNotFoundError:
            continue  # renamed or deleted just now
        if lock is not None:
            shutil.rmtree(path)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """The descriptor that holds the lock; None if the file system has no locks.

    BlockingIOError if another process holds it.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return fd


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_space(folder: Path, needed_bytes: int) -> None:
    """OSError, with the figures, if the file system of `folder` has no room for `needed_bytes`."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise OSError(
            f"{folder.parent}: the weights take {needed_bytes:,} bytes, but {free_bytes:,} are "
            "free there: make room, or save elsewhere"
        )


class OpenFiles:
    """Files open for writing, by path, each opened when it is first asked for."""

    def __init__(self) -> None:
        self._files: dict[Path, BinaryIO] = {}

    def fd(self, path: Path) -> int:
        """The descriptor of `path`, open for reading and writing."""
        if path not in self._files:
            self._files[path] = path.open("r+b", buffering=0)
        return self._files[path].fileno()

    def close(self) -> None:
        """Close all, once what was written is on the disk."""
        while self._files:
            _, file = self._files.popitem()
            with file:
                os.fsync(file.fileno())


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content`, indented."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

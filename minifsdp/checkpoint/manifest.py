"""`manifest.json`: which files a checkpoint has, how large they are, and their hashes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST = "manifest.json"
FORMAT, VERSION = "minifsdp checkpoint", 1
_ALWAYS = {".metadata", "values.json"}  # what every checkpoint has besides tensors


class DamagedError(ValueError):
    """The checkpoint `path` is not what was written; the `reason` names the file."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return (
            f"checkpoint {self.path} is damaged ({self.reason}): delete that folder to go on from "
            "the checkpoint before it, if there is one"
        )


class Digest(NamedTuple):
    """A file's size in bytes and the hexadecimal SHA-256 of its content."""

    bytes: int
    sha256: str


def digest(path: Path) -> Digest:
    """Read a whole file."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return Digest(file.tell(), sha256)


def write_manifest(path: Path, files: dict[str, Digest], **about: Any) -> None:
    """Write the manifest of the folder `path`, once its other files are complete.

    Raises FileNotFoundError for a file that this process does not see as it was written.
    """
    for name, (size, _) in files.items():
        if not (path / name).is_file() or (path / name).stat().st_size != size:
            raise FileNotFoundError(
                f"{path / name}, which a rank wrote, is not there: all ranks must see one file "
                "system"
            )
    content = {"format": FORMAT, "version": VERSION, **about}
    content["files"] = {name: file._asdict() for name, file in sorted(files.items())}
    write_synced(path / MANIFEST, json.dumps(content, indent=2) + "\n")


def read_manifest(path: Path) -> dict[str, Digest]:
    """The files of the checkpoint `path`.

    Raises DamagedError if there is no manifest or it is no such thing, and ValueError if it is of
    a version that this program does not know.
    """
    try:
        content = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError
        version = content["version"]
        files = {
            name: Digest(int(file["bytes"]), str(file["sha256"]))
            for name, file in (content["files"] if version == VERSION else {}).items()
        }
    except FileNotFoundError:
        raise DamagedError(path, f"{MANIFEST} is missing") from None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ):
        raise DamagedError(path, f"{MANIFEST} is unreadable") from None
    if version != VERSION:
        raise ValueError(
            f"checkpoint {path} is of format version {version}, this program reads {VERSION}: "
            "use the program that wrote it"
        )
    if any(Path(name).name != name or "\0" in name for name in files):
        raise DamagedError(path, f"{MANIFEST} names files elsewhere")
    if missing := _ALWAYS - set(files):
        raise DamagedError(path, f"{MANIFEST} does not name {', '.join(sorted(missing))}")
    return files


def check_sizes(path: Path, files: dict[str, Digest]) -> None:
    """DamagedError for a file that is missing or of another size; reads no content."""
    for name, (size, _) in files.items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            raise DamagedError(path, f"{name} is missing") from None
        if found != size:
            raise DamagedError(path, f"{name} has {found:,} bytes instead of {size:,}")


def check_hashes(path: Path, files: dict[str, Digest], names: Iterable[str]) -> None:
    """DamagedError for a file, of those in `names`, whose bytes are not those that were written."""
    for name in names:
        try:
            found = digest(path / name)
        except OSError as error:
            raise DamagedError(path, f"{name}: {error.strerror}") from None
        if found != files[name]:
            raise DamagedError(path, f"the bytes of {name} have changed since they were written")


def write_synced(path: Path, text: str) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

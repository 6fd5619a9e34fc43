"""A folder of stores, so that a file is tokenised once, whoever asks and how many at a time.

[Note: the cache]
A store is found by what it was made of: the SHA-256 of the file and of the tokenizer, the template,
and the version of this format. Whoever misses one takes the lock of its name, looks again, writes
it aside, waits until it is on the disk, and gives it its name: another that waits for the lock then
finds it, and one that is killed leaves only what the next holder of the lock clears away. Locks go
with their holder (flock). What a store was made of is noted by the file's device, inode, size and
times of change, so that a large file is read once more only if it was touched. The time of change
of its inode is among them: no program sets that one back. Where it is too recent, a second change
could carry the same time, and nothing is noted, unless the file is so large that it is waited for.
A store that is there is also found where nothing can be written: only a miss needs that. The folder
may be deleted whenever no run starts.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from llama.finetune.data.reading import read
from llama.finetune.data.store import ABOUT, Store, Writer, open_store
from llama.tokenizer import Tokenizer
from llama.weights.publish import sync

FORMAT = 2  # to be raised whenever the same file would give another store
SETTLED_NS = 2 * 10**9  # of the coarsest clocks that file systems have
LARGE_BYTES = 2**30  # of a file that takes longer to read again than to settle


def tokenised(path: Path, tokenizer: Tokenizer, template: str, cache_dir: Path | None) -> Store:
    """The store of a file's documents, from the cache or made and put there.

    Without a cache it is made anew, in a temporary folder that is gone when this returns. Raises
    ValueError for a file that changes while it is read, and for a cache that lacks it and cannot be
    written.
    """
    state = _state(path)
    content = _hash(path, state) if cache_dir is None else _sha256(path, state, cache_dir)
    about = (FORMAT, path.suffix.lower(), content, tokenizer.sha256, template)
    made_of = hashlib.sha256(repr(about).encode()).hexdigest()
    if cache_dir is None:
        with tempfile.TemporaryDirectory(prefix="tokens-") as folder:
            place = Path(folder, "store")
            _write(path, state, tokenizer, template, place)
            return _opened(place, made_of)
    name = made_of[:40]
    folder = cache_dir / name
    store = open_store(folder, made_of)
    if store is not None:
        return store
    _check_writable(cache_dir)
    with _lock(cache_dir, name):
        store = open_store(folder, made_of)  # another may have made it meanwhile
        if store is not None:
            return store
        for left in (folder, *cache_dir.glob(f"{name}.*")):  # cut short, or of one who was killed
            shutil.rmtree(left, ignore_errors=True)
        aside = cache_dir / f"{name}.{os.getpid()}"
        try:
            _write(path, state, tokenizer, template, aside)
            aside.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ValueError(
                f"the token cache {cache_dir} has no room for {path} ({error.strerror}): "
                "make room, or name another with --token-cache"
            ) from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        sync(cache_dir)
    return _opened(folder, made_of)


def check_cache(cache_dir: Path) -> None:
    """Make the folder if there is none; ValueError if it holds no store and cannot be written."""
    if not any(cache_dir.glob(f"*/{ABOUT}")):
        _check_writable(cache_dir)


def _check_writable(cache_dir: Path) -> None:
    error = _write_error(cache_dir)
    if error is not None:
        raise ValueError(
            f"the token cache {cache_dir} cannot be written ({error.strerror}): "
            "name another with --token-cache"
        )


def _write_error(cache_dir: Path) -> OSError | None:
    """What keeps the cache from being written; its folders are made where there are none."""
    try:
        for folder in (cache_dir / "hashes", cache_dir / "locks"):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        return error
    return None


def _write(
    path: Path, state: tuple[int, ...], tokenizer: Tokenizer, template: str, folder: Path
) -> None:
    writer = Writer(folder, tokenizer.vocab_size)
    with contextlib.closing(writer):
        read(path, writer, tokenizer, template, threads=_cores())
        writer.finish()
    _check_unchanged(path, state)  # since it was hashed


def _opened(folder: Path, made_of: str) -> Store:
    store = open_store(folder, made_of)
    if store is None:
        raise RuntimeError(f"{folder}: what was just written there is gone or cut short")
    return store


def _sha256(path: Path, state: tuple[int, ...], cache_dir: Path) -> str:
    """SHA-256 of a file's content, from a note where there is one."""
    name = "-".join(map(str, state))
    note = cache_dir / "hashes" / name
    digest = _read_note(note)
    if digest is not None:
        return digest
    if _write_error(cache_dir) is not None:
        return _hash(path, state)
    with _lock(cache_dir, f"hash-{name}"):
        digest = _read_note(note)  # another may have left it meanwhile
        if digest is not None:
            return digest
        recent_ns = SETTLED_NS - (time.time_ns() - state[-1])
        if state[2] >= LARGE_BYTES and recent_ns > 0:  # or every rank would have to read it
            time.sleep(min(recent_ns + 1, SETTLED_NS) / 1e9)
        began = time.time_ns()
        digest = _hash(path, state)
        if state[-1] < began - SETTLED_NS:
            aside = note.with_name(f"{name}.{os.getpid()}")
            aside.write_text(digest)
            aside.rename(note)
    return digest


def _hash(path: Path, state: tuple[int, ...]) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _check_unchanged(path, state)
    return digest


def _read_note(note: Path) -> str | None:
    with contextlib.suppress(OSError):
        digest = note.read_text()
        return digest if len(digest) == 64 else None
    return None


def _state(path: Path) -> tuple[int, ...]:
    state = path.stat()
    return (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_unchanged(path: Path, state: tuple[int, ...]) -> None:
    if _state(path) != state:
        raise ValueError(f"{path}: the file changed while it was read: start again")


@contextlib.contextmanager
def _lock(cache_dir: Path, name: str) -> Iterator[None]:
    """Be the only one, of all processes and threads, inside the lock of that name."""
    with (cache_dir / "locks" / name).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise ValueError(
                f"the token cache {cache_dir} is where files cannot be locked ({error.strerror}): "
                "name another with --token-cache"
            ) from None
        yield

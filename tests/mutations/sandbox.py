"""Copies of the tree, for mutations to be made in."""

from __future__ import annotations

import atexit
import compileall
import functools
import os
import py_compile
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .mutation import Mutation

ROOT = Path(__file__).resolve().parents[2]
_COPIED = (
    "minifsdp",
    "llama",
    "tests",
    "benchmarks",
    "docs",
    "README.md",
    "train.py",
    "pyproject.toml",
)


@functools.cache
def _template() -> Path:
    """The tree as it is now, compiled: one copy for all mutations of this process.

    Compiled files are known by their source's hash and not by its time, in which two mutations of
    equal size might agree.
    """
    folder = Path(tempfile.mkdtemp(prefix="minifsdp-mutations-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in _COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        elif (ROOT / name).exists():
            shutil.copy2(ROOT / name, folder / name)
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    for name in ("minifsdp", "llama"):
        compileall.compile_dir(folder / name, quiet=2, workers=1, invalidation_mode=mode)
    return folder


@contextmanager
def sandbox(mutation: Mutation | None) -> Iterator[Path]:
    """A copy of the tree with the mutation in it, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="minifsdp-mutant-", ignore_cleanup_errors=True) as name:
        folder = Path(name) / "tree"
        shutil.copytree(_template(), folder, copy_function=os.link)
        if mutation is not None:
            path = folder / mutation.file
            mutated = mutation.apply(path.read_text(encoding="utf-8"))
            path.unlink()  # the template's
            path.write_text(mutated, encoding="utf-8")
        yield folder

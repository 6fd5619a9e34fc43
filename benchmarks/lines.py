"""Lines of code of the engine, file by file, and of torch's: `python -m benchmarks.lines`.

Blank lines, comments and docstrings are left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import torch.distributed.fsdp

import minifsdp

_AROUND = ("watchdog.py", "arrivals.py")  # around a run, not of the engine


def code_lines(file: Path) -> int:
    """Lines of `file` that are code."""
    source = file.read_text(encoding="utf-8")
    said: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        text = node.value if isinstance(node, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            said.update(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(map(str.strip, source.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and n not in said for n, line in lines)


def engine_files() -> list[Path]:
    """The engine proper: from `api` down."""
    package = Path(minifsdp.__file__).parent
    files = [*package.glob("*.py"), *package.glob("collectives/*.py")]
    return sorted(file for file in files if file.name not in _AROUND)


def upstream_files(engine: str) -> list[Path]:
    """torch's own "fsdp2" or "fsdp1", without what it takes from elsewhere in torch."""
    package = Path(torch.distributed.fsdp.__file__).parent
    return sorted(package.glob("_fully_shard/*.py" if engine == "fsdp2" else "*.py"))


def main() -> None:
    package = Path(minifsdp.__file__).parent
    print("| file | lines of code |\n|---|---:|")
    for file in engine_files():
        print(f"| {file.relative_to(package)} | {code_lines(file)} |")
    print(f"| **minifsdp, its collectives included** | {_total(engine_files()):,} |")
    for engine in ("fsdp2", "fsdp1"):
        files = upstream_files(engine)
        print(f"| {engine}, torch {torch.__version__}, {len(files)} files | {_total(files):,} |")


def _total(files: Iterable[Path]) -> int:
    return sum(map(code_lines, files))


if __name__ == "__main__":
    main()

"""The parts depend on one another as they should: engine and model do not know each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _imported(path: Path) -> set[str]:
    """The top-level packages that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize(("package", "other"), [("minifsdp", "llama"), ("llama", "minifsdp")])
def test_the_engine_and_the_model_never_import_each_other(package, other):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    assert [str(path) for path in files if other in _imported(path)] == []


@pytest.mark.parametrize("package", ["minifsdp", "llama"])
def test_neither_imports_transformers(package):
    for path in (ROOT / package).rglob("*.py"):
        assert "transformers" not in _imported(path), path

"""Code as it stands in a file of the project, found by name.

    minifsdp/layout.py RowLayout.rows_of
    minifsdp/unit.py Unit._start_gather | from if peers.size == 1 | to self.state =
    minifsdp/collectives/ring.py spans | but docstring

`from` and `to` name lines by what they contain; what is left out before and after shows as "...".
"""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

from .markers import StaleError

ELLIPSIS = "..."


def code(root: Path, spec: str, up: str = "../../") -> str:
    """A link to the file and the lines that `spec` names, as Markdown.

    up: from the page to `root`. Raises StaleError, naming file and name, for what is not there.
    """
    target, *options = (part.strip() for part in spec.split(" | "))
    file, _, name = target.partition(" ")
    path = root / file
    if not path.is_file():
        raise StaleError(f"there is no file {file}")
    text = path.read_text(encoding="utf-8")
    lines = _lines(text, file, name, "but docstring" in options)
    lines = _between(lines, [option for option in options if option != "but docstring"], target)
    shown = textwrap.dedent("\n".join(lines)).rstrip()
    return f"[`{file}`]({up}{file}), `{name}`:\n\n```python\n{shown}\n```"


def body(function_source: str) -> str:
    """What a function does: its source without decorators, `def` line and docstring."""
    node = ast.parse(textwrap.dedent(function_source)).body[0]
    lines = textwrap.dedent(function_source).splitlines()
    first = node.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    start = first.end_lineno if is_docstring else first.lineno - 1
    while start > 0 and not is_docstring and lines[start - 1].lstrip().startswith("#"):
        start -= 1  # comments before the first statement
    return textwrap.dedent("\n".join(lines[start:])).strip()


def _lines(text: str, file: str, name: str, without_docstring: bool) -> list[str]:
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        children = getattr(node, "body", [])
        found = next((child for child in children if part in _names(child)), None)
        if found is None:
            raise StaleError(f"{file} has no {name}")
        node = found
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    lines = text.splitlines()
    shown = lines[first - 1 : node.end_lineno]
    if without_docstring and ast.get_docstring(node) is not None:
        docstring = node.body[0]
        del shown[docstring.lineno - first : docstring.end_lineno - first + 1]
    return shown


def _names(node: ast.AST) -> list[str]:
    """What a statement defines."""
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [getattr(node, "name", "")]


def _between(lines: list[str], options: list[str], target: str) -> list[str]:
    """From the first line that contains one text to the first, not before it, with another."""
    start, stop = 0, len(lines)
    for option in options:
        word, _, wanted = option.partition(" ")
        at = next((i for i in range(start, len(lines)) if wanted in lines[i]), None)
        if at is None:
            raise StaleError(f"{target} has no line with {wanted!r}")
        if word == "from":
            start = at
        elif word == "to":
            stop = at + 1
        else:
            raise StaleError(f"no such option of a code marker: {option!r}")
    shown = lines[start:stop]
    indent = min(len(line) - len(line.lstrip()) for line in shown if line.strip())
    if start > 0:
        shown.insert(0, " " * indent + ELLIPSIS)
    if stop < len(lines):
        shown.append(" " * indent + ELLIPSIS)
    return shown

"""What a mutation is, and what it makes of a source file."""

from __future__ import annotations

import ast
import functools
from typing import NamedTuple


class StaleError(ValueError):
    """A mutation's line is not in its file, or is there more than once."""


class Mutation(NamedTuple):
    """One line of a file, and what to put in its place."""

    file: str
    """From the root of the tree, as "minifsdp/unit.py"."""
    line: str
    """The whole line as it stands, without its indentation and the comment behind it."""
    becomes: str
    """What stands there instead, at the same indentation; "pass" for a line that is dropped."""
    says: str
    """What it breaks."""
    within: str = ""
    """The function that the line is looked for in, as "Unit.adopt", where a file has it twice; "#2"
    behind the name means the second one there."""

    def __str__(self) -> str:
        return f"{self.file}: {self.line!r} becomes {self.becomes!r} ({self.says})"

    def lineno(self, source: str) -> int:
        """The line's number in `source`. Raises StaleError unless it is there exactly once, or as
        often as `within` says."""
        lines = source.splitlines()
        within, _, which = self.within.partition("#")
        first, last = _extent(source, within) if within else (1, len(lines))
        found = [n for n in range(first, last + 1) if _code(lines[n - 1]) == self.line]
        if which and int(which) <= len(found):
            return found[int(which) - 1]
        if which or len(found) != 1:
            where = f"{within} of {self.file}" if within else self.file
            raise StaleError(
                f"{self.line!r} is {len(found)} times in {where}: bring the table of mutations up "
                "to date, or name the function in `within`"
            )
        return found[0]

    def apply(self, source: str, lineno: int | None = None) -> str:
        """`source` with the line changed; if `lineno` is given, that one."""
        lines = source.splitlines(keepends=True)
        index = (lineno or self.lineno(source)) - 1
        indentation = lines[index][: len(lines[index]) - len(lines[index].lstrip())]
        lines[index] = f"{indentation}{self.becomes}\n"
        return "".join(lines)


def _code(line: str) -> str:
    return line.partition("  # ")[0].strip()


@functools.lru_cache(maxsize=1024)
def _extent(source: str, name: str) -> tuple[int, int]:
    """First and last line of the function or class `name`, as "Class.method"."""
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        inner = (n for n in ast.walk(node) if getattr(n, "name", None) == part)
        found = next((n for n in inner if hasattr(n, "end_lineno") and n is not node), None)
        if found is None:
            raise StaleError(f"there is no {name!r}")
        node = found
    return node.lineno, node.end_lineno

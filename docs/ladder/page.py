"""The generated parts of README.md: the table, and every line of code in it.

A part stands between `<!-- made: NAME -->` and `<!-- end -->`; the rest is written by hand.
"""

from __future__ import annotations

import difflib
import re
from itertools import pairwise
from pathlib import Path

from ladder import RUNGS

FOLDER = Path(__file__).parent
_PART = re.compile(r"(<!-- made: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_TIMES = re.compile(r"\| \d+ \| \d+ \|$", re.MULTILINE)


def code_parts() -> dict[str, str]:
    """The first rung whole, the last one whole, and between them what each changes."""
    source = {rung: (FOLDER / f"{rung}.py").read_text() for rung in RUNGS}
    parts = {rung: f"```python\n{source[rung]}```\n" for rung in (RUNGS[0], RUNGS[-1])}
    for before, after in pairwise(RUNGS[:-1]):
        lines = difflib.unified_diff(
            source[before].splitlines(), source[after].splitlines(), n=1, lineterm=""
        )
        changes = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
        parts[after] = "```diff\n" + "\n".join(changes) + "\n```\n"
    return parts


def refreshed(text: str, parts: dict[str, str]) -> str:
    """The page with these parts in place of those it has. Raises ValueError for an unknown name."""

    def part(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        if name not in parts:
            raise ValueError(f"README.md wants a part {name!r}; there are {', '.join(parts)}")
        return begin + parts[name] + end

    return _PART.sub(part, text)


def without_times(text: str) -> str:
    """The page with the last two columns of its table blanked: they are never the same twice."""
    return _TIMES.sub("| | |", text)

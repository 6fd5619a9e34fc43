"""The generated parts of a page: where they are, and whether they are what they should be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

KINDS = ("code", "run", "table", "picture", "value", "change", "answer")
_MARKER = re.compile(r"<!-- (?P<kind>[a-z]+): (?P<what>[^\n]+?) -->(?P<body>.*?)<!-- end -->", re.S)
_ANY = re.compile(r"<!-- (?:[a-z]+: [^\n]*?|end) -->")


class StaleError(ValueError):
    """A marker names what is not there."""


class Marker(NamedTuple):
    """One generated part of a page."""

    kind: str
    what: str
    line: int
    """Of its first line in the page, from 1."""
    body: str
    """What stands in the page now, without the line ends next to the markers."""

    def __str__(self) -> str:
        return f"<!-- {self.kind}: {self.what} -->"


def markers(text: str) -> Iterator[Marker]:
    """The markers of a page in order. Raises StaleError for one that is unknown or has no end."""
    matched = list(_MARKER.finditer(text))
    known = {m.start() for m in matched} | {m.end() - len("<!-- end -->") for m in matched}
    for found in _ANY.finditer(text):
        if found.start() not in known:
            line = text.count("\n", 0, found.start()) + 1
            raise StaleError(f"line {line}: {found.group()} has no partner")
    for match in matched:
        line = text.count("\n", 0, match.start()) + 1
        if match["kind"] == "value" and text[: match.start()].endswith("\n"):
            raise StaleError(
                f"line {line}: a line must not begin with a value: forges show it apart"
            )
        if match["kind"] not in KINDS:
            raise StaleError(f"line {line}: no such kind of marker: {match['kind']!r}")
        yield Marker(match["kind"], match["what"], line, match["body"].strip("\n"))


def rewritten(text: str, made: Callable[[Marker], str]) -> str:
    """The page with each part as `made` says."""
    parts = iter(list(markers(text)))

    def replace(match: re.Match[str]) -> str:
        marker = next(parts)
        between = "" if marker.kind == "value" else "\n"
        return f"{marker}{between}{made(marker)}{between}<!-- end -->"

    return _MARKER.sub(replace, text)


def stale(page: Path, made: Callable[[Marker], str]) -> list[str]:
    """What in the page is not what it should be: page, line, marker, and a diff."""
    complaints = []
    for marker in markers(page.read_text(encoding="utf-8")):
        where = f"{page.name}:{marker.line}: {marker}"
        try:
            wanted = made(marker)
        except StaleError as error:
            complaints.append(f"{where}: {error}")
            continue
        if wanted != marker.body:
            complaints.append(f"{where} is stale:\n{difference(marker.body, wanted)}")
    return complaints


def difference(there: str, wanted: str) -> str:
    """The lines that differ, those of the page with a minus."""
    lines = difflib.unified_diff(
        there.splitlines(), wanted.splitlines(), "in the page", "made now", "", "", 1, ""
    )
    return "\n".join(f"    {line}" for line in lines)

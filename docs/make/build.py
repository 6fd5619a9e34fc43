"""Makes all generated parts of the pages, and writes them or tells which are stale."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from . import exercises
from .markers import Marker, StaleError, markers, rewritten, stale
from .ranks import Job, Played, play
from .source import body, code

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "how-sharding-works"
_PICTURES = "pictures"
_SHOW = "docs.make.show"


def drawn_from(source: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say which function, run on ranks, gives a function the list of what each rank returned."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function.source = source
        return function

    return mark


def function_of(what: str) -> Callable[..., Any]:
    """The function that a marker names. Raises StaleError if there is none."""
    module_name, _, name = what.partition(" ")[0].rpartition(".")
    try:
        module = importlib.import_module(f"{_SHOW}.{module_name}")
        return getattr(module, name)
    except (ImportError, AttributeError) as error:
        raise StaleError(f"docs/make/show/ has no {what}: {error}") from None


def _job(function: Callable[..., Any]) -> Job | None:
    """What has to run on ranks for a function of the guide, if anything."""
    running = getattr(function, "source", function)
    ranks = getattr(running, "ranks", None)
    return None if ranks is None else Job(running.__module__, running.__name__, ranks)


class Made:
    """What the parts of some pages should be. Runs what they show, all of it at once."""

    def __init__(self, folder: Path = PAGES, root: Path = ROOT) -> None:
        self.folder, self.root = folder, root

    @property
    def pages(self) -> list[Path]:
        """The Markdown files, the index first."""
        found = sorted(self.folder.glob("*.md"))
        return sorted(found, key=lambda page: page.name != "README.md")

    @cached_property
    def _played(self) -> dict[Job, list[Played]]:
        jobs = []
        for page in self.pages:
            for marker in markers(page.read_text(encoding="utf-8")):
                if marker.kind in ("run", "table", "picture", "value"):
                    try:
                        job = _job(function_of(marker.what))
                    except StaleError:
                        continue  # said where it stands
                    jobs += [] if job is None else [job]
        return play(jobs)

    def __call__(self, marker: Marker) -> str:
        """The text of a part, without the line ends next to its markers."""
        if marker.kind == "code":
            return code(self.root, marker.what)
        if marker.kind == "change":
            return exercises.change(self.root, int(marker.what))
        if marker.kind == "answer":
            return exercises.answer(int(marker.what))
        if marker.kind == "picture":
            what, _, alt = marker.what.partition(" ")
            return f"![{alt}]({_PICTURES}/{_file_of(what)})"
        function = function_of(marker.what)
        if marker.kind == "run":
            return self._run(function)
        return str(self._returned(function))

    def _run(self, function: Callable[..., Any]) -> str:
        played = self._played[_job(function)]
        shown = f"```python\n{body(inspect.getsource(function))}\n```"
        if printed := said([one.printed for one in played]):
            file = f"{function.__module__.rpartition('.')[2]}.py"
            ranks = f"{len(played)} ranks" if len(played) > 1 else "one rank"
            shown += f"\n\nOn {ranks} ([source](../make/show/{file})) this prints:\n"
            shown += f"\n```text\n{printed}\n```"
        return shown

    def _returned(self, function: Callable[..., Any]) -> Any:
        source = getattr(function, "source", None)
        if source is None:
            return function()
        return function([one.returned for one in self._played[_job(function)]])

    def pictures(self) -> dict[str, str]:
        """The SVG files that the pages show, by name."""
        made = {}
        for page in self.pages:
            for marker in markers(page.read_text(encoding="utf-8")):
                if marker.kind == "picture":
                    what = marker.what.partition(" ")[0]
                    made[_file_of(what)] = self._returned(function_of(what))
        return made

    def write(self) -> list[Path]:
        """Write what is stale; returns the files that changed."""
        changed = []
        for page in self.pages:
            changed += _written(page, rewritten(page.read_text(encoding="utf-8"), self))
        pictures = self.pictures()
        for name, svg in pictures.items():
            changed += _written(self.folder / _PICTURES / name, svg)
        for path in self._leftover(pictures):
            path.unlink()
            changed.append(path)
        return changed

    def check(self) -> list[str]:
        """What is stale: in which page, which marker, and a diff."""
        complaints = []
        try:
            _ = self._played
        except RuntimeError as error:
            return [f"what a page shows does not run: {error}"]
        for page in self.pages:
            complaints += stale(page, self)
        pictures = self.pictures()
        for name, svg in pictures.items():
            path = self.folder / _PICTURES / name
            if not path.exists() or path.read_text(encoding="utf-8") != svg:
                complaints.append(f"{_PICTURES}/{name} is stale: it is not what is drawn now")
        complaints += [f"{_PICTURES}/{p.name}: no page shows it" for p in self._leftover(pictures)]
        return complaints

    def _leftover(self, pictures: Iterable[str]) -> list[Path]:
        there = sorted((self.folder / _PICTURES).glob("*.svg"))
        return [path for path in there if path.name not in set(pictures)]


def said(printed: list[str]) -> str:
    """What ranks printed: once if all said the same, else each under its number."""
    texts = [text.rstrip() for text in printed]
    if len(set(texts)) == 1:
        return texts[0]
    if all("\n" not in text for text in texts):
        return "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
    parts = [
        "\n".join(f"rank {rank}: {line}" if line else "" for line in text.splitlines())
        for rank, text in enumerate(texts)
        if text
    ]
    return "\n\n".join(parts)


def _file_of(what: str) -> str:
    return re.sub(r"[._]", "-", what) + ".svg"


def _written(path: Path, text: str) -> list[Path]:
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return []
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return [path]

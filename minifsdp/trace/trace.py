"""A Trace: what all ranks did, to look at and to keep."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from . import chrome, text
from .page import page
from .spans import RankTrace, TraceEvent
from .waits import arrivals, explain


class Trace:
    """What `record` recorded. Empty until its block has ended."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankTrace] = {}
        """On rank 0 every rank's; elsewhere this rank's own."""
        self.rank = 0
        self.is_elsewhere = False
        """Whether rank 0 has this rank's record too."""

    @property
    def events(self) -> list[TraceEvent]:
        """This rank's events, in the order they began."""
        return self.ranks[self.rank].events if self.ranks else []

    def take(self, rank: int, traces: Sequence[RankTrace]) -> None:
        """Hold these ranks' records, as seen from `rank`."""
        self.rank = rank
        self.ranks = {trace.rank: trace for trace in traces}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace whole or not at all: "*.json" for Perfetto, "*.html" as a page.

        Where rank 0 holds every rank's record, other ranks write nothing.
        Raises ValueError for another suffix, RuntimeError before the block of `record` has ended.
        """
        path = Path(path)
        if path.suffix not in (".json", ".html"):
            raise ValueError(
                f"a trace is saved as .json (for Perfetto) or .html (a page), not as {path.name!r}"
            )
        if not self.ranks:
            raise RuntimeError(
                "there is no trace yet: save it after the block of `with record() as trace:`"
            )
        if self.is_elsewhere:
            return
        if not path.parent.is_dir():
            raise FileNotFoundError(f"cannot save {path}: make the folder {path.parent} first")
        if path.suffix == ".json":
            written = chrome.dumps(self.ranks)
        else:
            came = arrivals(self.ranks)
            words = {rank: explain(trace, came) for rank, trace in self.ranks.items()}
            written = page(self.ranks, words, title=path.stem)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            aside.write_text(written, encoding="utf-8")
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)

    def __str__(self) -> str:
        """A timeline of this rank's last iteration in text, and what it waited for."""
        return text.timeline(self.ranks, self.rank)


def load(path: str | os.PathLike[str]) -> Trace:
    """A trace that was saved as .json. Raises ValueError for another file."""
    trace = Trace()
    ranks = chrome.loads(Path(path).read_text(encoding="utf-8"), str(path))
    trace.take(min(ranks), list(ranks.values()))
    return trace


def on_one_clock(gathered: Sequence[tuple[RankTrace, float]]) -> list[RankTrace]:
    """Records with times since the first rank began.

    gathered: each rank's record and the time of day at which it began. Ranks of one host share a
    clock; hosts are set against each other by their time of day, so as exactly as that is kept.
    """
    hosts: dict[str, float] = {}
    for trace, time_of_day in gathered:
        hosts.setdefault(trace.host, time_of_day - trace.began)
    began = [trace.began + hosts[trace.host] for trace, _ in gathered]
    first = min(began)
    return [trace.shifted(at - first) for (trace, _), at in zip(gathered, began, strict=True)]

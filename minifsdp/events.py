"""What the engine tells whoever listens: a list of listeners, free of cost when empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Event(NamedTuple):
    """One thing a unit did."""

    kind: str
    """all_gather, unshard, reshard, forward, backward, reduce_scatter, all_reduce, reduced,
    written (this rank's part of a checkpoint)"""
    unit: str
    """The unit's name: its module's path below the root, or "root"."""
    nbytes: int = 0
    """Bytes of the message this rank takes part in (all ranks' pieces), 0 where nothing travels."""


listeners: list[Callable[[Event], None]] = []


def emit(kind: str, unit: str, nbytes: int = 0) -> None:
    """Tell every listener. Callers test `listeners` first, so that silence costs one look."""
    event = Event(kind, unit, nbytes)
    for listener in listeners:
        listener(event)


@contextmanager
def listening(listener: Callable[[Event], None]) -> Iterator[None]:
    """Call `listener` with each event inside the block."""
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)

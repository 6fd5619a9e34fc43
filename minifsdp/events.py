"""What the engine tells whoever listens, free of cost when nobody does.

Listeners hear what happened; a tracer also hears when it began and when it ended.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol


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


class Tracer(Protocol):
    """Hears what takes time, on whichever thread does the work.

    kind: unshard, prefetch (an unshard that another unit asks for), wait (for an unshard), forward,
        reshard, backward, accumulate, reduce (until it is under way), reduce_wait, optimizer,
        optimizer_wait.
    actor: the unit that does it, or the unit's reducer. It has a `name`, and `held` bytes.
    """

    def begin(self, kind: str, actor: Any) -> None: ...

    def end(self, kind: str, actor: Any) -> None: ...


tracer: Tracer | None = None


def begin(kind: str, actor: Any) -> None:
    if tracer is not None:
        tracer.begin(kind, actor)


def end(kind: str, actor: Any) -> None:
    if tracer is not None:
        tracer.end(kind, actor)


def timed(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have a tracer hear when a method begins and ends."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed_method(self: Any, *args: Any) -> Any:
            if tracer is None:
                return method(self, *args)
            begin(kind, self)
            try:
                return method(self, *args)
            finally:
                end(kind, self)

        return timed_method

    return decorate

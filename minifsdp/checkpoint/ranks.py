"""Those who save and load together, and how they agree on what went wrong."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Outcome(NamedTuple, Generic[T]):
    """What one rank met: an error, or a result."""

    error: Exception | None
    result: T | None


class Ranks:
    """Every rank of the default process group, or this process alone.

    They talk in a gloo group of their own, so that checkpoints hold no GPU up; `behind` the
    training, in a thread, in one more: ranks may take the messages of two threads in turn, each in
    another order, and would wait for one another for ever.
    """

    def __init__(self, behind: bool = False) -> None:
        self.group = _own_group(behind) if dist.is_initialized() else None
        self.rank = 0 if self.group is None else dist.get_rank()
        self.size = 1 if self.group is None else dist.get_world_size()

    def gather(self, value: T) -> list[T]:
        """The `value` of each rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def outcomes(self, action: Callable[[], T]) -> list[Outcome[T]]:
        """Do `action` on every rank and tell every rank how it went everywhere."""
        error, result = None, None
        try:
            result = action()
        except (ValueError, OSError) as reason:
            error = reason
        except Exception as reason:  # of any class, and those may not be sent
            error = RuntimeError(f"{type(reason).__name__}: {reason}")
        return self.gather(Outcome(error, result))

    def each(self, action: Callable[[], T]) -> list[T]:
        """What `action` returns on each rank; the error of the lowest that failed, on all."""
        outcomes = self.outcomes(action)
        for error, _ in outcomes:
            if error is not None:
                raise error
        return [result for _, result in outcomes]

    def first(self, action: Callable[[], T]) -> T:
        """What `action`, done by rank 0 alone, returns there, on every rank; or its error."""
        return self.each(action if self.rank == 0 else lambda: None)[0]


# Weak: whoever holds a process group when Python ends holds its threads, too.
_own: weakref.WeakKeyDictionary[Any, dict[bool, Callable[[], Any]]] = weakref.WeakKeyDictionary()


def _own_group(behind: bool) -> dist.ProcessGroup:
    """A group for checkpoints, made by the first that asks for it; every rank calls it."""
    groups = _own.setdefault(dist.group.WORLD, {})
    group = groups[behind]() if behind in groups else None
    if group is None:
        group = dist.new_group(backend="gloo")
        groups[behind] = weakref.ref(group)
    return group

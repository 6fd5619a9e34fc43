"""The order of units: what runs next, what is under way, and when an iteration ends.

[Note: the schedule]
Forward of a unit: wait for its parameters, start gathering the unit that followed it last time,
compute, reshard. Backward: a hook on its outputs unshards it and starts the unit that ran before
it; when the gradients of its inputs are there its backward is over, so it reshards and reduces.
A unit whose inputs need no gradient (the embedding) is finished by a callback at the end of the
whole backward, as are units that backward never reached.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable

from .unit import State

if TYPE_CHECKING:
    from .hooks import ScheduledUnit


class Phase(Enum):
    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCED = "backward over, the whole one not yet"


def backward_is_running() -> bool:
    """Whether autograd is in a backward on this thread.

    It tells recomputation under activation checkpointing from a forward; nothing public does.
    """
    return torch._C._current_graph_task_id() != -1


class Runtime:
    """What all units below one root share."""

    def __init__(self, units: Sequence[ScheduledUnit]) -> None:
        self._units = [weakref.ref(unit) for unit in units]  # the root first
        self.forward_root: ScheduledUnit | None = None
        """The outermost unit whose forward is running."""
        self._entered: list[int] = []  # units in the order they began this forward
        self._expected: list[int] = []  # the same of the last one
        self._last_left: int | None = None
        self.callback_queued = False
        self._max_pending = 1
        self._pending: deque[ScheduledUnit] = deque()

    def units(self) -> list[ScheduledUnit]:
        """Live units, the root first, then in the order of the module tree."""
        return alive(self._units)

    def root(self) -> ScheduledUnit:
        """The unit whose modules contain all others'."""
        return self._units[0]()

    def at(self, index: int) -> list[ScheduledUnit]:
        """The unit at `index`, or none if its module was deleted."""
        return alive(self._units[index : index + 1])

    # Forward

    def begin_forward(self, unit: ScheduledUnit) -> bool:
        """Enter `unit`'s forward; returns whether it is the outermost."""
        recomputing = backward_is_running()
        # No unit contains itself or the root: if one seems to, the last forward raised.
        outermost_again = unit is self.forward_root and unit.phase is Phase.FORWARD
        forward_raised = outermost_again or (self.forward_root is not None and unit.index == 0)
        backward_raised = self.callback_queued and not recomputing
        if forward_raised or backward_raised:
            self.give_up()
        if not recomputing:
            self._entered.append(unit.index)
        if self.forward_root is not None:
            return False
        self.forward_root = unit
        return True

    def expected_after(self, unit: ScheduledUnit) -> list[ScheduledUnit]:
        """The unit that came next at this point of the last forward, to start it early."""
        here = len(self._entered)
        if backward_is_running() or here >= len(self._expected):
            return []
        return self.at(self._expected[here]) if self._expected[here - 1] == unit.index else []

    def left(self, unit: ScheduledUnit) -> None:
        """Note the order in which units end their forward: backward runs the other way."""
        unit.predecessors.append(self._last_left)
        self._last_left = unit.index

    def end_forward(self, output: Any) -> Any:
        """Leave the outermost forward."""
        self.forward_root = None
        if backward_is_running():
            return output
        self._expected, self._entered, self._last_left = self._entered, [], None
        for unit in self.units():
            if unit.is_partly_run():
                output = unit.leave_forward(output)
            if unit.state is State.GATHERING:
                unit.reshard()  # it was expected to run and did not
        return output

    # Backward

    def begin_backward(self) -> None:
        """Make sure that `end_backward` runs after the backward now under way."""
        if not self.callback_queued:
            self.callback_queued = True
            self._max_pending = max(unit.max_pending for unit in self.units())
            Variable._execution_engine.queue_callback(self.end_backward)

    def reduce(self, unit: ScheduledUnit) -> None:
        """Start a unit's reduction, after moving on the ones that are under way."""
        if unit in self._pending:
            unit.reducer.finish()
            self._pending.remove(unit)
        keep = self._max_pending - 1
        for older in list(self._pending)[: len(self._pending) - keep]:
            if not older.reducer.advance():
                self._pending.remove(older)
        while len(self._pending) > self._max_pending:
            self._pending.popleft().reducer.finish()
        if unit.reducer.start():
            self._pending.append(unit)

    def end_backward(self) -> None:
        """Finish units that no gradient of an input has finished, and every reduction."""
        self.callback_queued = False
        for unit in self.units():
            if unit.phase is not Phase.REDUCED or unit.reducer.has_gradients():
                unit.finish_backward()
            unit.phase = Phase.IDLE
        if not self.root().is_last_backward:
            return
        while self._pending:
            self._pending.popleft().reducer.finish()
        for unit in self.units():
            unit.settle()  # so that parameters are at rest when backward returns
            unit.predecessors.clear()
            if unit.state is State.GATHERING:
                unit.reshard()

    def give_up(self, accumulated: bool = False) -> None:
        """Give up an iteration: nothing under way, no gradient half reduced, all sharded.

        What earlier micro-batches have accumulated is kept, unless `accumulated` is given up too.
        """
        for unit in self.units():
            unit.give_up(accumulated)
        self._pending.clear()
        self.callback_queued = False
        self.forward_root = self._last_left = None
        self._entered = []


def alive(units: Sequence[weakref.ref[ScheduledUnit]]) -> list[ScheduledUnit]:
    return [unit for ref in units if (unit := ref()) is not None]

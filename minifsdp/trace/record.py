"""`record`: hears the engine while a block of code runs, and makes a Trace of it.

[Note: little is done while it runs]
A tracer that computes changes what it times. While the block runs, a stamp, names and a few
integers are put on one flat list, so that Python's garbage collector finds next to nothing new, and
a unit is asked only for what can have changed. Everything else is worked out afterwards.
"""

from __future__ import annotations

import socket
import threading
import time
import weakref
from typing import Any

import torch.distributed as dist
from torch.optim import optimizer as optimizers

from .. import collectives, events
from .clock import Clock, clock
from .spans import Entry, RankTrace, spans
from .trace import Trace, on_one_clock

# Kinds after which the actor, a unit or a reducer, holds more or less than before.
_MOVING = frozenset(("unshard", "wait", "reshard", "accumulate", "reduce"))
_FIELDS = 7  # of a line of the log


class Recorder:
    """A tracer and a listener that writes a log. See `events.Tracer`."""

    def __init__(self, clock: Clock) -> None:
        self._stamp = clock.stamp
        self.log: list[Any] = []
        """Lines, end to end: a stamp and what else makes an Entry."""
        self.units: dict[str, weakref.ref[Any]] = {}
        """The units met last, by name."""
        self.iterations: list[int] = []
        """The lines at which a forward of the whole model began."""
        self._met = False  # whether the root's gather for this forward has been seen
        self.peers: tuple[int, ...] = ()
        self._in_backward: dict[str, Any] = {}
        self._stepping: set[int] = set()  # threads on which a unit steps

    def _write(
        self,
        edge: str,
        kind: str,
        unit: str,
        held: dict[str, int] | None = None,
        nbytes: int = 0,
        thread: int = 0,
    ) -> None:
        self.log.extend((self._stamp(), edge, kind, unit, thread, held, nbytes))

    def lines(self) -> list[tuple[Any, ...]]:
        """What has been written so far."""
        fields = iter(self.log[:])
        return list(zip(*[fields] * _FIELDS, strict=True))

    def begin(self, kind: str, actor: Any) -> None:
        thread = 0
        if kind == "unshard" and _begins_a_forward(actor):
            self._meet(actor)
            self._met = True
        elif kind == "forward" and _begins_a_forward(actor):
            if not self._met:  # it was whole already
                self._meet(actor)
            self._met = False
        elif kind == "backward":
            self._in_backward[actor.name] = actor
        elif kind == "optimizer":
            self._stepping.add(threading.get_ident())
            thread = _is_behind()
        self._write("begin", kind, actor.name, thread=thread)

    def end(self, kind: str, actor: Any) -> None:
        if kind in _MOVING:
            held = actor.held()
            held["idle"] = collectives.idle_nbytes()
            self._write("end", kind, actor.name, held)
            return
        thread = _is_behind() if kind == "optimizer" else 0
        self._write("end", kind, actor.name, thread=thread)
        if kind == "backward":
            for unit in self._in_backward.values():
                self._write("held", kind, unit.name, unit.reducer.held())
            self._in_backward.pop(actor.name, None)
        elif kind == "optimizer":
            self._stepping.discard(threading.get_ident())
            self._reduced(actor.name)

    def _meet(self, root: Any) -> None:
        """At the beginning of each forward of the whole model, note what every unit holds."""
        self.iterations.append(len(self.log) // _FIELDS)
        self._write("iteration", "", root.name)
        shards = root.home.shards
        self.peers = tuple(dist.get_process_group_ranks(shards.group))
        for each in root.runtime.units():
            held = each.reducer.held_reduced()
            known = self.units.get(each.name)
            if known is None or known() is not each:
                self.units[each.name] = weakref.ref(each)
                held |= {**each.held(), **each.reducer.held()}
            self._write("held", "forward", each.name, held)

    def hear(self, event: events.Event) -> None:
        """Listen: what moved how many bytes, and when gradients have been handed out."""
        if event.kind in ("all_gather", "reduce_scatter", "all_reduce"):
            self._write("moved", event.kind, event.unit, nbytes=event.nbytes)
        elif event.kind == "reduced":
            self._reduced(event.unit)

    def _reduced(self, name: str) -> None:
        unit = self.units[name]() if name in self.units else None
        if unit is not None:
            self._write("held", "reduced", name, unit.reducer.held_reduced())

    def step_begins(self, *_: Any) -> None:
        """Before any torch optimizer steps."""
        if threading.get_ident() not in self._stepping:
            self._write("begin", "optimizer", "optimizer")

    def step_ends(self, *_: Any) -> None:
        if threading.get_ident() not in self._stepping:
            self._write("end", "optimizer", "optimizer")


def _begins_a_forward(unit: Any) -> bool:
    """Whether a forward of the whole model has just begun, and this is its root."""
    return unit.index == 0 and unit.runtime is not None and unit.runtime.forward_root is unit


def _is_behind() -> int:
    """1 on the thread on which units step behind training, 0 on autograd's and all others."""
    return int(threading.current_thread().name.startswith("minifsdp-optimizer"))


class record:
    """Record what the engine does inside the block: `with record() as trace:`, on all ranks.

    When the block ends, rank 0 gets every rank's record; there, `trace.save` and `print(trace)`
    show all. That is a message like any other: all ranks must end the block. A block that raises
    sends nothing and leaves this rank its own record, while the others wait for it.

    Record whole steps of one model, and a few of them: an event takes about half a KiB.

    all_ranks: False keeps each rank's record to itself, and nothing is sent.
    clock: "host" or "device" (times on the stream that computes); by default the device's, if there
        is an accelerator.

    Raises RuntimeError inside another `record`, ValueError for a clock that is not there.
    """

    def __init__(self, all_ranks: bool = True, clock: str | None = None) -> None:
        self._all_ranks, self._clock_name = all_ranks, clock

    def __enter__(self) -> Trace:
        if events.tracer is not None:
            raise RuntimeError("a trace is being recorded already: end its block first")
        self._clock = clock(self._clock_name)
        self._recorder = recorder = Recorder(self._clock)
        self._began = time.perf_counter(), time.time()
        self._write_edge()
        events.listeners.append(recorder.hear)
        self._hooks = [
            optimizers.register_optimizer_step_pre_hook(recorder.step_begins),
            optimizers.register_optimizer_step_post_hook(recorder.step_ends),
        ]
        self._trace = Trace()
        events.tracer = recorder
        return self._trace

    def __exit__(self, kind: type | None, *_: object) -> None:
        events.tracer = None
        events.listeners.remove(self._recorder.hear)
        for hook in self._hooks:
            hook.remove()
        self._write_edge()
        mine = self._ranks_own()
        self._trace.take(mine.rank, [mine])
        if self._all_ranks and kind is None and dist.is_initialized():
            gathered = [None] * dist.get_world_size() if mine.rank == 0 else None
            dist.gather_object((mine, self._began[1]), gathered)
            if gathered is not None:
                self._trace.take(0, on_one_clock(gathered))
            self._trace.is_elsewhere = mine.rank != 0
        del self._recorder, self._hooks

    def _write_edge(self) -> None:
        """The beginning or the end of the log."""
        self._recorder._write("edge", "", "")

    def _ranks_own(self) -> RankTrace:
        lines = self._recorder.lines()
        seconds = self._clock.seconds([line[0] for line in lines])
        entries = [Entry(at, *line[1:]) for at, line in zip(seconds, lines, strict=True)]
        done, held = spans(entries, seconds[-1])
        names = dict.fromkeys([*self._recorder.units, *(event.unit for event in done)])
        if "optimizer" in names:  # last
            names["optimizer"] = names.pop("optimizer")
        return RankTrace(
            rank=dist.get_rank() if dist.is_initialized() else 0,
            host=socket.gethostname(),
            seconds=seconds[-1],
            events=done,
            held=held,
            units=list(names),
            iterations=[seconds[index] for index in self._recorder.iterations],
            peers=self._recorder.peers,
            mailbox_bytes=collectives.mapped_nbytes(),
            clock=self._clock.name,
            began=self._began[0],
        )

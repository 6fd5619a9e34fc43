"""A rank that does not arrive is named, with where it stands, and every rank ends.

    with Watchdog(timeout_seconds=600) as watchdog:
        for step in range(steps):
            watchdog.at(step, "reading data")
            ...
            watchdog.at(step, "training")

[Note: how ranks watch each other]
The main thread only notes where it is. A thread beside it says so to a store, several times in the
timeout, reads what all ranks say, and judges (see `arrivals`). The first to find one missing puts
its verdict into the store, so that there is one, and reports it; ranks that it names show where in
Python they stand. All wait until all have spoken: a launcher that sees one process end kills the
others. Calls to a store that froze never return, so a second thread watches the first.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch.distributed as dist

from . import collectives, events
from .arrivals import Arrivals, Status, Verdict

EXIT_CODE = 85
"""Of processes that a watchdog ends; neither Python nor shells nor sysexits.h use it."""
_VERDICT, _TOLD = "verdict", "told"
_COLLECTIVES = tuple(str(Path(module.__file__).parent) + os.sep for module in (dist, collectives))
_SPEAK_SECONDS = 2.0  # for printing, and for a last word to the store
_entered = count()  # watchdogs of this process


class _Here:
    """A phase that the main thread is in, and what the engine did in it."""

    def __init__(self, step: int | None, phase: str, patience_seconds: float | None) -> None:
        self.step, self.phase, self.patience_seconds = step, phase, patience_seconds
        self.steps, self.phases, self.events = 0, 0, 0  # passed: see `arrivals`
        self.last: events.Event | None = None
        self.last_pass: events.Event | None = None  # forward or backward

    def hear(self, event: events.Event) -> None:
        self.events += 1
        self.last = event
        if event.kind == "forward" or event.kind == "backward":
            self.last_pass = event

    def where(self) -> str:
        """As in "step 3, training, forward of layers.1, then reshard of layers.1"."""
        told = [self.phase] if self.step is None else [f"step {self.step}", self.phase]
        if self.last_pass is not None:
            told.append(f"{self.last_pass.kind} of {self.last_pass.unit}")
        if self.last is not self.last_pass:
            told.append(f"then {self.last.kind} of {self.last.unit}")
        return ", ".join(told)


class Watchdog:
    """Ends the run on all ranks when one does not arrive; every rank enters its own.

    timeout_seconds: how long others may wait for a rank; 0 turns the watchdog off.
    store: where ranks meet; nothing else may wait in it. By default that at MASTER_ADDR and
        MASTER_PORT, over a connection of the watchdog's own.

    Processes exit with `EXIT_CODE`, soon after the timeout. Raises ValueError for a timeout that
    is none and, when entered, where ranks have no store to meet in.
    """

    def __init__(self, timeout_seconds: float = 600.0, store: dist.Store | None = None) -> None:
        if not timeout_seconds >= 0:
            raise ValueError(
                f"timeout_seconds is {timeout_seconds}: give seconds, or 0 for no watchdog"
            )
        self._timeout, self._given_store = timeout_seconds, store
        self._interval = min(3.0, max(0.2, timeout_seconds / 10))  # between two looks
        self._here: _Here | None = None
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Watchdog:
        if self._here is not None:
            raise RuntimeError("this watchdog is entered already")
        if dist.is_initialized():
            self._rank, world_size = dist.get_rank(), dist.get_world_size()
        else:
            self._rank = int(os.environ.get("RANK", 0))
            world_size = int(os.environ.get("WORLD_SIZE", 1))
        if self._timeout > 0 and world_size > 1:
            self._watch(world_size)
        self._here = _Here(None, "starting", None)
        for thread in self._threads:
            thread.start()
        return self

    def _watch(self, world_size: int) -> None:
        # torchrun keeps one store over all its starts.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        store = self._given_store or self._connect()
        self._store = dist.PrefixStore(f"minifsdp.watchdog/{start}/{next(_entered)}", store)
        self._statuses = [Status()] * world_size
        self._process = f"process {os.getpid()} on {socket.gethostname()}"
        self._beat = 0
        self._end: str | None = None
        self._ending, self._trouble = False, "it does not answer"
        self._stop = threading.Event()
        self._watched = threading.get_ident()
        self._threads = [
            threading.Thread(target=work, name=f"watchdog{work.__name__}", daemon=True)
            for work in (self._talk, self._guard)
        ]
        events.listeners.append(self._hear)

    def _connect(self) -> dist.Store:
        if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
            raise ValueError(
                "a watchdog of several ranks needs a store to meet in: set MASTER_ADDR and "
                "MASTER_PORT, as torchrun does, or pass store="
            )
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*address, is_master=False, wait_for_workers=False)
        store.set_timeout(timedelta(days=1))  # the guard's is the one that counts
        return store

    def at(self, step: int | None, phase: str, patience_seconds: float | None = None) -> None:
        """Note that this rank begins `phase` of `step`; all ranks pass the same ones.

        step: None where there is none. patience_seconds: how long others may wait for this rank in
        this phase, and all of them stay in it; None for the usual, math.inf for ever.
        """
        if self._here is None:
            raise RuntimeError("at() outside of the watchdog: call it inside `with Watchdog(...)`")
        if patience_seconds is not None and not patience_seconds > 0:
            raise ValueError(f"patience_seconds is {patience_seconds}: give None or more than 0")
        before, here = self._here, _Here(step, phase, patience_seconds)
        same = step == before.step
        here.steps = before.steps + (not same)
        here.phases = before.phases + 1 if same else 0
        self._here = here  # only now, as another thread reads it

    def _hear(self, event: events.Event) -> None:
        self._here.hear(event)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the run, because of `error` if there is one; others may go on."""
        if self._threads:
            events.listeners.remove(self._hear)
            said = "" if error is None else f"{type(error).__name__}: {error}"
            self._end = said.partition("\n")[0]
            self._stop.set()
            for thread in self._threads:
                thread.join(_SPEAK_SECONDS)
            if self._ending:  # this process must not seem to have succeeded
                time.sleep(_SPEAK_SECONDS + 2 * self._interval)
                os._exit(EXIT_CODE)
        self._here, self._threads = None, []

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    # On the thread that talks to others

    def _talk(self) -> None:
        arrivals, before = Arrivals(len(self._statuses), self._timeout), time.monotonic()
        closing = False
        try:
            while not closing:
                closing = self._stop.wait(self._interval if self._beat else 0)
                self._exchange()
                now = time.monotonic()
                # A machine that slept counts the time of a few looks.
                verdict = arrivals.look(self._statuses, min(now - before, 3 * self._interval))
                before = now
                if not self._end and (verdict or self._store.check([_VERDICT])):
                    self._end_all(verdict)
        except RuntimeError as error:  # the store has gone: the guard tells
            self._trouble = str(error).partition("\n")[0]

    def _waits(self) -> bool:
        """Whether the watched thread is in a collective, as far as its innermost call tells."""
        frame = sys._current_frames().get(self._watched)
        return frame is not None and frame.f_code.co_filename.startswith(_COLLECTIVES)

    def _exchange(self) -> None:
        """Say where this rank is, and hear it of all that have ever said so."""
        here, end = self._here, self._end
        place = here.steps, here.phases, here.events, self._waits()
        mine = self._beat + 1, place, here.where(), here.patience_seconds, end, self._process
        self._store.set(str(self._rank), json.dumps(mine))
        known = [r for r, s in enumerate(self._statuses) if s.beat or self._store.check([str(r)])]
        statuses = list(self._statuses)
        said = self._store.multi_get([str(r) for r in known])
        for rank, (beat, theirs, *others) in zip(known, map(json.loads, said), strict=True):
            statuses[rank] = Status(beat, tuple(theirs), *others)
        self._statuses = statuses
        self._beat += 1

    def _end_all(self, verdict: Verdict | None) -> None:
        """Report, unless another rank does, wait until all have spoken, and exit."""
        self._ending = True
        try:
            mine = json.dumps([self._rank, *verdict]) if verdict else ""
            try:
                first = self._store.compare_set(_VERDICT, "", mine)
            except RuntimeError:  # the store has just gone
                first = mine
            reporter, report, missing, stacks, living = json.loads(first)
            said = [report] if reporter == self._rank else []
            if self._rank in missing:
                said.append(f"rank {self._rank}: this rank is the one")
            if self._rank in stacks:
                said.append(f"rank {self._rank} stands here:\n{self._stack()}")
            speak(said)
            deadline = time.monotonic() + _SPEAK_SECONDS + 2 * self._interval
            told = self._store.add(_TOLD, 1)
            while told < len(living) and time.monotonic() < deadline:
                time.sleep(0.05)
                told = self._store.add(_TOLD, 0)
        finally:
            os._exit(EXIT_CODE)

    def _stack(self) -> str:
        """Where in Python the thread that entered stands, its innermost call last."""
        frame = sys._current_frames().get(self._watched)
        return "".join(traceback.format_stack(frame)).rstrip() if frame else "(it has ended)"

    # On the thread that watches the other one

    def _guard(self) -> None:
        heard, waited, before = 0, 0.0, time.monotonic()
        while not self._stop.wait(self._interval):
            now = time.monotonic()
            waited, before = waited + min(now - before, 3 * self._interval), now
            if self._beat != heard:
                heard, waited = self._beat, 0.0
            elif waited >= self._timeout:
                return self._end_alone(waited)

    def _end_alone(self, waited: float) -> None:
        """Exit without the others, whom this rank cannot reach."""
        ends = {r: s.end for r, s in enumerate(self._statuses) if s.end is not None}
        if ends and not any(ends.values()):
            return  # a run that is over takes its store along
        lost = f"rank {self._rank} cannot reach the run's store for {waited:.0f} s"
        said = [f"{lost} ({self._timeout:g} s allowed): {self._trouble}", self._here.where()]
        said += [f"rank {r} has left with {end}" for r, end in ends.items() if end]
        speak(["; ".join(said)])
        os._exit(EXIT_CODE)


def speak(said: list[str]) -> None:
    """Print to stderr before this process exits, whoever may hold its streams."""

    def write() -> None:
        with open(2, "w", closefd=False) as stderr:  # a progress bar may be on the line
            stderr.write("".join(f"\nwatchdog: {text}\n" for text in said))
        sys.stdout.flush()

    speaking = threading.Thread(target=write, daemon=True)
    speaking.start()
    speaking.join(_SPEAK_SECONDS)

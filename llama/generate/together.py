"""How rank 0, which talks to a person, leads the other ranks, however long the person thinks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from enum import IntEnum
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

PULSE_SECONDS = 1.0  # between two messages of a rank 0 that waits


class Word(IntEnum):
    """What rank 0 says to the others."""

    WAIT = 0  # nothing yet: listen again
    REPLY = 1  # it has a prompt: take part in the forwards of its reply
    END = 2


class Ranks:
    """All ranks of the default process group, or this process alone.

    [Note: waiting for a person]
    A collective that waits longer than its group's timeout fails, and a person may think for an
    hour. So rank 0 reads on a thread, and as long as nothing comes it says WAIT every second: no
    collective ever waits for a person. Only words pass between ranks, never the text: with no
    prompt of their own the others need none to do the forwards that rank 0's reply needs.
    """

    def __init__(self, device: torch.device) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self.world_size = dist.get_world_size() if several else 1
        self.rank = dist.get_rank() if several else 0
        # torchrun, which gets a terminal's Ctrl-C in the place of its processes, ends them then.
        self.launched = several and "TORCHELASTIC_RUN_ID" in os.environ
        self._device = device

    def say(self, word: Word) -> None:
        """Rank 0 says `word` to all others, who listen."""
        if self.world_size > 1:
            dist.broadcast(torch.tensor(int(word), device=self._device), src=0)

    def listen(self) -> Word:
        """The next word of rank 0."""
        word = torch.zeros((), dtype=torch.int64, device=self._device)
        dist.broadcast(word, src=0)
        return Word(word.item())

    def read(self, read: Callable[[], str | None], interrupted: Callable[[], object]) -> str | None:
        """What `read` returns or raises, on rank 0; `interrupted` is called at each Ctrl-C."""
        if self.world_size == 1:
            return read()
        result: Future[str | None] = Future()

        def work() -> None:
            try:
                result.set_result(read())
            except BaseException as failure:
                result.set_exception(failure)

        with Interrupts() as interrupts:
            threading.Thread(target=work, name="reader", daemon=True).start()
            while not wait([result], PULSE_SECONDS).done:
                self.say(Word.WAIT)
                if interrupts.take():
                    interrupted()
        return result.result()


class Interrupts:
    """Notes Ctrl-C, while it is entered, instead of raising KeyboardInterrupt.

    With `insistently`, a second one that nobody has taken note of raises it after all.
    """

    def __init__(self, insistently: bool = False) -> None:
        self.noted = False
        self._insistently = insistently
        self._before: Any = None

    def take(self) -> bool:
        """Whether there was one since the last time."""
        noted, self.noted = self.noted, False
        return noted

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # others get no signals
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted and self._insistently:
            raise KeyboardInterrupt
        self.noted = True

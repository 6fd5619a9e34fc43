"""Plays scenarios of tests/watched.py, several at a time, and writes down how each ended.

    python stage_watched.py '{"scenario": ranks, ...}' FOLDER

Processes are forked from this one, which has imported torch once for all, and no launcher looks
after them; a process for each scenario keeps its store.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
import watched


def fork(work: Callable[[], None], output: Path, **environment: object) -> int:
    """The id of a new process that does `work`, with what it prints in a file."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update({name: str(value) for name, value in environment.items()})
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def keep_store(port: int) -> None:
    """As torchrun does, in no rank's process."""
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    time.sleep(watched.LONG)
    del store


class Play:
    """One scenario's processes."""

    def __init__(self, scenario: str, world_size: int, folder: Path) -> None:
        self.name, _, collectives = scenario.partition(" ")
        self.folder, self.stamp = folder, folder / "stamp"
        self.deadline = time.monotonic() + 25
        folder.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        agent = self.name != "loses_the_store"
        self.stores = [fork(lambda: keep_store(port), folder / "store")] if agent else []
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": world_size,
            "TORCHELASTIC_USE_AGENT_STORE": agent,
            "STAMP": self.stamp,
            "COLLECTIVES": collectives or "auto",
        }
        self.codes: dict[int, int | None] = {}  # by process
        for rank in range(world_size):
            file, about = folder / f"rank-{rank}", environment | {"RANK": rank}
            self.codes[fork(lambda: watched.run(self.name), file, **about)] = None
        self.sent: set[tuple[int, int]] = set()
        self.seconds: float | None = None

    def happened_at(self) -> float | None:
        text = self.stamp.read_text() if self.stamp.exists() else ""
        return float(text) if text else None

    def running(self) -> list[int]:
        for pid, code in self.codes.items():
            if code is None:
                ended, status = os.waitpid(pid, os.WNOHANG)
                self.codes[pid] = os.waitstatus_to_exitcode(status) if ended else None
        return [pid for pid, code in self.codes.items() if code is None]

    def direct(self, running: list[int]) -> None:
        """Do to the processes what they cannot do to themselves."""
        now, happened_at = time.monotonic(), self.happened_at()
        if self.name == "hang_in_data" and happened_at and len(running) < len(self.codes):
            for pid in running:
                self.cue(now, 0, signal.SIGKILL, pid)
        elif self.name == "freezes" and running == list(self.codes)[-1:]:
            self.seconds = self.seconds or now - happened_at
            self.cue(now, 0, signal.SIGCONT, running[0])
        elif self.name == "store_freezes" and happened_at:
            self.cue(now, 0, signal.SIGSTOP, *self.stores)
        elif self.name == "machine_sleeps" and happened_at:
            # Not all at once, or what each said last would be news to the others afterwards.
            first, second, store = *self.codes, *self.stores
            self.cue(now - happened_at, 0.0, signal.SIGSTOP, second)
            self.cue(now - happened_at, 0.4, signal.SIGSTOP, store)
            self.cue(now - happened_at, 0.8, signal.SIGSTOP, first)
            self.cue(now - happened_at, 0.8 + 1.5 * watched.TIMEOUT, signal.SIGCONT, first)
            self.cue(now - happened_at, 1.0 + 1.5 * watched.TIMEOUT, signal.SIGCONT, store)
            self.cue(now - happened_at, 1.1 + 1.5 * watched.TIMEOUT, signal.SIGCONT, second)

    def cue(self, now: float, when: float, number: int, pid: int) -> None:
        """Send a signal once, when it is time, if its process is still there."""
        if now >= when and (number, pid) not in self.sent:
            self.sent.add((number, pid))
            if pid in self.stores or self.codes[pid] is None:
                os.kill(pid, number)

    def ending(self) -> dict[str, object] | None:
        """How it ended, once it has."""
        running = self.running()
        self.direct(running)
        if running and time.monotonic() < self.deadline:
            return None
        codes = list(self.codes.values())
        if self.seconds is None and self.happened_at():
            self.seconds = time.monotonic() - self.happened_at()
        for pid in [*running, *self.stores]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        files = [self.folder / f"rank-{rank}" for rank in range(len(codes))]
        outputs = [file.read_text() if file.exists() else "" for file in files]
        return {"codes": codes, "outputs": outputs, "seconds": self.seconds}


def play(scenarios: dict[str, int], folder: Path) -> None:
    """Play several at a time, and put how each ended into a file of `folder`."""
    waiting, on_stage = list(scenarios.items()), []
    while waiting or on_stage:
        if waiting and len(on_stage) < 6:
            scenario, world_size = waiting.pop(0)
            place = folder / scenario.replace(" ", "-")
            on_stage.append(Play(scenario, world_size, place))
        for one in list(on_stage):
            ending = one.ending()
            if ending is not None:
                on_stage.remove(one)
                partial = one.folder / "ending.part"
                partial.write_text(json.dumps(ending))
                partial.rename(one.folder / "ending.json")
        time.sleep(0.02)


if __name__ == "__main__":
    play(json.loads(sys.argv[1]), Path(sys.argv[2]))

"""Running tests on a mutation."""

from __future__ import annotations

import array
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from .mutation import Mutation
from .sandbox import ROOT, sandbox

LIMIT_SECONDS = 100.0  # of a run, before it counts as hung
_FAILED, _INTERRUPTED = 1, 2  # pytest's exit codes: of tests, of their collection
_NO_TESTS = 5


class Outcome(NamedTuple):
    """What tests said of a mutation."""

    killed_by: str | None
    """The first test that failed, hung or died; None if all passed."""
    seconds: float
    output: str
    """pytest's."""
    hung: bool = False
    """Whether the test was ended because it took too long."""


def run(
    mutation: Mutation | None, tests: Sequence[str], limit_seconds: float = LIMIT_SECONDS
) -> Outcome:
    """Run `tests` on the tree with one line changed, up to the first failure.

    mutation: None for the tree as it is. tests: as pytest names them, "tests/test_layout.py" or
        "tests/test_layout.py::test_name"; its options may stand among them.

    Nothing in the tree itself is touched; may be called from several threads. Raises StaleError for
    a mutation that does not fit the tree, ValueError for tests that are not there.
    """
    began = time.monotonic()
    with sandbox(mutation) as folder:
        output, running = folder.parent / "output.txt", folder.parent / "running.txt"
        request = {
            "folder": str(folder),
            "arguments": ["-x", *tests],
            "output": str(output),
            "running": str(running),
        }
        result = _ask(request, limit_seconds)
        text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
        under_way = running.read_text(encoding="utf-8") if running.exists() else None
    seconds = time.monotonic() - began
    if result is None:
        return Outcome(under_way or f"{tests[0]} (its start)", seconds, text, hung=True)
    if not result:
        return Outcome(under_way or f"{tests[0]} (its start)", seconds, text)
    if result["code"] not in (0, _FAILED, _INTERRUPTED, _NO_TESTS):
        raise ValueError(f"pytest does not run {' '.join(tests)}:\n{text}")
    if result["code"] == _NO_TESTS:
        raise ValueError(f"there are no such tests: {' '.join(tests)}\n{text}")
    return Outcome(result["failed"], seconds, text)


class _Server:
    """The process that forks others, and how it is asked to."""

    def __init__(self) -> None:
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mutations.server", str(there.fileno())],
            pass_fds=[there.fileno()],
            env=environment,
            cwd=ROOT / "tests",
            stdin=subprocess.DEVNULL,
        )
        there.close()

    def ask(self, request: dict[str, object], answer_fd: int) -> None:
        fds = array.array("i", [answer_fd])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
        self._socket.sendmsg([json.dumps(request).encode()], rights)

    def end(self) -> None:
        """End it, and what it has forked."""
        self._socket.close()
        self.process.wait()


_starting = threading.Lock()


@functools.cache
def _server() -> _Server:
    return _Server()


def stop() -> None:
    """End all that is running."""
    with _starting:
        if _server.cache_info().currsize:
            _server().end()


def _ask(request: dict[str, object], limit_seconds: float) -> dict | None:
    """The server's answer; empty if pytest's process died, None if it was ended at the limit."""
    with _starting:
        server = _server()
    mine, theirs = os.pipe()
    try:
        server.ask(request, theirs)
    finally:
        os.close(theirs)
    answer, is_over, deadline = b"", False, time.monotonic() + limit_seconds
    poll = select.poll()
    poll.register(mine)
    try:
        while not is_over and (left := deadline - time.monotonic()) > 0 and poll.poll(1000 * left):
            piece = os.read(mine, 2**16)
            answer, is_over = answer + piece, not piece
    finally:
        os.close(mine)
    session, _, result = answer.decode().partition("\n")
    if result:
        return json.loads(result)
    if session:
        _end(int(session))
    return {} if is_over else None


def _end(session: int) -> None:
    """End a run's processes that are still there: it leads a process group of all of them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)

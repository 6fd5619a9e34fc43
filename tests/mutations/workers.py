"""Ranks for `pool.Pool`, forked from a process that has imported torch and nothing of the tree."""

from __future__ import annotations

import array
import ctypes
import os
import pickle
import select
import signal
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

_LENGTH = 2**17  # of a request, at most
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Forge:
    """Stands in for the module `multiprocessing` in `pool`, and for a context of it."""

    def __init__(self, not_theirs: int) -> None:
        """Fork the process that forks ranks, before anything of the tree is loaded.

        not_theirs: a file descriptor that ranks must not hold open.
        """
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._socket.close()
            os.close(not_theirs)
            end_with_parent()
            _forge(there)
        there.close()
        self.Pipe = Pipe

    def get_context(self, kind: str) -> Forge:
        return self

    def Process(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> _Rank:
        return _Rank(self._socket, target, args)


class _Rank:
    """What `pool` uses of a multiprocessing.Process, whose last argument is a connection."""

    def __init__(self, forge: socket.socket, target: Callable[..., None], args: tuple) -> None:
        self._forge, self._target, self._args = forge, target, args

    def start(self) -> None:
        *args, pipe = self._args
        request = pickle.dumps((dict(os.environ), self._target, args))
        fds = array.array("i", [pipe.fileno()])
        self._forge.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        self.pid = int.from_bytes(self._forge.recv(8), "little")
        self._ending = os.pidfd_open(self.pid)

    def is_alive(self) -> bool:
        poll = select.poll()
        poll.register(self._ending, select.POLLIN)
        return not poll.poll(0)

    def kill(self) -> None:
        if self.is_alive():
            signal.pidfd_send_signal(self._ending, signal.SIGKILL)

    def join(self) -> None:
        poll = select.poll()
        poll.register(self._ending, select.POLLIN)
        poll.poll()


def _forge(requests: socket.socket) -> None:
    """Fork a rank for each request until the other side has gone; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for ranks
    while True:
        request, fds, _, _ = socket.recv_fds(requests, _LENGTH, 1)
        if not request:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            requests.close()
            end_with_parent()
            _serve(request, fds[0])
        os.close(fds[0])
        requests.send(pid.to_bytes(8, "little"))


def _serve(request: bytes, fd: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code = 1
    try:
        environment, target, args = pickle.loads(request)
        os.environ.clear()
        os.environ.update(environment)
        target(*args, Connection(fd))
        code = 0
    finally:
        os._exit(code)

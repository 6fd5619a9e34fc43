"""Mailboxes in shared memory: on one host each rank writes its own, and all others read it.

[Note: how a mailbox is shared safely]
A mailbox has a page of control words and two halves of equal size. Messages travel as chunks of at
most a half, numbered from 0 for the life of the group; chunk k lies in half k % 2. A rank keeps two
counters in its own control page: `written` chunks of its own, and `read` chunks of everybody's. It
writes chunk k once every peer has read chunk k - 2, so no half is written while somebody reads it,
and it reads chunk k once the peer has written it. What was sent is a copy: the sender may change
its shard at once. Every rank takes part in the same messages in the same order, as with any
collective; each chunk carries a label, so that ranks which do not are told and not misled.

The memory has no name: a file that never was in a folder (O_TMPFILE), which peers open through its
owner's /proc entry, so nothing can be left behind, however a process ends, and no other user can
open it. All of it is reserved before the first message: a full file system is known then, and never
by a signal in the middle of a copy. A wait looks at its peers' processes, so a dead one is named.

Python can issue no memory barrier. On x86-64 stores become visible in order, so the counter that is
written after the bytes is seen after them; on other processors this file is not used.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import select
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from . import futex
from .packed import Peers

_FOLDER = "/dev/shm"  # where Linux keeps its shared-memory file system
_CONTROL_BYTES = 4096
_LANE_BYTES, _MOST_HALF_BYTES = 2**18, 2**20  # a half has a lane for each peer, up to a limit
_TOKEN, _READ, _WRITTEN, _LABELS = 0, 8, 16, 24  # control words, a cache line apart
_LOOKS, _FEW_LOOKS = 2000, 20  # at a counter before sleeping, with a core for each rank or not
_NAP_SECONDS = 0.05  # between looks at whether peers live


class Unavailable(Exception):
    """Why this group cannot share memory; the same on all its ranks."""

    def __init__(self, reasons: dict[int, str]) -> None:
        super().__init__("; ".join(f"rank {rank}: {why}" for rank, why in reasons.items()))


class DifferentHosts(Unavailable):
    """The ranks are not on one host, which is nothing to warn about."""


class _Invitation(NamedTuple):
    """How peers find a mailbox."""

    host: str
    pid: int
    fd: int
    token: int


class _Mailbox:
    """One rank's mailbox, mapped into this process."""

    def __init__(self, fd: int, half_bytes: int) -> None:
        memory = mmap.mmap(fd, _CONTROL_BYTES + 2 * half_bytes)
        self.words = memoryview(memory)[:_CONTROL_BYTES].cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        data = torch.frombuffer(memory, dtype=torch.uint8, offset=_CONTROL_BYTES)
        self.halves = data.split(half_bytes)

    def say(self, word: int, count: int) -> None:
        """Set one of this rank's counters, and wake those who wait for it."""
        self.words[word] = count
        futex.wake(self.address + 8 * word)


class Mailboxes:
    """The mailboxes of a process group's ranks, as one rank sees them.

    Making them is collective. Raises Unavailable, on all ranks alike.
    """

    def __init__(self, peers: Peers) -> None:
        self.rank, self.size = peers.rank, peers.size  # not the group, which would never be freed
        self._ranks = dist.get_process_group_ranks(peers.group)
        self._others = [(peers.rank + step) % peers.size for step in range(1, peers.size)]
        self._timeout_seconds = _timeout_seconds(peers.group)
        self.half_bytes = min(_LANE_BYTES * (peers.size - 1), _MOST_HALF_BYTES)
        self.scratch = torch.empty(self.half_bytes if peers.size > 2 else 0, dtype=torch.uint8)
        """For sums of a chunk, (half_bytes,) uint8; two ranks need none."""
        crowded = dist.get_world_size() > len(os.sched_getaffinity(0))
        self._looks = _FEW_LOOKS if crowded else _LOOKS
        self._next = 0  # the number of the chunk that this rank writes next
        self._done = 0  # chunks that it has read
        fd, token, failure = -1, secrets.randbits(62), ""
        try:
            if _is_supported():
                fd = _reserve(_CONTROL_BYTES + 2 * self.half_bytes)
                self._mine = _Mailbox(fd, self.half_bytes)
                self._mine.words[_TOKEN] = token
        except OSError as error:
            failure = f"{error.strerror} in {_FOLDER}"
        try:
            mine = failure or _Invitation(_host(), os.getpid(), fd, token)
            self._open_others(self._agree(mine, peers), peers)
        finally:
            if fd >= 0:
                os.close(fd)  # the mapping stays

    def _agree(self, mine: object, peers: Peers) -> list:
        """What every rank says. Raises Unavailable if one says, as a string, why it cannot."""
        said: list = [None] * peers.size
        dist.all_gather_object(said, mine, group=peers.group)
        failed = {self._ranks[r]: why for r, why in enumerate(said) if isinstance(why, str)}
        if failed:
            raise Unavailable(failed)
        return said

    def _open_others(self, invitations: list[_Invitation], peers: Peers) -> None:
        if len({invitation.host for invitation in invitations}) > 1:
            raise DifferentHosts({})
        self._boxes: list[_Mailbox] = [self._mine] * peers.size
        self._processes: dict[int, int] = {}  # a file descriptor that tells of its end: rank
        self._endings = select.poll()
        failure = None
        try:
            for rank in self._others:
                self._open(rank, invitations[rank])
        except OSError as error:
            failure = f"cannot open the mailbox of rank {self._ranks[rank]}: {error.strerror}"
        self._agree(failure, peers)  # and nobody closes a mailbox before all have opened it

    def _open(self, rank: int, invitation: _Invitation) -> None:
        fd = os.open(f"/proc/{invitation.pid}/fd/{invitation.fd}", os.O_RDWR)
        try:
            box = self._boxes[rank] = _Mailbox(fd, self.half_bytes)
        finally:
            os.close(fd)
        if box.words[_TOKEN] != invitation.token:
            raise OSError(0, "it is another process's")
        ending = os.pidfd_open(invitation.pid)
        self._processes[ending] = rank
        self._endings.register(ending, select.POLLIN)

    @property
    def nbytes(self) -> int:
        """Memory mapped for them into this process, its peers' and what sums take included."""
        return self.size * (_CONTROL_BYTES + 2 * self.half_bytes) + self.scratch.nbytes

    def __del__(self) -> None:
        for ending in getattr(self, "_processes", {}):
            os.close(ending)

    # Writing and reading

    def write(self) -> int:
        """Which half is for this rank's next chunk, once nobody reads it."""
        for rank in self._others:
            self._wait(rank, _READ, self._next - 1)
        return self._next % 2

    def half(self, rank: int, half: int) -> torch.Tensor:
        """A half of `rank`'s mailbox, (half_bytes,) uint8."""
        return self._boxes[rank].halves[half]

    def publish(self, label: int) -> None:
        """Let peers read what was written. `label` describes the message: all ranks' must agree."""
        self._mine.words[_LABELS + self._next % 2] = label
        self._next += 1
        self._mine.say(_WRITTEN, self._next)

    def read(self, label: int) -> int:
        """Which half has the next chunk, once every rank's is there.

        Raises RuntimeError if a rank's label is another: it takes part in another message.
        """
        half = self._done % 2
        for rank in self._others:
            self._wait(rank, _WRITTEN, self._done + 1)
            theirs = self._boxes[rank].words[_LABELS + half]
            if theirs != label:
                raise RuntimeError(
                    f"rank {self._ranks[rank]} sends another message ({describe(theirs)}) than "
                    f"rank {self._ranks[self.rank]} ({describe(label)}): every rank must run "
                    "the same units in the same order. minifsdp.debug.checks() names the units"
                )
        return half

    def release(self) -> None:
        """Say that the chunk `read` gave has been read."""
        self._done += 1
        self._mine.say(_READ, self._done)

    def _wait(self, rank: int, word: int, count: int) -> None:
        """Block until `rank`'s counter has come to `count`."""
        box = self._boxes[rank]
        words = box.words
        for _ in range(self._looks):
            if words[word] >= count:
                return
        deadline = time.monotonic() + self._timeout_seconds
        while (seen := words[word]) < count:
            futex.wait(box.address + 8 * word, seen, _NAP_SECONDS)
            if words[word] >= count:
                return
            self._check_alive(rank, word, count)
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank {self._ranks[rank]} did not come to a message within "
                    f"{self._timeout_seconds:g} s: it has stopped, is slow, or runs other units"
                )

    def _check_alive(self, rank: int, word: int, count: int) -> None:
        ended = [self._processes[fd] for fd, _ in self._endings.poll(0)]
        if ended and self._boxes[rank].words[word] < count:
            names = ", ".join(str(self._ranks[r]) for r in ended)
            raise RuntimeError(
                f"rank {names} has died (its process has ended) while rank "
                f"{self._ranks[self.rank]} waited for its part of a message"
            )


_MOST_BYTES = 2**46


def label(kind: str, unit: int, nbytes: int) -> int:
    """A number that stands for a message of unit number `unit`."""
    return (2 * (unit % 2**14) + (kind == "reduce-scatter")) * _MOST_BYTES + nbytes


def describe(number: int) -> str:
    """What `label` numbered."""
    about, nbytes = divmod(number, _MOST_BYTES)
    kind = "reduce-scatter" if about % 2 else "all-gather"
    return f"{kind} of unit number {about // 2}, {nbytes} bytes"


def _reserve(nbytes: int) -> int:
    """A file descriptor of nameless memory, all of it reserved. Raises OSError."""
    fd = os.open(_FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def _is_supported() -> bool:
    """Whether the processor orders stores (see the note above) and the system has what is used."""
    return platform.machine() == "x86_64" and platform.system() == "Linux"


def _host() -> str:
    """What ranks that can open each other's mailboxes have in common: the kernel, and its view of
    processes. Something of its own on a machine that cannot have mailboxes."""
    if not _is_supported():
        return secrets.token_hex()
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"


def _timeout_seconds(group: dist.ProcessGroup) -> float:
    """How long the group lets a collective wait; no public name tells."""
    try:
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout.total_seconds()

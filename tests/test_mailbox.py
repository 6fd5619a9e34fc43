"""A rank that waits sleeps, is woken at once, and is told who died and what others send."""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from minifsdp.collectives import Peers, futex, mailbox

pytestmark = pytest.mark.skipif(not mailbox._is_supported(), reason="for Linux on x86-64")


def slept(address: int, seen: int, seconds: float) -> float:
    began = time.monotonic()
    futex.wait(address, seen, seconds)
    return time.monotonic() - began


def test_it_sleeps_for_as_long_as_it_was_told_while_nothing_changes():
    word = ctypes.c_int64(7)
    assert 0.04 < slept(ctypes.addressof(word), 7, 0.05) < 0.9
    assert slept(ctypes.addressof(word), 6, 5.0) < 3  # the number is another one already


def sleepers(address: int, count: int) -> tuple[list[threading.Thread], list[float]]:
    """Threads that sleep on `address`, for 5 s if nobody wakes them, and how long they did."""
    times: list[float] = []
    threads = [
        threading.Thread(target=lambda: times.append(slept(address, 0, 5.0))) for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.2)  # until they sleep
    return threads, times


def test_everybody_who_sleeps_is_woken():
    word = ctypes.c_int64(0)
    threads, times = sleepers(ctypes.addressof(word), 3)
    futex.wake(ctypes.addressof(word))
    for thread in threads:
        thread.join()
    assert len(times) == 3 and max(times) < 3


def test_a_counter_of_a_mailbox_wakes_who_waits_for_it():
    fd = mailbox._reserve(mailbox._CONTROL_BYTES + 2 * 4096)
    box = mailbox._Mailbox(fd, 4096)
    os.close(fd)
    threads, times = sleepers(box.address + 8 * mailbox._WRITTEN, 2)
    box.say(mailbox._WRITTEN, 1)
    for thread in threads:
        thread.join()
    assert box.words[mailbox._WRITTEN] == 1 and max(times) < 3


@pytest.mark.parametrize(("written", "is_missed"), [(6, True), (7, False)])
def test_a_rank_that_wrote_its_part_before_it_ended_is_not_missed(written, is_missed):
    boxes = object.__new__(mailbox.Mailboxes)
    ended = 5
    boxes.rank, boxes._ranks = 0, [0, 1]
    boxes._boxes = [None, SimpleNamespace(words={mailbox._WRITTEN: written})]
    boxes._processes = {ended: 1}
    boxes._endings = SimpleNamespace(poll=lambda _: [(ended, 1)])
    try:
        if is_missed:
            with pytest.raises(RuntimeError, match="rank 1 has died"):
                boxes._check_alive(1, mailbox._WRITTEN, 7)
        else:
            boxes._check_alive(1, mailbox._WRITTEN, 7)
    finally:
        boxes._processes = {}  # it is no file of this process


class Peer:
    """A process with a mailbox, and this one's view of it."""

    def __init__(self) -> None:
        code = (
            f"import os; fd = os.open({mailbox._FOLDER!r}, os.O_TMPFILE | os.O_RDWR, 0o600);"
            f"os.posix_fallocate(fd, 0, {mailbox._CONTROL_BYTES + 2 * 4096});"
            "os.pwrite(fd, (77).to_bytes(8, 'little'), 0); print(fd, flush=True); input()"
        )
        words = [sys.executable, "-S", "-c", code]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        fd = int(self.process.stdout.readline())
        self.invitation = mailbox._Invitation("here", self.process.pid, fd, 77)
        self.boxes = object.__new__(mailbox.Mailboxes)
        self.boxes.half_bytes, self.boxes.rank, self.boxes._ranks = 4096, 0, [0, 1]
        self.boxes._boxes, self.boxes._processes = [None, None], {}
        self.boxes._endings = select.poll()
        self.boxes._looks, self.boxes._timeout_seconds = 1, 4.0

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.end()


def test_a_rank_that_dies_while_it_is_waited_for_is_named_at_once(peer):
    peer.boxes._open(1, peer.invitation)
    killer = threading.Timer(0.2, peer.process.kill)
    killer.start()
    with pytest.raises(RuntimeError, match="rank 1 has died"):  # not that it did not come
        peer.boxes._wait(1, mailbox._WRITTEN, 1)
    killer.join()


def test_another_process_with_the_number_of_the_one_that_invited_is_known(peer):
    with pytest.raises(OSError, match="another process"):
        peer.boxes._open(1, peer.invitation._replace(token=78))


def _patience() -> None:
    peers = Peers.of(dist.new_group(timeout=timedelta(seconds=7)))
    assert mailbox._timeout_seconds(peers.group) == 7
    boxes = mailbox.Mailboxes(peers)
    assert boxes._timeout_seconds == 7
    assert 0 < boxes._looks < 10_000  # before it sleeps and sees whether others live


def test_a_rank_is_waited_for_as_long_as_its_group_says(run_ranks):
    run_ranks(2, _patience)


def test_labels_tell_units_kinds_and_lengths_apart():
    labels = {
        mailbox.label(kind, unit, nbytes): f"{kind} of unit number {unit}, {nbytes} bytes"
        for kind in ("all-gather", "reduce-scatter")
        for unit in (0, 1, 79)
        for nbytes in (0, 4, 2**40)
    }
    assert len(labels) == 18 and max(labels) < 2**63
    assert all(mailbox.describe(label) == told for label, told in labels.items())

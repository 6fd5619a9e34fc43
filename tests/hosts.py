"""Two hosts that one run spans: a torchrun on each, with two ranks.

They are played by processes of this machine, or by parts of it that share little more than the
disk: each with a network, a host name, processes and shared memory of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.slow_network import Skipped, joined_namespaces
from llama.finetune.metrics import read_metrics

ROOT = Path(__file__).parents[1]
TRAIN = ROOT / "train.py"
# What `unshare` runs first: names that the hosts know each other by, and /dev/shm of their own.
_SETTLE = 'mount --bind "$0" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && hostname "$1" && '
_SETTLE += 'shift && exec "$@"'


class Host:
    """A torchrun and its ranks, on a host that `inside` leads to."""

    def __init__(self, command: Sequence[str], inside: Sequence[str], log: Path) -> None:
        self._command, self._inside, self.log = command, inside, log
        self.start()

    def start(self) -> None:
        """Start torchrun, the first time or once more with the same command."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*self._inside, *self._command], stdout=log, stderr=log, env=environment()
            )

    @property
    def ranks(self) -> dict[int, int]:
        """The process of each rank that is running."""
        found = {}
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                rank = next((v for v in variables if v.startswith(b"RANK=")), None)
                if rank:
                    found[int(rank.removeprefix(b"RANK="))] = pid
        return found

    def kill(self) -> None:
        """End torchrun and its ranks at once, as a power cut does."""
        for pid in (self.process.pid, *descendants(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def end(self, seconds: float) -> int:
        """How torchrun ended, at the latest in so many seconds."""
        return self.process.wait(timeout=seconds)


def environment(**more: str) -> dict[str, str]:
    """That of a shell in which nothing runs."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more


def descendants(pid: int) -> list[int]:
    """The processes that `pid` has started, and those that they have."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [d for child in map(int, children) for d in (child, *descendants(child))]


def torchrun(endpoint: str, restarts: int, *more: str) -> list[str]:
    """The launch that docs/train-70b.md gives, with two ranks a host, up to the script."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=two-hosts"),
        *(f"--max-restarts={restarts}", *more, str(TRAIN), "--device=cpu"),
    ]


@contextlib.contextmanager
def on_loopback(folder: Path, flags: Sequence[str], restarts: int = 0) -> Iterator[list[Host]]:
    """Two torchruns that meet at a port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    about = []
    for number in range(2):  # either could keep the store that they meet in: the first does
        role = f"--rdzv-conf=is_host={int(number == 0)}"
        command = [*torchrun(endpoint, restarts, "--local-addr=127.0.0.1", role), *flags]
        about.append((command, [], folder / f"host-{number}.log"))
    with _ended(about) as hosts:
        yield hosts


@contextlib.contextmanager
def in_namespaces(folder: Path, flags: Sequence[str], restarts: int = 0) -> Iterator[list[Host]]:
    """Two hosts on a link of 1 Gbit/s. Raises Skipped where there can be none."""
    known = folder / "hosts"
    known.write_text("127.0.0.1 localhost\n10.77.0.1 node-0\n10.77.0.2 node-1\n")
    command = [*torchrun("node-0:29500", restarts), *flags]
    own = ["--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run(["unshare", *own, "true"]).returncode:
        raise Skipped("`unshare` cannot give processes a host of their own")
    with joined_namespaces(1000) as names:
        about = []
        for number, name in enumerate(names):
            settled = ["sh", "-c", _SETTLE, str(known), f"node-{number}"]
            inside = ["ip", "netns", "exec", name, "unshare", *own, *settled]
            about.append((command, inside, folder / f"host-{number}.log"))
        with _ended(about) as hosts:
            yield hosts


@contextlib.contextmanager
def _ended(about: Sequence[tuple[Sequence[str], Sequence[str], Path]]) -> Iterator[list[Host]]:
    """The hosts, of which nothing is left afterwards."""
    hosts = [Host(*each) for each in about]
    try:
        yield hosts
    finally:
        for host in hosts:
            host.kill()


def steps_done(out: Path) -> int:
    """The steps that the run in `out` has logged."""
    return max((line["step"] for line in read_metrics(out / "metrics.jsonl")), default=0)


def wait_until(holds: Callable[[], bool], hosts: Sequence[Host], seconds: float = 90) -> None:
    """Return once it holds; AssertionError if torchrun ends before, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        ended = [host.log.read_text()[-3000:] for host in hosts if host.process.poll() is not None]
        assert not ended and time.monotonic() < deadline, "\n".join(ended) or "not in time"
        time.sleep(0.02)

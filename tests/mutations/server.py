"""A process that has imported torch, and forks another for each run of pytest on a mutation.

It reads requests, the arguments of `_run` as JSON, from a socket that it has inherited, each with a
pipe to answer on. It imports nothing of the tree, so that what it forks imports the mutation.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from .workers import Forge, end_with_parent

_PRELOADED = (
    "hypothesis",
    "numpy",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
)
NOT_IMPORTED = " (it cannot be imported)"


class Recorder:
    """A pytest plugin: which test is under way, and which failed first."""

    def __init__(self, running: Path) -> None:
        self.running, self.failed, self.ran = running, None, 0

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.running.write_text(nodeid, encoding="utf-8")

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.ran += report.when == "call" or report.outcome != "passed"
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or f"{report.nodeid}{NOT_IMPORTED}"


def main(requests: socket.socket) -> None:
    """Fork for each request, until nobody can send one any more."""
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is here now need not be looked through, nor copied, in what is forked
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    runs: dict[int, int] = {}  # process descriptors, and the groups that their processes lead
    while True:
        request, fds, _, _ = socket.recv_fds(requests, 2**20, 1)
        runs = {run: group for run, group in runs.items() if not _has_ended(run)}
        if not request:
            for group in runs.values():
                os.killpg(group, signal.SIGKILL)
            return
        if (pid := os.fork()) == 0:
            requests.close()
            try:
                end_with_parent()
                os.setsid()  # so that all it starts can be ended together
                os.write(fds[0], f"{os.getpid()}\n".encode())
                result = _run(fds[0], **json.loads(request))
                sys.stdout.flush()
                os.write(fds[0], json.dumps(result).encode())
            finally:
                os.killpg(0, signal.SIGKILL)
        os.close(fds[0])
        runs[os.pidfd_open(pid)] = pid


def _has_ended(run: int) -> bool:
    """Whether a process has; then its descriptor is closed."""
    if not select.select([run], [], [], 0)[0]:
        return False
    os.close(run)
    return True


def _run(
    answer: int, folder: str, arguments: list[str], output: str, running: str
) -> dict[str, Any]:
    """Run pytest in `folder`; what came of it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = folder
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.dont_write_bytecode = True
    sys.path[:0] = [folder, os.path.join(folder, "tests")]
    forge = Forge(answer)
    import pool  # of the folder

    pool.SERVER = pool.multiprocessing = forge
    pool._GRACE_SECONDS = 1.0  # for the other ranks to answer once one has failed
    import pytest

    recorder = Recorder(Path(running))
    options = ["-q", "--tb=short", "--rootdir", folder]
    options += ["-p", "no:cacheprovider", "-p", "no:unraisableexception"]  # which collects garbage
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = int(pytest.main([*options, *arguments], plugins=[recorder]))
    loaded = sys.modules.get("minifsdp")
    if loaded is not None and not loaded.__file__.startswith(folder):
        raise RuntimeError(f"{loaded.__file__} was tested, not the copy in {folder}")
    return {"code": code, "failed": recorder.failed, "ran": recorder.ran}


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))

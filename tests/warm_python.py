"""Python commands in processes forked from one that has imported torch: a tenth of a second to
start, not four. What they run, `python FILE`, `python -m MODULE` or the same under torchrun, has
its own `__main__`, arguments, environment, folder and exit code, as if it had been started anew.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

# Of others only: the project is imported by each command, from where that finds it.
PRELOADED = [
    "numpy",
    "safetensors.torch",
    "sentencepiece",
    "tqdm",
    "torch",
    "torch.distributed.fsdp",
    "torch.profiler",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
    "torch.distributed.fsdp.wrap",
    "torch._subclasses.fake_tensor",
    "torch.distributed.run",
    "torch._dynamo",
    "numpy.random",
]


class Done(NamedTuple):
    """How a command ended: its exit code (124: out of time) and all that it printed.

    If so asked, what went to stderr is in `errors` and not in `output`.
    """

    code: int
    output: str
    errors: str = ""


class WarmPython:
    """The process that is forked; a context manager."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.stdin.close()
        self._process.wait()

    def run(
        self,
        words: list[str],
        folder: Path,
        *,
        ranks: int = 0,
        stdin: str = "",
        environment: dict[str, str] | None = None,
        timeout_seconds: float = 60,
        only_flags: bool = False,
        errors_apart: bool = False,
    ) -> Done:
        """Run `python WORDS` in `folder`; `ranks`: so many of them, as torchrun starts them.

        only_flags: end with 0 as soon as the flags have been read.
        """
        request = {
            "words": words,
            "folder": str(folder),
            "ranks": ranks,
            "stdin": stdin,
            "environment": environment or {},
            "timeout_seconds": timeout_seconds,
            "only_flags": only_flags,
            "errors_apart": errors_apart,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Done(**json.loads(self._process.stdout.readline()))


@functools.cache
def shared() -> WarmPython:
    """One for all tests, which ends with them."""
    return WarmPython()


# ---- The other side -------------------------------------------------------------------------


def _serve() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # what is imported need not be looked through in each command
    for line in sys.stdin:
        answer = _run(json.loads(line))
        print(json.dumps(answer), flush=True)


def _run(request: dict[str, Any]) -> dict[str, Any]:
    folder = Path(request["folder"])
    given, said = folder / ".stdin", folder / ".output"
    complained = folder / ".errors" if request["errors_apart"] else said
    given.write_text(request["stdin"])
    for file in (said, complained):
        file.write_text("")
    common = request["environment"]
    if request["ranks"]:
        common = common | _as_torchrun(request["ranks"])
    children: set[int] = set()
    for rank in range(max(request["ranks"], 1)):
        ours = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if request["ranks"] else {}
        child = os.fork()
        if not child:
            _become(request, common | ours, given, said, complained)
        children.add(child)
    code = _wait(children, time.monotonic() + request["timeout_seconds"])
    answer = {"code": code, "output": said.read_text(errors="replace")}
    if request["errors_apart"]:
        answer["errors"] = complained.read_text(errors="replace")
    for file in {given, said, complained}:
        file.unlink()
    return answer


def _as_torchrun(ranks: int) -> dict[str, str]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _wait(children: set[int], deadline: float) -> int:
    """The first exit code that is not 0; like torchrun, the others are ended then."""
    worst, waiting = 0, set(children)
    while waiting:
        for child in sorted(waiting):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                waiting.remove(child)
                worst = worst or os.waitstatus_to_exitcode(status)
                if worst:
                    deadline = min(deadline, time.monotonic() + 2)
        if time.monotonic() > deadline:
            worst = worst or 124
            for child in waiting:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
        time.sleep(0.005)
    return worst


def _become(
    request: dict[str, Any], environment: dict[str, str], given: Path, said: Path, complained: Path
) -> None:
    """Be the command; never returns."""
    code = 1
    try:
        os.setsid()
        for stream, (path, flags) in enumerate(
            [
                (given, os.O_RDONLY),
                *[(path, os.O_WRONLY | os.O_APPEND) for path in (said, complained)],
            ]
        ):
            os.dup2(os.open(path, flags), stream)
        sys.stdin = os.fdopen(0, closefd=False)
        os.environ.update(environment)
        os.chdir(request["folder"])
        code = _main(request["words"], request["only_flags"])
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter that ends does
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _main(words: list[str], only_flags: bool) -> int:
    """Do what `python WORDS` does; its exit code."""
    kept = [path for path in sys.path[1:] if path]  # the first is this file's folder
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if only_flags:
        _stop_at_flags()
    try:
        if words[0] == "-m":
            sys.path[:] = [os.getcwd(), *paths, *kept]
            sys.argv[:] = ["-m", *words[2:]]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[:] = [str(Path(words[0]).resolve().parent), *paths, *kept]
            sys.argv[:] = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ending:
        if ending.code is None or isinstance(ending.code, int):
            return ending.code or 0
        print(ending.code, file=sys.stderr)
        return 1
    return 0


def _stop_at_flags() -> None:
    import argparse

    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parse(self, *args, **kwargs)
        raise SystemExit(0)

    argparse.ArgumentParser.parse_args = parse_and_stop  # type: ignore[assignment]


if __name__ == "__main__":
    _serve()

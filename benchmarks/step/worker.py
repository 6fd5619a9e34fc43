"""One rank of the benchmark, as torchrun starts it: `-m benchmarks.step.worker REQUEST`.

Each measurement runs in a process of its own, forked from this one, which only imports: so no
engine meets what another has left, and importing is paid for once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import figures, memory, timing
from .built import Setup
from .engines import ENGINES
from .works import WORKS

_TIMEOUT = timedelta(minutes=5)


class Request(NamedTuple):
    """What the launcher asks of every rank, passed as JSON."""

    work: str
    engines: list[str]
    rounds: int
    warmup: int
    seed: int
    device: str
    offload: bool
    parts: list[str]
    output: str

    def setup(self) -> Setup:
        index = os.environ["LOCAL_RANK"] if self.device == "cuda" else None
        device = torch.device(f"cuda:{index}" if index else "cpu")
        return Setup(WORKS[self.work], device, self.seed, self.offload)


def main() -> None:
    """Rank 0 writes the figures, or the reason of a failure, to the request's output."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the forked process ends too
    request = Request(*json.loads(sys.argv[1]))
    content: dict[str, Any] = {"engines": {name: {} for name in request.engines}}
    if {"time", "counts"} & set(request.parts):
        content |= _apart("time", _timed, request)
    if "memory" in request.parts and "failure" not in content:
        rows = content["engines"]
        measured = {name: _apart(f"memory/{name}", _held, request, name) for name in rows}
        for name, row in figures.memory_figures(measured).items():
            rows[name] |= row
    if os.environ["RANK"] == "0":
        Path(request.output).write_text(json.dumps(content))


def _timed(request: Request) -> dict[str, Any]:
    """The figures of the timed run, the same on all ranks."""
    engines = [ENGINES[name] for name in request.engines]
    setup, counted = request.setup(), "counts" in request.parts
    timed = timing.run(engines, setup, request.rounds, request.warmup, counted)
    try:
        losses = figures.compare_losses(timed)
    except RuntimeError as error:
        return {"failure": str(error)}
    rows = figures.time_figures(timed, request.warmup)
    gradient_bytes = 4 * setup.work.config.num_parameters
    for name, one in timed.items():
        rows[name]["loss_last"] = one.steps[0][-1].loss
        rows[name]["loss_differs_from"] = losses[name]["reference"]
        rows[name]["loss_first_difference"] = losses[name]["step"]
        rows[name] |= figures.count_figures(name, one, gradient_bytes)
    return {"engines": rows}


def _held(request: Request, name: str) -> list[memory.Memory]:
    """What every rank held under the engine of that name."""
    return timing.gather(memory.measure(ENGINES[name], request.setup()))


def _apart(name: str, function: Callable[..., Any], request: Request, *args: Any) -> Any:
    """`function(request, *args)` in a new process, in a process group called `name`."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(
        target=_serve, args=(there, name, function, request, *args), daemon=True
    )
    process.start()
    there.close()
    try:
        answer = here.recv()
    except EOFError:
        answer = None
    process.join()
    if process.exitcode or answer is None:
        raise SystemExit(f"rank {os.environ['RANK']}: the process for {name} failed, see above")
    return answer


def _serve(pipe: Any, name: str, function: Callable[..., Any], *args: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module=r"torch\.")  # FSDP1 and c10d ops are deprecated
    request: Request = args[0]
    cuda = request.device == "cuda"
    device = request.setup().device
    if cuda:
        torch.cuda.set_device(device)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=_TIMEOUT)  # torchrun serves it
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.PrefixStore(f"benchmarks/{name}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=_TIMEOUT,
        device_id=device if cuda else None,
    )
    pipe.send(function(*args))
    # The process ends here without tearing the group down: gloo's threads may abort it then.
    dist.barrier()


if __name__ == "__main__":
    main()

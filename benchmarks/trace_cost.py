"""What a trace costs: steps with and without one, in turns, in one process group.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.trace_cost --work short --json FILE

`--before FOLDER` also times the engine of another tree (a checkout from before the trace), to see
what its marks cost when nothing listens. Prints the median of paired ratios.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn

import minifsdp
from minifsdp.trace import record

from .step.works import WORKS, Work, loss_of

_WARM_UP = 5
_STEPS_IN_A_BLOCK = 10


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace_cost", description=__doc__)
    parser.add_argument("--work", choices=WORKS, default="short")
    parser.add_argument("--rounds", type=int, default=20, help="blocks of ten steps of each kind")
    parser.add_argument("--before", type=Path, help="a tree with the engine as it was before")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    figures = measure(WORKS[args.work], args.rounds, args.before, "cuda" if cuda else "cpu")
    if dist.get_rank() == 0:
        print(json.dumps(figures, indent=1))
        if args.json is not None:
            args.json.write_text(json.dumps(figures, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def measure(work: Work, rounds: int, before: Path | None, device: str) -> dict[str, object]:
    """Seconds of a step and ratios, of rank 0."""
    step = _stepper(minifsdp, work, device)
    kinds: dict[str, Callable[[], list[float]]] = {
        "off": lambda: _block(step),
        "on": lambda: _traced(step, ends),
    }
    ends: list[float] = []
    if before is not None:
        older = _stepper(_engine_of(before), work, device)
        kinds["before"] = lambda: _block(older)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for block in kinds.values():
        for _ in range(_WARM_UP):
            block()
    ends.clear()
    for n in range(rounds):
        order = list(kinds.items())
        for kind, block in order[n % len(order) :] + order[: n % len(order)]:
            seconds[kind].append(statistics.median(block()))
    figures: dict[str, object] = {
        "work": work.describe(),
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "device": device,
        "rounds": rounds,
        "step_seconds": {kind: statistics.median(of) for kind, of in seconds.items()},
        "on / off": _ratio(seconds["on"], seconds["off"]),
        "seconds to end a trace of ten steps": statistics.median(ends),
    }
    if before is not None:
        figures["off / before"] = _ratio(seconds["off"], seconds["before"])
    return figures


def _ratio(these: list[float], those: list[float]) -> dict[str, float]:
    ratios = sorted(a / b for a, b in zip(these, those, strict=True))
    quarter = len(ratios) // 4
    return {
        "median": statistics.median(ratios),
        "quartiles": [ratios[quarter], ratios[-1 - quarter]],
    }


def _stepper(engine: ModuleType, work: Work, device: str) -> Callable[[], None]:
    """A step of training under `engine`."""
    model: nn.Module = work.model(0).to(device)
    for layer in model.layers:
        engine.fully_shard(layer)
    engine.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = work.tokens(0, 0, dist.get_rank(), torch.device(device))

    def step() -> None:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _block(step: Callable[[], None]) -> list[float]:
    times = []
    for _ in range(_STEPS_IN_A_BLOCK):
        start = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times


def _traced(step: Callable[[], None], ends: list[float]) -> list[float]:
    with record():
        times = _block(step)
        start = time.perf_counter()
    ends.append(time.perf_counter() - start)
    return times


def _engine_of(tree: Path) -> ModuleType:
    """The minifsdp of another tree, under another name beside the one imported here."""
    name, file = "minifsdp_before", tree / "minifsdp" / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=[str(file.parent)]
    )
    if spec is None or spec.loader is None or not file.exists():
        raise SystemExit(f"--before {tree}: there is no minifsdp/__init__.py in it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()

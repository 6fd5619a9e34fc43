"""The command: reads its arguments, launches torchrun, writes JSON and prints a table.

python -m benchmarks.step --world-size 2 --work short --json short.json
python -m benchmarks.step --table short-seed0.json short-seed1.json short-seed2.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from .built import Setup
from .engines import ENGINES, USUAL
from .table import read_reports, summary, table
from .worker import Request
from .works import WORKS

PARTS = ("time", "counts", "memory")
_QUIET_LOAD = 0.5  # processes: more than this before a run means that others are at work


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked; a mistake ends the process with a message that names it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step",
        description="Time a training step under several engines, side by side.",
    )
    add = parser.add_argument
    add("--world-size", type=int, default=2, help="ranks, all on this machine")
    add("--work", default="short", help="what is trained, see --list")
    add("--engines", default=",".join(USUAL), help="comma-separated, see --list, or all")
    add("--rounds", type=int, help="timed steps of each engine; default: by the work")
    add("--warmup", type=int, default=2, help="steps of each engine before them")
    add("--seed", type=int, default=0, help="fixes weights, data and the order of engines")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to train")
    add("--offload", action="store_true", help="keep shards on the CPU, where an engine can")
    add("--parts", default=",".join(PARTS), help="what to measure; default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="write the report there")
    add("--list", action="store_true", help="list works and engines, and stop")
    help = "print wall ratios of all reports in one Markdown table, and stop"
    add("--summary", type=Path, nargs="+", metavar="FILE", help=help)
    add("--table", type=Path, nargs="+", metavar="FILE", help="print reports as Markdown, and stop")
    args = parser.parse_args(argv)
    args.engines = list(ENGINES) if args.engines == "all" else args.engines.split(",")
    args.parts = args.parts.split(",")
    try:
        check(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def check(args: argparse.Namespace) -> None:
    """ValueError for an argument that cannot be meant, with what could be."""
    for flag, names, known in (
        ("--work", [args.work], WORKS),
        ("--engines", args.engines, ENGINES),
        ("--parts", args.parts, PARTS),
    ):
        for name in names:
            if name not in known:
                among = ", ".join(known)
                raise ValueError(f"{flag}: nothing is called {name!r}; choose from {among}")
        if len(set(names)) < len(names):
            raise ValueError(f"{flag}: {', '.join(names)} names one twice; name each once")
    for flag, value, least in (
        ("--world-size", args.world_size, 1),
        ("--rounds", args.rounds, 1),
        ("--warmup", args.warmup, 1),
        ("--seed", args.seed, 0),
    ):
        if value is not None and value < least:
            raise ValueError(f"{flag} must be at least {least}, not {value}")
    if args.device == "cuda" and not (args.list or args.table or args.summary):
        found = torch.cuda.device_count()
        if found < args.world_size:
            raise ValueError(
                f"--device cuda needs a GPU for each of {args.world_size} ranks, {found} found: "
                "lower --world-size or use --device cpu"
            )
    if args.json and not args.json.resolve().parent.is_dir():
        raise ValueError(f"--json {args.json}: its folder does not exist; make it first")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; the report as a JSON object. RuntimeError if losses differ or a rank fails."""
    setup = Setup(WORKS[args.work], torch.device(args.device), args.seed, args.offload)
    skipped = {name: ENGINES[name].absent(setup) for name in args.engines}
    skipped = {name: reason for name, reason in skipped.items() if reason}
    engines = [name for name in args.engines if name not in skipped]
    if not engines:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise RuntimeError(f"none of the engines can run here: {reasons}")
    rounds = args.rounds or setup.work.rounds
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "figures.json")
        request = Request(
            *(args.work, engines, rounds, args.warmup, args.seed, args.device, args.offload),
            *(args.parts, output),
        )
        _launch(request, args.world_size)
        content = json.loads(Path(output).read_text())
    if "failure" in content:
        raise RuntimeError(content["failure"])
    return {
        "machine": machine(args.device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": args.device,
        "backend": "nccl" if args.device == "cuda" else "gloo",
        "world_size": args.world_size,
        "work": setup.work.describe(),
        "seed": args.seed,
        "rounds": rounds,
        "warmup": args.warmup,
        "offload": args.offload,
        "load_before": load,
        "engines": content["engines"],
        "skipped": skipped,
    }


def _launch(request: Request, world_size: int) -> None:
    root = str(Path(__file__).parents[2])
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "KINETO_LOG_LEVEL": "99",  # or torch's profiler writes to stderr
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={world_size}", "-m", "benchmarks.step.worker"]
    process = subprocess.Popen([*command, json.dumps(request)], env=environment)
    try:
        status = process.wait()
    finally:  # torchrun ends its ranks only if it is asked to end itself
        process.terminate()
        process.wait()
    if status:
        raise RuntimeError(f"torchrun ended with status {status}; what failed is above")


def machine(device: str) -> dict[str, Any]:
    """What the figures depend on, and nothing that tells whose machine it is."""
    cpu = platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text().splitlines()
        named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        cpu = named[0] if named else cpu
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return {"cpu": cpu, "cores": os.cpu_count(), "gpu": gpu}


def catalogue() -> str:
    """Works and engines with a line each."""
    lines = ["works:", *(f"  {work.name:32} {work.about}" for work in WORKS.values()), "engines:"]
    for engine in ENGINES.values():
        reason = engine.absent(Setup(WORKS["short"], torch.device("cpu"), 0, False))
        lines.append(f"  {engine.name:32} {engine.about}" + (f" ({reason})" if reason else ""))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("benchmarks.step: ended by a signal"))
    if args.list:
        print(catalogue())
        return
    try:
        if args.summary:
            print(summary(read_reports(args.summary)))
            return
        if args.table:
            print(table(read_reports(args.table)))
            return
        load = os.getloadavg()[0]
        if load > _QUIET_LOAD:
            print(
                f"warning: the load average is {load:.1f} before the run: others may be at work, "
                "and seconds will not repeat",
                file=sys.stderr,
            )
        report = run(args)
    except (ValueError, RuntimeError, OSError) as error:
        raise SystemExit(f"benchmarks.step: {error}") from None
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table([report]))


if __name__ == "__main__":
    main()

"""The command: refuses, or runs a process after the other, prints, writes JSON.

python -m benchmarks.wide_step --json wide-step.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler writes to stderr

import torch
import torch.multiprocessing as mp

from benchmarks.step.__main__ import machine
from llama import LlamaConfig

from . import processes
from .verdict import MOST_BYTES, judge, peak_by_formula
from .work import LEARNING_RATE, RANKS, SEQ, VARIANTS, WIDE, WIDE_PARAMETERS, Job

PROCESS_BYTES = 700 * 10**6  # Python, torch, and what kernels take for themselves


def too_little_room(config: LlamaConfig, folder: str | None) -> str | None:
    """Why this machine should not be asked to run it, if so."""
    needed = RANKS * (round(1.01 * peak_by_formula(config)["sum"]) + PROCESS_BYTES)
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    if needed > MOST_BYTES:
        return f"{needed:,} bytes are more than the {MOST_BYTES:,} that this may take"
    if needed > free:
        return f"{needed:,} bytes of memory are needed and {free:,} available: end what else runs"
    where, of_files = folder or tempfile.gettempdir(), round(1.1 * 2 * config.num_parameters)
    if shutil.disk_usage(where).free < of_files:
        return f"{where} has no room for {of_files:,} bytes: name another folder with --folder"
    return None


def run(config: LlamaConfig, folder: Path, expected_parameters: int) -> dict[str, Any]:
    """Train, compare and judge, in processes of their own; files go into `folder`."""
    job, seconds, load = Job(config, folder), {}, os.getloadavg()[0]
    phases: dict[str, tuple[Callable[..., None], tuple[Any, ...], int]] = {
        "plan": (processes.planned, (job,), 1),
        "whole model": (processes.whole, (job,), 1),
        **{f"{RANKS} ranks, {v}": (processes.rank, (job, v), RANKS) for v in VARIANTS},
    }
    for name, (function, args, count) in phases.items():
        started = time.perf_counter()
        mp.spawn(function, args=args, nprocs=count)
        seconds[name] = round(time.perf_counter() - started, 1)
        print(f"{name}: {seconds[name]} s", flush=True)
    about = {
        "machine": machine("cpu"), "torch": torch.__version__, "python": platform.python_version(),
        "backend": "gloo", "collectives": "auto (shared)", "world_size": RANKS, "seq": SEQ,
        "learning_rate": LEARNING_RATE, "model": asdict(config),
        "parameters": config.num_parameters, "load_before": load, "seconds": seconds,
    }  # fmt: skip
    return about | judge(job, expected_parameters)


def text(figures: dict[str, Any]) -> str:
    """The figures that matter, a paragraph for each comparison."""
    lines = [f"{figures['parameters']:,} parameters in bfloat16 on {RANKS} ranks"]
    for variant in VARIANTS:
        f = figures[variant]
        equal = f["loss_gradients_and_updated_parameters_equal_in_every_bit"]
        lines.append(
            f"{variant}: losses {f['losses']}, gradient norm {f['grad_norm']:.9g}; the whole "
            f"model's {f['losses_whole']}, {f['grad_norm_whole']:.9g}: "
            f"{'equal' if equal else 'NOT EQUAL'} in every bit\n"
            f"  peak {max(map(max, f['peak_bytes'])):,} bytes, {f['peak_above_shards_bytes']:,} "
            f"above the shard; {f['peak_over_plan_less_1']:+.3%} of the plan, "
            f"{f['peak_over_formula_less_1']:+.3%} of the formula; steps of "
            f"{', '.join(f'{s:.1f}' for s in f['seconds_of_steps'][0])} s"
        )
    f = figures["at once"]
    lines.append(
        f"both rows at once: loss {f['loss']:.7f} and {f['loss_whole']:.7f} (error "
        f"{f['loss_error']:.1e}), norm {f['grad_norm']:.7f} and {f['grad_norm_whole']:.7f} (error "
        f"{f['grad_norm_error']:.1e}, of a parameter at most "
        f"{f['largest_norm_error_of_a_parameter']:.1e}), gradients at most "
        f"{f['largest_gradient_error_of_a_parameter']:.1e} of their norm apart"
    )
    through_sockets = figures["plan"]["direct"]["peak"]
    lines.append(f"through sockets a rank would hold {through_sockets:,} bytes, by the plan")
    return "\n".join(lines)


def main() -> int:
    """0 if all is as it should be, 1 if not, 2 if there is no room for it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wide_step",
        description="Train a 70B-wide model for a step, whole and sharded, and compare. Takes "
        "15 GiB of memory, 5 GB of disk and some minutes on two cores.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--folder", help="where to put the files (default: the temporary folder)")
    args = parser.parse_args()
    for folder in (args.folder, args.json and args.json.parent):
        if folder is not None and not Path(folder).is_dir():
            parser.error(f"there is no folder {folder}: make it first")
    refusal = too_little_room(WIDE, args.folder)
    if refusal is not None:
        parser.error(refusal)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        figures = run(WIDE, Path(folder), WIDE_PARAMETERS)
    print(text(figures))
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    for line in figures["wrong"]:
        print(line, file=sys.stderr)
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

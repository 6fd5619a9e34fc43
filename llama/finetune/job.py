"""What a run does, and where: made from the flags and checked before anything is built."""

import argparse
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llama import LlamaConfig
from llama.finetune.arguments import argv_of_attempt, parse_args, trains
from llama.finetune.data import Batches
from llama.finetune.inputs import Inputs, read_inputs
from llama.finetune.metrics import Metrics, write_json
from llama.finetune.processes import launch, restarts
from llama.finetune.run_folder import (
    PARTS,
    check_free,
    check_resumable,
    check_room,
    is_finished,
    is_summarised,
)
from llama.finetune.speed import WARM_UP_STEPS

TASK_STEPS, DATA_EPOCHS = 1200, 3
STATE_BYTES = 12  # a trained parameter in a checkpoint: it and AdamW's two moments, in float32


class Job(NamedTuple):
    """What a run needs besides the model."""

    args: argparse.Namespace
    out: Path
    device: torch.device
    inputs: Inputs
    batches: Batches | None  # None where nothing is trained
    steps: int  # optimizer steps of the whole run
    micro_batch: int  # sequences a rank takes at once
    save_every: int  # steps between two checkpoints
    keep_last: int | None  # checkpoints; None: all
    finished: bool  # resumed, but nothing is left to do
    summarised: bool  # resumed at its end for a lost export, which its summary outlived

    @property
    def config(self) -> LlamaConfig:
        """The model's shape."""
        return self.inputs.config

    @property
    def patience_seconds(self) -> float:
        """How long ranks wait for one that loads, saves or exports."""
        return 10 * self.args.hang_timeout or math.inf

    @property
    def end(self) -> int:
        """The steps that are done, of the whole run's, when this launch ends."""
        return min(self.args.stop_at or self.steps, self.steps)

    def traced(self, steps_done: int) -> range:
        """The steps, counted from 0, that --trace names and this launch does, from `steps_done`."""
        if not self.args.trace:
            return range(0)
        named = steps_to_trace(self.args.trace, steps_done)
        return range(max(named.start, steps_done), min(named.stop, self.end))

    def identity(self) -> dict[str, dict[str, Any]]:
        """What a run cannot change: its model, and what the order of its data depends on."""
        args, batches = self.args, self.batches
        lora = {"rank": args.lora_rank, "alpha": args.lora_alpha, "targets": args.lora_targets}
        if args.lora_rank:  # a checkpoint holds adapters alone
            lora["base"] = self.inputs.base
        identity = {"config": asdict(self.config), "lora": lora}
        if batches:
            corpus = batches.corpus
            order = {"examples": len(corpus), "content": corpus.digest, "pack_to": batches.pack_to}
            identity["data"] = order | {"batch": batches.global_batch, "seed": batches.seed}
        return identity

    def check_identity(self, saved: dict[str, Any], path: Path) -> None:
        """ValueError if what the checkpoint `path` holds is of another model or order of data."""
        for part, ours in self.identity().items():
            for key, value in ours.items():
                if saved[part].get(key) != value:
                    raise ValueError(
                        f"checkpoint {path} is of another run ({part}: {key} was "
                        f"{saved[part].get(key)} and is now {value}): start a new run"
                    )

    def open_folder(self, steps_done: int, world_size: int) -> Metrics | None:
        """Make the run folder ready and return its metrics file, if there will be any."""
        if self.summarised:
            return None
        if steps_done == self.steps:  # lacks its summary, but config.json is of those who trained
            return Metrics(self.out / "metrics.jsonl", steps_done)
        if self.args.overwrite:
            for part in (self.out / name for name in PARTS):
                shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        about = {"world_size": world_size, "torch": torch.__version__, "steps": self.steps}
        about["launch"] = launch()  # by which a restart knows its own run
        content = about | {"arguments": vars(self.args), "model": asdict(self.config)}
        write_json(self.out / "config.json", content)
        return Metrics(self.out / "metrics.jsonl", steps_done if self.args.resume else None)


def read_flags(
    argv: list[str], world_size: int, steps_saved: Callable[[Path], int | None]
) -> argparse.Namespace:
    """The flags, checked; ValueError or OSError for what cannot be run, naming the remedy.

    `steps_saved` tells the steps up to the last checkpoint in a run folder; None: it has none.
    """
    return parse_args(argv_of_attempt(argv, steps_saved), world_size)


def prepare(
    args: argparse.Namespace,
    rank: int,
    world_size: int,
    steps_saved: Callable[[Path], int | None],
) -> Job:
    """What the flags ask for, its data read; errors and `steps_saved` as with `read_flags`."""
    device = choose_device(args)
    inputs = read_inputs(args)
    batches, steps = None, 0
    if inputs.examples is not None:
        epochs = None if args.steps else args.epochs or (DATA_EPOCHS if args.data else None)
        batches = Batches(
            inputs.examples,
            args.batch_size,
            args.seed,
            inputs.tokenizer.pad_id,
            rank,
            world_size,
            inputs.pack_to,
        )
        steps = args.steps or (batches.steps(epochs) if epochs else TASK_STEPS)
    save_every = args.save_every or max(100, -(-steps // 10))
    job = Job(
        args,
        Path(args.out),
        device,
        inputs,
        batches,
        steps,
        args.micro_batch or args.batch_size // world_size,
        save_every,
        args.keep_last or (None if args.save_every or args.save_minutes else 2),
        finished=False,
        summarised=False,
    )
    if args.resume:
        return _resumed(job, steps_saved(job.out))
    if trains(args):
        _check_traced(job, 0)
        check_free(job.out, args.overwrite)
        check_room(job.out, _needed_bytes(job))
    return job


def _resumed(job: Job, done: int | None) -> Job:
    if not trains(job.args):
        return job
    if job.args.resume == "auto" and is_finished(job.out, done, job.steps):
        return job._replace(finished=True)
    check_resumable(job.out, done, job.steps, job.args.stop_at)
    _check_traced(job, done)
    return job._replace(summarised=done == job.steps and is_summarised(job.out, job.steps))


def steps_to_trace(asked: str, steps_done: int) -> range:
    """What --trace asks for, as steps counted from 0, of a launch that begins at `steps_done`."""
    first, dash, last = asked.partition("-")
    if dash:
        return range(int(first) - 1, int(last))
    begin = steps_done + WARM_UP_STEPS
    return range(begin, begin + int(asked))


def _check_traced(job: Job, done: int) -> None:
    """ValueError if --trace names steps that are not done; not where nobody typed the launch."""
    if not job.args.trace or job.args.resume == "auto" or restarts():
        return
    steps = steps_to_trace(job.args.trace, done)
    if done <= steps.start and steps.stop <= job.end:
        return
    does = f"does steps {done + 1} to {job.end}" if done < job.end else "has no step left to do"
    remedy = "trace some of them"
    if "-" not in job.args.trace:
        does += f", the first {WARM_UP_STEPS} to warm up"
        remedy = f"trace at most {max(0, job.end - done - WARM_UP_STEPS)}"
    raise ValueError(f"--trace {job.args.trace}: this launch {does}: {remedy}, or raise --steps")


def _needed_bytes(job: Job) -> int:
    """Of a run's folder when it is fullest."""
    args, config = job.args, job.config
    saves = math.ceil(job.steps / job.save_every)
    # With --keep-last, an old one goes only when the next is there.
    at_once = min(saves, job.keep_last + 1) if job.keep_last else saves
    state_bytes = at_once * STATE_BYTES + (4 if args.keep_best else 0)
    if args.lora_rank:  # of adapters, which are no more than rounding
        state_bytes = 0
    return config.num_parameters * (state_bytes + getattr(torch, args.export_dtype).itemsize)


def choose_device(args: argparse.Namespace) -> torch.device:
    """This rank's device; ValueError where there is no such GPU."""
    if (args.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu":
        return torch.device("cpu")
    index, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"--device cuda: local rank {index} has no GPU ({count} found)")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)

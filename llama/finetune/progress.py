"""What a run shows and records while it goes on, and what it measured at the end."""

import contextlib
import math
import sys
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from llama.finetune.data import show
from llama.finetune.job import Job
from llama.finetune.metrics import Metrics
from llama.finetune.page import write_page
from llama.finetune.speed import WARM_UP_STEPS, Utilisation, Work, peak_tflops

REFUSED_SHOWN = 10


def announce(job: Job) -> None:
    """Tell what was read: to stderr what could not be used of it, else what there is to train on,
    or examples of it with --show-sample."""
    corpora = [corpus for corpus in (job.inputs.examples, job.inputs.evaluation) if corpus]
    refused = [str(line) for corpus in corpora for line in corpus.refused]
    for line in refused[:REFUSED_SHOWN]:
        print(f"train.py: left out: {line}", file=sys.stderr)
    if len(refused) > REFUSED_SHOWN:
        print(f"train.py: left out: {len(refused) - REFUSED_SHOWN:,} more lines", file=sys.stderr)
    if job.finished:
        print(f"{job.out} is finished: there is nothing left to do")
    elif job.args.show_sample:
        examples = job.inputs.examples[: job.args.show_sample]
        print(*(show(example, job.inputs.tokenizer) for example in examples), sep="\n\n")
    elif job.batches:
        print(_about_model(job), *([_about_data(job)] if job.args.data else []), sep="\n")


def _about_data(job: Job) -> str:
    corpus, rows = job.batches.corpus, job.batches.rows_in_epoch(0)
    batch, pack_to = job.batches.global_batch, job.batches.pack_to
    packed = f" of {pack_to:,}" if pack_to else ""
    told = (
        f"data: {len(corpus):,} examples of {corpus.lengths.sum():,} tokens, "
        f"{corpus.learnt.sum():,} of them learnt\nsteps: {job.steps:,} of {batch:,} rows{packed}; "
        f"an epoch is {_counted(rows, 'row')}, {_counted(math.ceil(rows / batch), 'step')}"
    )
    if rows < batch:
        told += f"\nnote: --batch-size {batch} holds all of the data: a smaller one learns faster"
    return told


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" + "s" * (count != 1)


def _about_model(job: Job) -> str:
    args, count = job.args, f"{job.config.num_parameters:,} parameters"
    if args.lora_rank:
        count += f" and adapters of rank {args.lora_rank}"
    if args.resume:
        return f"model: {count}, from {job.out / 'checkpoints'}"
    return f"model: {count}, from {args.model or 'scratch'}"


class Trained(NamedTuple):
    """What training measured; None where no step ran."""

    steps: int  # done so far, in all
    eval_loss: float | None
    tokens_per_second: float | None  # of all ranks, padding left out
    mfu: float | None  # 1.0: all that the devices could do
    formula: str | None  # of the MFU, with its figures
    peak_bytes: int | None  # of the rank that took most


class Progress:
    """A bar on the first rank's screen, and the run's metrics, while it is entered.

    `metrics` is None on other ranks. A step's speed counts all that its documents hold, padding
    left out.
    """

    def __init__(
        self, job: Job, model: nn.Module, steps_done: int, metrics: Metrics | None
    ) -> None:
        self.out, self.metrics = job.out, metrics
        self.first = dist.get_rank() == 0
        gpu = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else None
        config = job.config
        frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
        trained = config.num_parameters  # FSDP1's parameters tell only of their shards
        if frozen:  # under LoRA, which FSDP1 cannot do
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.utilisation = Utilisation(
            trained,
            frozen,
            config.n_layers,
            config.dim,
            dist.get_world_size(),
            peak_tflops(gpu, job.args.bf16, job.args.peak_tflops),
        )
        self._works: list[Work] = []
        often = 0.5 if sys.stderr.isatty() else 10.0  # seconds between two states of the bar
        look: dict[str, Any] = {"unit": "step", "disable": not self.first, "mininterval": often}
        self._bar = tqdm(total=job.steps, initial=steps_done, **look)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        reason: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()
        if self.metrics:
            self.metrics.close()
            with contextlib.suppress(OSError):  # a full disk, of which others tell
                write_page(self.out)  # of a run that was stopped, too

    def log(self, step: int, **values: Any) -> None:
        """Append a line to the metrics, on the first rank."""
        if self.metrics:
            self.metrics.write(step, **values)

    def tell(self, line: str) -> None:
        """Print a line above the bar, on the first rank."""
        if self.first:
            self._bar.write(line)

    def step(self, step: int, logged: dict[str, Any], work: Work) -> None:
        """Show and record a step that is done."""
        self._works.append(work)
        mfu = self.utilisation.mfu(work)
        known = {} if mfu is None else {"mfu": mfu}
        self.log(step, **logged, tokens=work.tokens, seconds=work.seconds, **known)
        if "skipped" in logged and self.first:
            self._bar.write(f"step {step} is left out: {logged['skipped']}", file=sys.stderr)
        self._bar.set_postfix(loss=f"{logged['loss']:.4f}", refresh=False)
        self._bar.update()

    def measured(self, steps: int, eval_loss: float | None, peak_bytes: int) -> Trained:
        """What all steps since the start came to; every rank calls it."""
        if not self._works:
            return Trained(steps, eval_loss, None, None, None, None)
        counted = self._works[WARM_UP_STEPS:] or self._works
        work = Work(*(sum(column) for column in zip(*counted, strict=True)))
        highest = torch.tensor(peak_bytes)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        speed, mfu = work.tokens / work.seconds, self.utilisation.mfu(work)
        formula = self.utilisation.formula(work)
        return Trained(steps, eval_loss, speed, mfu, formula, int(highest))

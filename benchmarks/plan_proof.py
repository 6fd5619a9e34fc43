"""Hold plans against runs: `python -m benchmarks.plan_proof [--only TEXT ...]`.

Each setting is planned in this process and then trained for two steps by real ranks (gloo, on this
machine), whose tensors are counted by the profiler's `[memory]` events from before the model is
built. Compared are rank 0's peak within the second step and its messages, their bytes too.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler writes to stderr

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from llama import LlamaConfig
from minifsdp import collectives
from minifsdp.collectives.backend import BackendCollectives
from minifsdp.collectives.direct import DirectCollectives
from minifsdp.plan import rehearse
from minifsdp.plan.books import Rehearsal, Volume
from minifsdp.plan.categories import Category
from minifsdp.plan.rehearsal import counting, train_step
from minifsdp.plan.settings import Settings

from .plan_models import Options, llama, tokens_and_targets
from .profiled import settled_waits, within_mark

_MARK = "benchmarks.plan_proof: the measured step"
TOLERANCE = 0.02


class Case(NamedTuple):
    """A setting to hold against a run."""

    name: str
    options: Options = Options()
    settings: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    world_size: int = 2
    batch: int = 4
    seq: int = 256
    repeats: bool = True
    """False: what is measured differs from run to run, and the plan says at most how much."""

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            dim=256, n_layers=4, n_heads=4, n_kv_heads=2, ffn_hidden=704, vocab_size=2048,
            norm_eps=1e-5, rope_theta=1e4, max_seq_len=self.seq,
        )  # fmt: skip

    def planned(self) -> Rehearsal:
        """What the plan says of rank 0."""
        return rehearse(
            lambda: llama(self.config(), "cpu", self.options),
            lambda: tokens_and_targets(self.batch, self.seq, "cpu"),
            self.world_size,
            "cpu",
            self.plan_settings(),
        )

    def plan_settings(self) -> Settings:
        return Settings(**{"collectives": "direct", **self.settings})


_MIXED = Options(bf16=True, activation_checkpointing=True)
_CHECKPOINTED = Options(activation_checkpointing=True)
CASES = [
    Case("float32"),
    Case("float32, 4 ranks", world_size=4, batch=2),
    Case("activation checkpointing", _CHECKPOINTED),
    Case("activation checkpointing, 4 ranks", _CHECKPOINTED, world_size=4),
    Case("selective checkpointing", Options(selective_checkpointing=True)),
    Case("bf16", Options(bf16=True), batch=1),
    Case("bf16, checkpointing", _MIXED, batch=2),
    Case("pure bf16", Options(pure_bf16=True), batch=1),
    Case("offload", Options(cpu_offload=True)),
    Case("offload, bf16, checkpointing", Options(True, bf16=True, cpu_offload=True), batch=1),
    Case("accumulation, reduced each time", settings={"micro_batches": 3}, batch=2),
    Case("accumulation without sync", settings={"micro_batches": 3, "no_sync": True}, batch=2),
    Case("reshard_after_forward=False", Options(reshard_after_forward=False)),
    Case("reshard_after_forward=2", Options(reshard_after_forward=2), world_size=4, batch=2),
    Case("HSDP 2x2", Options(replicas=2), world_size=4, batch=2),
    Case("LoRA", Options(lora_rank=16)),
    Case("LoRA, bf16, checkpointing", Options(True, bf16=True, lora_rank=16), batch=1),
    Case("step in backward", Options(step_in_backward=True), {"clip_norm": None}, batch=1),
    Case("loss in chunks", Options(True, head_chunk_bytes=2**19)),
    Case("long sequence", _CHECKPOINTED, batch=1, seq=1024),
    Case("gloo's own collectives", settings={"collectives": "backend"}, batch=1, repeats=False),
    Case("one rank", world_size=1),
]


class Measured(NamedTuple):
    peak_bytes: int
    messages: dict[str, Volume]


def measure(case: Case) -> Measured:
    """Two steps of this rank, in a process group; nothing must be left of an earlier case."""
    named = collectives._IMPLEMENTATIONS  # new ones: buffers kept by an earlier case are not seen
    named |= {"direct": DirectCollectives(), "backend": BackendCollectives()}
    settings = case.plan_settings()
    gc.collect()
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with collectives.use_collectives(settings.collectives), settled_waits(), profiler:
        model, make_optimizer = llama(case.config(), "cpu", case.options)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                (parameter.to_local() if hasattr(parameter, "to_local") else parameter).fill_(0.01)
        optimizer = make_optimizer(model)

        def batch() -> dict[str, torch.Tensor]:
            return tokens_and_targets(case.batch, case.seq, "cpu")

        train_step(model, optimizer, batch, settings)
        with counting() as messages, record_function(_MARK):
            train_step(model, optimizer, batch, settings)
    del model, optimizer, make_optimizer
    return Measured(within_mark(profiler, _MARK).peak_bytes, messages)


def _serve(rank: int, world_size: int, store: str, cases: list[Case], pipe: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    for case in cases:
        measured = measure(case)
        if rank == 0:
            pipe.send(measured)
        dist.barrier()
    dist.barrier()


def run(cases: list[Case]) -> Iterator[tuple[Case, Measured]]:
    """Each case with what its rank 0 measured, ranks of one world size in the same processes."""
    context = multiprocessing.get_context("spawn")
    ordered = sorted(cases, key=lambda case: case.world_size)
    for world_size, group in itertools.groupby(ordered, key=lambda case: case.world_size):
        members = list(group)
        with tempfile.TemporaryDirectory() as folder:
            here, there = context.Pipe(duplex=False)
            processes = [
                context.Process(
                    target=_serve,
                    args=(rank, world_size, str(Path(folder, "store")), members, there),
                    daemon=True,
                )
                for rank in range(world_size)
            ]
            for process in processes:
                process.start()
            there.close()
            for case in members:
                yield case, here.recv()
            for process in processes:
                process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", nargs="*", default=[""], help="cases whose names hold one of these"
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    cases = [case for case in CASES if any(text in case.name for text in args.only)]
    planned = {case.name: case.planned() for case in cases}
    print(f"{'setting':34} {'ranks':>5} {'planned':>12} {'measured':>12} {'error':>8}  peak")
    worst = 0.0
    for case, measured in run(cases):
        rehearsal = planned[case.name]
        peak = rehearsal.peak(on_host=False).nbytes
        error = peak / measured.peak_bytes - 1
        if case.repeats:
            worst = max(worst, abs(error))
        same = "equal" if rehearsal.messages == measured.messages else "DIFFER"
        counts = " ".join(f"{kind} {v.count}" for kind, v in measured.messages.items())
        at = rehearsal.peak(on_host=False)
        activations = at.by_category.get(Category.ACTIVATIONS, 0) / at.nbytes
        flag = "" if abs(error) <= TOLERANCE else "  OVER 2%"
        flag += "" if case.repeats else "  (gloo copies on its own threads: at most)"
        print(
            f"{case.name:34} {case.world_size:5} {peak:12,} {measured.peak_bytes:12,} "
            f"{error:8.3%}  {at.phase} {at.unit}, "
            f"{activations:.0%} activations; messages {same} ({counts}){flag}",
            flush=True,
        )
    print(f"largest error {worst:.3%} in {len(cases)} settings, those that differ by run left out")
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()

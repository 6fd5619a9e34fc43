"""Each rung of docs/ladder computes the bits of the one before, and of both engines."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as upstream
from torch import nn
from torch.distributed.tensor import DTensor

import minifsdp

# Rungs are scripts: they import their neighbours by name.
sys.path.append(str(Path(__file__).parents[1] / "docs" / "ladder"))

import ladder
import page
import task
import trial
from link import Link

FOLDER = page.FOLDER

WHOLE, EVERYTHING, AGAIN, PREFETCH, MIXED, ACCUMULATION, OFFLOAD, ENGINE = ladder.RUNGS
Bits = list[tuple[str, str]]
Train = Callable[..., Iterator[trial.Seen]]

# Bits


@contextmanager
def small_task() -> Iterator[None]:
    usual = task.BLOCKS, task.DIM, task.HIDDEN, task.BATCH
    task.BLOCKS, task.DIM, task.HIDDEN, task.BATCH = 4, 24, 48, 12
    try:
        yield
    finally:
        task.BLOCKS, task.DIM, task.HIDDEN, task.BATCH = usual


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {hashlib.sha256(raw).hexdigest()[:16]}"


def bits_of(train: Train, whole: bool = False, **settings: Any) -> Bits:
    """Of three steps the loss, and this rank's rows of each gradient and stepped parameter.

    whole: the parameters are whole, and this rank's rows are to be cut from them.
    """
    link, bits = Link(), []

    def rows_of(tensor: torch.Tensor) -> torch.Tensor:
        if whole:
            return tensor.chunk(link.world_size)[link.rank]
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    for step, seen in enumerate(train(link, 3, **settings)):
        bits.append((f"step {step} loss", digest(seen.loss)))
        for at, param in enumerate(seen.params):
            bits.append((f"step {step} gradient {at}", digest(rows_of(param.grad))))
            bits.append((f"step {step} parameter {at}", digest(rows_of(param.detach()))))
    return bits


def plain_train(link: Link, steps: int) -> Iterator[trial.Seen]:
    """What the ladder starts from: one backward of the whole model, gradients averaged."""
    model = nn.Sequential(*task.build())
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=3e-4)
    for x, target in task.batches(link.rank, steps):
        loss = task.loss_of(model(x), target)
        loss.backward()
        for param in params:
            dist.all_reduce(param.grad)
            param.grad /= link.world_size
        optimizer.step()
        yield trial.Seen(loss.detach(), params)
        optimizer.zero_grad()


def engine_train(engine: ModuleType) -> Train:
    """The last rung with another engine's calls."""
    rung = importlib.import_module(ENGINE)

    def train(link: Link, steps: int, **settings: Any) -> Iterator[trial.Seen]:
        usual, rung.fully_shard = rung.fully_shard, engine.fully_shard
        try:
            yield from rung.train(link, steps, **settings)
        finally:
            rung.fully_shard = usual

    return train


FP32 = (torch.float32, torch.float32)
BF16 = (torch.bfloat16, torch.float32)
HALF = (torch.bfloat16, torch.bfloat16)


def engine_settings(engine: ModuleType, dtypes: tuple, micro_batches: int, offload: bool) -> dict:
    return {
        "precision": engine.MixedPrecisionPolicy(*dtypes),
        "micro_batches": micro_batches,
        "offload": engine.CPUOffloadPolicy(pin_memory=False) if offload else engine.OffloadPolicy(),
    }


def every_rung() -> dict[str, Bits]:
    """Bits of all that is compared, on this rank."""
    trains = {rung: ladder.train_of(rung) for rung in ladder.RUNGS[:-1]}
    mixed = importlib.import_module(MIXED).Dtypes
    found = {}
    with small_task():
        found["plain"] = bits_of(plain_train, whole=True)
        for rung in (WHOLE, EVERYTHING, AGAIN, PREFETCH):
            found[rung] = bits_of(trains[rung], whole=rung == WHOLE)
        for name, dtypes in (("fp32", FP32), ("bf16/fp32", BF16), ("bf16", HALF)):
            found[f"{MIXED} {name}"] = bits_of(trains[MIXED], dtypes=mixed(*dtypes))
        for parts in (1, 2, 3):
            found[f"{ACCUMULATION} {parts}"] = bits_of(trains[ACCUMULATION], micro_batches=parts)
        found[OFFLOAD] = bits_of(trains[OFFLOAD])
        for engine in (minifsdp, upstream):
            train, name = engine_train(engine), engine.__name__
            for as_rung, settings in {
                PREFETCH: (FP32, 1, False),
                f"{MIXED} bf16/fp32": (BF16, 1, False),
                f"{MIXED} bf16": (HALF, 1, False),
                f"{ACCUMULATION} 3": (BF16, 3, False),
                OFFLOAD: (BF16, 2, True),
            }.items():
                bits = bits_of(train, **engine_settings(engine, *settings))
                found[f"{name} as {as_rung}"] = bits
    return found


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def bits(request: pytest.FixtureRequest, run_ranks: Callable) -> list[dict[str, Bits]]:
    return run_ranks(request.param, every_rung)


SAME = [
    (WHOLE, EVERYTHING),
    (EVERYTHING, AGAIN),
    (AGAIN, PREFETCH),
    (PREFETCH, f"{MIXED} fp32"),
    (f"{MIXED} bf16/fp32", f"{ACCUMULATION} 1"),
    (f"{ACCUMULATION} 2", OFFLOAD),
]
LIKE_ENGINES = [PREFETCH, f"{MIXED} bf16/fp32", f"{MIXED} bf16", f"{ACCUMULATION} 3", OFFLOAD]
SAME += [(rung, f"minifsdp as {rung}") for rung in LIKE_ENGINES]
SAME += [(rung, f"torch.distributed.fsdp as {rung}") for rung in LIKE_ENGINES]


@pytest.mark.parametrize(("one", "other"), SAME, ids=lambda name: name)
def test_each_rung_has_the_bits_of_the_one_before_and_of_the_engines(bits, one, other):
    for rank, found in enumerate(bits):
        different = [a[0] for a, b in zip(found[one], found[other], strict=True) if a != b]
        assert not different, f"rank {rank}: {different[0]} and {len(different) - 1} more differ"


def test_the_lowest_rung_has_the_bits_of_plain_data_parallel_on_two_ranks(bits):
    if len(bits) == 2:  # of three, all-reduces of single gradients add in other orders
        assert all(found["plain"] == found[WHOLE] for found in bits)


def test_what_is_compared_depends_on_rank_step_dtype_and_micro_batches(bits):
    for name in bits[0]:
        assert len({str(found[name]) for found in bits}) == len(bits), "ranks see the same"
    found = bits[0]
    assert found[PREFETCH] != found[f"{MIXED} bf16/fp32"] != found[f"{MIXED} bf16"]
    assert found[f"{ACCUMULATION} 1"] != found[f"{ACCUMULATION} 2"] != found[f"{ACCUMULATION} 3"]
    gradients = [what for name, what in found[WHOLE] if "gradient" in name]
    assert len(set(gradients)) == len(gradients)


# Faults


class Fault(NamedTuple):
    """A rung with one line changed; where messages are under way, so that all still arrive."""

    rung: str
    line: str
    instead: str


FAULTS = [
    Fault(WHOLE, ".wait() / world_size", ".wait()"),
    Fault(EVERYTHING, "mean.split(self.numels)", "mean.flip(0).split(self.numels)"),
    Fault(EVERYTHING, ".chunk(link.world_size)[link.rank]", ".chunk(link.world_size)[0]"),
    Fault(AGAIN, "whole.data.view", "torch.empty_like(whole).view"),
    Fault(AGAIN, "dim=1)\n        del", "dim=0).view(world_size, -1)\n        del"),
    Fault(PREFETCH, "reducing.finish_reduce()\n    return", "reducing.reducing.wait()\n    return"),
    Fault(MIXED, "message.to(self.dtypes.reduce)", "message.to(self.dtypes.param)"),
    Fault(ACCUMULATION, "kept.add_(grad)", "kept.copy_(grad)"),
    Fault(ACCUMULATION, "        self.grads = []\n", ""),
    Fault(ACCUMULATION, "grad.to(self.dtypes.reduce)", "grad.clone()"),
    Fault(OFFLOAD, "self.shard_grad.copy_(", "self.shard_grad.add_("),
]


def with_faults() -> list[str]:
    """Of each broken rung the first bit that differs from the same rung as it is; or its error."""
    told = []
    with small_task():
        rungs = dict.fromkeys(fault.rung for fault in FAULTS)  # in one order on all ranks
        usual = {rung: bits_of(ladder.train_of(rung), whole=rung == WHOLE) for rung in rungs}
        for fault in FAULTS:
            source = (FOLDER / f"{fault.rung}.py").read_text()
            assert source.count(fault.line) == 1, f"{fault.rung} has no single {fault.line!r}"
            broken: dict[str, Any] = {"__name__": fault.rung}
            exec(source.replace(fault.line, fault.instead), broken)
            try:
                found = bits_of(broken["train"], whole=fault.rung == WHOLE)
            except (RuntimeError, AttributeError) as error:
                told.append(repr(error))
            else:
                pairs = zip(usual[fault.rung], found, strict=True)
                told.append(next((a[0] for a, b in pairs if a != b), ""))
    return told


def test_a_rung_with_one_line_broken_is_told(run_ranks):
    of_ranks = run_ranks(2, with_faults)
    for fault, *told in zip(FAULTS, *of_ranks, strict=True):
        assert any(told), f"nobody notices {fault}"

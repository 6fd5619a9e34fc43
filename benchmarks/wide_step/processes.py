"""Who does what: the whole model on one process, a rank of the sharded one, the plan.

Processes write digests, and the verdict compares them: of each rank's rows of each parameter a
checksum, and the sum of squares in float64.
"""

from __future__ import annotations

import contextlib
import math
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.profiled import within_mark
from benchmarks.step.memory import shared_mapping_bytes
from llama import Llama
from llama.parameters import local_part, own_rows
from minifsdp import clip_grad_norm_
from minifsdp.collectives.shared import SharedCollectives
from minifsdp.plan import Settings, rehearse
from minifsdp.plan.rehearsal import counting

from .work import LEARNING_RATE, RANKS, Job, backward, fill, on_meta, sgd, sharded

_STEPS = ("first", "second")
_PART = 2**22  # elements that are widened to float64 at once


def crc(rows: Tensor) -> int:
    """The checksum of some rows."""
    return zlib.crc32(rows.detach().reshape(-1).view(torch.uint8).numpy())


def square(rows: Tensor) -> float:
    """The sum of squares in float64."""
    parts = rows.detach().reshape(-1).split(_PART)
    return sum(part.double().square().sum().item() for part in parts)


def square_apart(rows: Tensor, others: Tensor) -> float:
    """The sum of squares of the differences, in float64."""
    pairs = zip(rows.reshape(-1).split(_PART), others.reshape(-1).split(_PART), strict=True)
    return sum((a.double() - b.double()).square().sum().item() for a, b in pairs)


def crcs(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    """Of whole tensors, the checksum of each rank's rows."""
    return {name: [crc(rows) for rows in t.chunk(RANKS)] for name, t in tensors.items()}


def squares(tensors: dict[str, Tensor]) -> dict[str, list[float]]:
    """The same of sums of squares."""
    return {name: [square(rows) for rows in t.chunk(RANKS)] for name, t in tensors.items()}


def resident_peak_bytes() -> int:
    """The most pages this process had at once, mapped ones too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


# ---- The whole model ----------------------------------------------------------------------------


def whole(_: int, job: Job) -> None:
    """Both rows at once, then the first row, then one row after the other."""
    torch.set_num_threads(1)  # as ranks have: other threads, other products, other bits
    model = on_meta(job.config)
    fill(model)
    params = dict(model.named_parameters())
    said: dict[str, Any] = {"parameters": sum(p.numel() for p in params.values())}
    said["initial"] = crcs(params)
    print("  whole model: weights are there", flush=True)

    def grads() -> dict[str, Tensor]:
        return {name: p.grad for name, p in params.items()}

    tokens = job.tokens()
    said["at once"] = {"loss": backward(model, tokens), "squares": squares(grads())}
    for name, grad in grads().items():
        torch.save(grad, job.folder / f"{name}.pt")
    model.zero_grad()
    print("  whole model: both rows at once", flush=True)

    losses = [backward(model, tokens[:1])]
    said["same row"] = {"losses": losses * RANKS, "grads": crcs(grads())}
    said["same row"] |= {"squares": squares(grads())} | stepped_copies(params)
    print("  whole model: first row", flush=True)

    losses += [backward(model, row[None]) for row in tokens[1:]]  # adds to the gradients
    for grad in grads().values():
        grad.div_(RANKS)
    said["own rows"] = {"losses": losses, "grads": crcs(grads()), "squares": squares(grads())}
    sgd(model).step()
    said["own rows"]["updated"] = crcs(params)
    said["resident"] = resident_peak_bytes()
    job.say("whole", said)


def stepped_copies(params: dict[str, nn.Parameter]) -> dict[str, Any]:
    """Digests of what the optimizer makes of the parameters, which are left as they are; and how
    many numbers it moves."""
    updated, moved = {}, 0
    for name, param in params.items():  # one copy at a time
        copy = nn.Parameter(param.detach().clone())
        copy.grad = param.grad
        torch.optim.SGD([copy], lr=LEARNING_RATE).step()
        updated |= crcs({name: copy})
        moved += torch.count_nonzero(copy.detach() != param.detach()).item()
    return {"updated": updated, "moved": moved}


# ---- A rank -------------------------------------------------------------------------------------


def rank(number: int, job: Job, variant: str) -> None:
    """Two steps: the first is compared, the second has what a later one has."""
    torch.set_num_threads(1)
    where = f"file://{job.folder / variant}"
    dist.init_process_group("gloo", init_method=where, rank=number, world_size=RANKS)
    mapped = shared_mapping_bytes()
    row = 0 if variant == "same row" else number
    tokens = job.tokens()[row : row + 1]
    seconds, messages = [], []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model, make_optimizer = sharded(job.config)
        fill(model)
        local = {name: local_part(p).detach() for name, p in model.named_parameters()}
        said: dict[str, Any] = {"initial": {name: crc(rows) for name, rows in local.items()}}
        said["shard"] = sum(rows.nbytes for rows in local.values())
        optimizer = make_optimizer(model)
        for step in _STEPS:
            dist.barrier()
            with counting() as volumes, record_function(step):
                started = time.perf_counter()
                loss = backward(model, tokens)
                optimizer.step()
                seconds.append(time.perf_counter() - started)
            messages.append(volumes)
            if step == "first":
                said |= {"loss": loss, "resident": resident_peak_bytes()}
                said |= compared(model, job)
                said["clipped"] = clip_grad_norm_(model.parameters(), math.inf).item()
            optimizer.zero_grad()
    said["mapped"] = shared_mapping_bytes() - mapped
    said["peaks"] = [peak + said["mapped"] for peak in peaks(profiler)]
    job.say(f"{variant} {number}", said | {"seconds": seconds, "messages": messages})
    dist.barrier()
    dist.destroy_process_group()


def compared(model: Llama, job: Job) -> dict[str, Any]:
    """Digests of this rank's rows, and how far their gradients are from those of both rows of the
    batch at once, which lie in files."""
    said: dict[str, Any] = {"grads": {}, "squares": {}, "errors": {}, "updated": {}}
    for name, param in model.named_parameters():
        grad = local_part(param.grad)
        file = torch.load(job.folder / f"{name}.pt", mmap=True, weights_only=True)
        said["grads"][name] = crc(grad)
        said["squares"][name] = square(grad)
        said["errors"][name] = square_apart(grad, file[own_rows(param)])
        said["updated"][name] = crc(local_part(param))
    return said


def peaks(profiler: profile) -> list[int]:
    """The most bytes of tensors that lived at once in each step, by the allocator's events.

    Messages through shared memory have no tensors that gloo's threads could free unseen.
    """
    return [within_mark(profiler, step).peak_bytes for step in _STEPS]


# ---- The plan -----------------------------------------------------------------------------------


def planned(_: int, job: Job) -> None:
    """What the plan says of a rank, through mailboxes as here and through sockets."""
    rows = job.tokens()[:1]

    def batch() -> dict[str, Tensor]:
        return {"tokens": rows[:, :-1].clone(), "targets": rows[:, 1:].clone()}

    said = {}
    for name, around in ("shared", pretended_mailboxes()), ("direct", contextlib.nullcontext()):
        settings = Settings(collectives=name, clip_norm=None, loss=lambda losses: losses.mean())
        with around:
            rehearsal = rehearse(lambda: sharded(job.config), batch, RANKS, "cpu", settings)
        peak = rehearsal.peak(on_host=False)
        said[name] = {"peak": peak.nbytes, "phase": peak.phase, "unit": peak.unit}
        said[name]["by_category"] = {c.value: n for c, n in peak.by_category.items() if n}
        said[name]["messages"] = rehearsal.messages
    job.say("plan", said)


@contextlib.contextmanager
def pretended_mailboxes() -> Iterator[None]:
    """A plan is one process, whose mailboxes no peer opens: have messages go through some that
    copy nothing. All else of the shared collectives, and so what they allocate, is theirs."""
    mailboxes = SimpleNamespace(rank=0, size=RANKS, half_bytes=2**18)
    lanes = SimpleNamespace(mailboxes=mailboxes, lane_bytes=2**18, exchange=lambda *_: None)
    with mock.patch.object(SharedCollectives, "_lanes", lambda *_: lanes):
        yield

"""Train one model with two engines in the same processes and compare every bit on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as upstream
from parity_model import VOCAB, build
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import minifsdp
from minifsdp.collectives import use_collectives
from minifsdp.reduction import GradientReducer


@dataclass(frozen=True)
class Case:
    """One way to train; every field is an axis of the matrix (see `parity_matrix.AXES`)."""

    precision: str = "fp32"
    accumulation: str = "plain"
    reshard: str = "auto"
    clip: str = "none"
    offload: str = "none"
    checkpointing: str = "none"
    parameters: str = "all"
    mesh: str = "1-D"
    rows: str = "uneven"
    collectives: str = "shared"

    def __str__(self) -> str:
        changed = [
            getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default
        ]
        return "+".join(changed) or "default"


PRECISIONS = {
    "fp32": (None, None),
    "bf16/fp32": (torch.bfloat16, torch.float32),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "fp32/bf16": (None, torch.bfloat16),
}
SYNCED = {
    "plain": [True],
    "synced": [True, True],
    "unsynced": [False, True],
    "mixed": [True, False, False, True],
}
UNFREEZE_AT_STEP = 2


def shard(model: nn.Module, engine: ModuleType, case: Case) -> nn.Module:
    """Each block a unit, and the root the rest."""
    param_dtype, reduce_dtype = PRECISIONS[case.precision]
    world_size = dist.get_world_size()
    settings: dict[str, Any] = {
        "mp_policy": engine.MixedPrecisionPolicy(param_dtype, reduce_dtype),
        "reshard_after_forward": {"auto": None, "True": True, "False": False, "int": 2}[
            case.reshard
        ],
    }
    if case.mesh == "HSDP":
        settings["mesh"] = init_device_mesh(
            "cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard")
        )
    if case.offload == "offload":
        settings["offload_policy"] = engine.CPUOffloadPolicy(pin_memory=False)
    for block in dict.fromkeys(model.units()):
        engine.fully_shard(block, **settings)
    engine.fully_shard(model, **settings)
    if case.parameters == "unused on a rank":
        model.set_reduce_scatter_unused_params(True)
    return model


def train(engine: ModuleType, case: Case, steps: int = 5) -> list[tuple[str, torch.Tensor]]:
    """Every loss, gradient, norm and parameter of a training run, this rank's rows, in order."""
    model = shard(build(case), engine, case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=case.precision != "fp16")
    scaler = ShardedGradScaler("cpu", init_scale=2.0**8, enabled=case.precision == "fp16")
    clip = torch.nn.utils.clip_grad_norm_ if engine is upstream else minifsdp.clip_grad_norm_
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    seen: list[tuple[str, torch.Tensor]] = []
    synced = SYNCED[case.accumulation]
    for step in range(steps):
        if case.parameters == "frozen, then not" and step == UNFREEZE_AT_STEP:
            model.reshard()
            model.requires_grad_(True)
        for micro, sync in enumerate(synced):
            model.set_requires_gradient_sync(sync)
            tokens = torch.randint(0, VOCAB, (2, 9), generator=data)
            logits = model(tokens[:, :-1]).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            scaler.scale(loss).backward()
            seen.append((f"step {step}.{micro} loss", loss.detach().clone()))
        seen += rows_of(model, f"step {step} gradient", gradients=True)
        if case.precision == "fp16":
            scaler.unscale_(optimizer)
        if case.clip == "clip":
            norm = clip(model.parameters(), 0.5)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            seen.append((f"step {step} norm", norm.clone()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen += rows_of(model, f"step {step} parameter")
    return seen


def rows_of(model: nn.Module, what: str, gradients: bool = False) -> list[tuple[str, torch.Tensor]]:
    """Copies of this rank's rows of all parameters, or of their gradients."""
    if not isinstance(model, minifsdp.FSDPModule):
        for module in model.modules():  # upstream leaves some whole after recomputation
            if isinstance(module, upstream.FSDPModule):
                module.reshard()
    rows = []
    for name, param in model.named_parameters():
        tensor = param.grad if gradients else param
        if tensor is not None:
            rows.append((f"{what} {name}", tensor.detach().to_local().clone()))
    return rows


@contextlib.contextmanager
def first_gradient() -> Iterator[list[float]]:
    """Record this rank's first gradients as autograd makes them, before any reduction."""
    seen: list[float] = []
    collect = GradientReducer.collect

    def recording(self):
        grads = collect(self)
        for grad in list(grads.values())[: 4 - len(seen)]:
            seen.append(grad.double().square().sum().item())
        return grads

    GradientReducer.collect = recording
    try:
        yield seen
    finally:
        GradientReducer.collect = collect


@contextlib.contextmanager
def one_ulp_off() -> Iterator[None]:
    """Make the engine change one element of a reduced gradient by one unit in the last place.

    Once for each rank: in the first parameter that has a gradient here, after each reduction.
    """
    add = GradientReducer._add_gradient
    chosen: list[str] = []

    def planting(self, param, local):
        add(self, param, local)
        flat = param.sharded.grad.to_local().view(-1)
        if flat.any() and not chosen:
            chosen.append(param.name)
        if flat.numel() and chosen == [param.name]:
            flat[-1] = torch.nextafter(flat[-1], flat.new_tensor(float("inf")))

    GradientReducer._add_gradient = planting
    try:
        yield
    finally:
        GradientReducer._add_gradient = add


def unequal(
    ours: list[tuple[str, torch.Tensor]], theirs: list[tuple[str, torch.Tensor]]
) -> list[str]:
    """The names of values that differ in any bit."""
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    return [
        name
        for (name, a), (_, b) in zip(ours, theirs, strict=True)
        if a.dtype != b.dtype or not torch.equal(a, b)
    ]


def differences(case: Case) -> list[str]:
    """What differs between our engine and upstream's, on this rank; empty when every bit is equal.

    Raises AssertionError if the comparison could not have found a difference: gradients that are
    zero or the same on all ranks, or one unit in the last place that goes unnoticed.
    """
    with use_collectives(case.collectives), first_gradient() as gradients:
        ours = train(minifsdp, case)
    theirs = train(upstream, case)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tuple(gradients))
    assert len(set(everyone)) == dist.get_world_size(), f"ranks make equal gradients: {everyone}"
    assert all(any(values) for values in everyone), "a rank's gradients are all zero"
    with use_collectives(case.collectives), one_ulp_off():
        planted = train(minifsdp, case, steps=1)
    found = unequal(planted, theirs[: len(planted)])
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, len(found))
    assert any(everyone), "one unit in the last place of a gradient goes unnoticed"
    return unequal(ours, theirs)

"""Train one model with two engines in the same processes and compare every bit on the way."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as upstream
from torch import nn

import minifsdp
from llama import Llama, LlamaConfig
from minifsdp.collectives import use_collectives

VOCAB = 51


@dataclass(frozen=True)
class Case:
    """One way to train; every field is a setting of the matrix."""

    precision: str = "fp32"  # param/reduce: fp32, bf16/fp32, bf16, fp32/bf16
    accumulation: str = "plain"  # plain, synced, unsynced, mixed
    reshard: str = "auto"  # auto, True, False, int
    clip: str = "none"  # none, clip
    collectives: str = "direct"  # direct, backend
    optimizer: str = "adamw"  # adamw, sgd
    rows: str = (
        "uneven"  # uneven: dims that no world size above 1 divides; few: fewer rows than ranks
    )

    def __str__(self) -> str:
        return "-".join(str(getattr(self, f.name)) for f in fields(self))


PRECISIONS = {
    "fp32": (None, None),
    "bf16/fp32": (torch.bfloat16, torch.float32),
    "bf16": (torch.bfloat16, None),
    "fp32/bf16": (None, torch.bfloat16),
}


def build(case: Case) -> nn.Module:
    """A Llama of three blocks, the same on every rank."""
    heads, dim, hidden = (2, 4, 3) if case.rows == "few" else (3, 30, 77)
    config = LlamaConfig(
        dim=dim,
        n_layers=3,
        n_heads=heads,
        n_kv_heads=1,
        ffn_hidden=hidden,
        vocab_size=VOCAB,
        norm_eps=1e-5,
        rope_theta=1e4,
        max_seq_len=32,
        tie_embeddings=False,
    )
    model = Llama(config)
    model.init_weights(torch.Generator().manual_seed(1))
    return model


def shard(model: nn.Module, engine: ModuleType, case: Case) -> nn.Module:
    """Each block a unit, and the root the rest."""
    param_dtype, reduce_dtype = PRECISIONS[case.precision]
    reshard: Any = {"auto": None, "True": True, "False": False, "int": 2}[case.reshard]
    settings = {
        "mp_policy": engine.MixedPrecisionPolicy(param_dtype, reduce_dtype),
        "reshard_after_forward": reshard,
    }
    for layer in model.layers:
        engine.fully_shard(layer, **settings)
    return engine.fully_shard(model, **settings)


def train(engine: ModuleType, case: Case, steps: int = 5) -> list[tuple[str, torch.Tensor]]:
    """Every loss, gradient, norm and parameter of a training run, this rank's rows, in order."""
    model = shard(build(case), engine, case)
    if case.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    clip = torch.nn.utils.clip_grad_norm_ if engine is upstream else minifsdp.clip_grad_norm_
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    seen: list[tuple[str, torch.Tensor]] = []
    synced = {
        "plain": [True],
        "synced": [True, True],
        "unsynced": [False, True],
        "mixed": [True, False, False, True],
    }[case.accumulation]
    for step in range(steps):
        for micro, sync in enumerate(synced):
            model.set_requires_gradient_sync(sync)
            tokens = torch.randint(0, VOCAB, (2, 9), generator=data)
            logits = model(tokens[:, :-1]).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            seen.append((f"step {step}.{micro} loss", loss.detach().clone()))
        seen += rows_of(model, f"step {step} gradient", gradients=True)
        if case.clip == "clip":
            norm = clip(model.parameters(), 0.5)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            seen.append((f"step {step} norm", norm.clone()))
        optimizer.step()
        optimizer.zero_grad()
        seen += rows_of(model, f"step {step} parameter")
    return seen


def rows_of(model: nn.Module, what: str, gradients: bool = False) -> list[tuple[str, torch.Tensor]]:
    """Copies of this rank's rows of all parameters, or of their gradients."""
    rows = []
    for name, param in model.named_parameters():
        tensor = param.grad if gradients else param
        if tensor is not None:
            rows.append((f"{what} {name}", tensor.detach().to_local().clone()))
    return rows


def differences(case: Case) -> list[str]:
    """What differs between our engine and upstream's, on this rank; empty when every bit is equal.

    Raises AssertionError if the comparison could not have found a difference.
    """
    with use_collectives(case.collectives):
        ours = train(minifsdp, case)
    theirs = train(upstream, case)
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    assert any("gradient" in name and rows.any() for name, rows in theirs), "all gradients are zero"
    return [
        name
        for (name, a), (_, b) in zip(ours, theirs, strict=True)
        if a.dtype != b.dtype or not torch.equal(a, b)
    ]

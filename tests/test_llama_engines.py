"""Packed batches with losses from the head, on every engine that train.py offers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import stack
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import minifsdp
from llama import Llama, LlamaConfig

LENGTHS = [[3, 3, 4, 10], [1, 19]]
VOCAB = 51


class Recomputed(nn.Module):
    """A block that is run again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> torch.Tensor:
        return checkpoint(self.block, *args, use_reentrant=False)


def model(tied: bool = False) -> Llama:
    """A model whose head goes through a batch in several chunks."""
    config = LlamaConfig(
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        ffn_hidden=48,
        vocab_size=VOCAB,
        max_seq_len=32,
        tie_embeddings=tied,
    )
    made = Llama(config)
    made.init_weights(torch.Generator().manual_seed(1))
    made.output.chunk_bytes = 7 * VOCAB * 4
    return made


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """A rank's own tokens and targets, (2, 20), a third of them none, and lengths."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(VOCAB, (2, 20), generator=generator)
    targets = torch.randint(VOCAB, (2, 20), generator=generator)
    none = torch.rand(2, 20, generator=generator) < 0.33
    return tokens, targets.masked_fill(none, -100), LENGTHS[rank % 2 :] + LENGTHS[: rank % 2]


def sharded(net: Llama, engine: str, bf16: bool) -> nn.Module:
    """The model as train.py shares it out: blocks, embedding and head are units."""
    half, reduce = (torch.bfloat16, torch.float32) if bf16 else (None, None)
    untied = [] if net.config.tie_embeddings else [net.tok_embeddings, net.output]
    if engine == "ddp":
        return DistributedDataParallel(net)
    if engine == "fsdp1":
        units = {*net.layers, *untied}
        return fsdp.FullyShardedDataParallel(
            net,
            auto_wrap_policy=CustomPolicy(lambda module: module in units),
            mixed_precision=fsdp.MixedPrecision(half, reduce) if bf16 else None,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    package = minifsdp if engine == "minifsdp" else fsdp
    settings = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "mp_policy": package.MixedPrecisionPolicy(half, reduce),
        "reshard_after_forward": True,
    }
    for module in (*net.layers, *untied, net):
        package.fully_shard(module, **settings)
    return net


def _losses_and_gradients(
    engine: str, bf16: bool = False, tied: bool = False, recompute: bool = False
) -> list[torch.Tensor]:
    """This rank's losses, and every gradient in full, in the order of the plain model's."""
    net = model(tied)
    if recompute:
        net.layers = nn.ModuleList(Recomputed(block) for block in net.layers)
    run = sharded(net, engine, bf16)
    tokens, targets, documents = batch(dist.get_rank())
    losses = run(tokens, targets=targets, documents=documents)
    losses.sum().backward()
    if engine == "fsdp1":
        with run.summon_full_params(run, with_grads=True):
            gradients = [p.grad.clone() for p in run.parameters()]
    else:
        gradients = [stack.whole(p.grad) for p in run.parameters()]
    return [losses.detach(), *gradients]


def _off(engine: str, *how: bool) -> tuple[float, float]:
    """How far losses and gradients are from those of whole logits and documents on their own, in
    float64; relative to the largest loss and, for each gradient, its largest element."""
    found, *gradients = _losses_and_gradients(engine, *how)
    plain = model(tied=len(how) > 1 and how[1]).double()
    expected = []
    for rank in range(dist.get_world_size()):
        tokens, targets, documents = batch(rank)
        alone = []
        for of_row, row, wanted in zip(documents, tokens, targets, strict=True):
            for document, target in zip(row.split(of_row), wanted.split(of_row), strict=True):
                logits = plain(document[None])[0]
                alone.append(F.cross_entropy(logits, target, reduction="none"))
        expected.append(torch.cat(alone).view(tokens.shape))
    (torch.stack(expected).sum() / dist.get_world_size()).backward()
    mine = expected[dist.get_rank()].detach()

    def off(a: torch.Tensor, b: torch.Tensor) -> float:
        return ((a - b).abs().max() / b.abs().max()).item()

    wanted = [p.grad for p in plain.parameters()]
    return off(found, mine), max(off(a, b) for a, b in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize("engine", ["minifsdp", "fsdp2", "fsdp1", "ddp"])
@pytest.mark.parametrize("recompute", [False, True])
def test_every_engine_trains_packed_rows_as_documents_on_their_own(run_ranks, engine, recompute):
    for losses, gradients in run_ranks(2, _off, engine, False, False, recompute):
        assert losses < 1e-6 and gradients < 1e-5


@pytest.mark.parametrize("engine", ["minifsdp", "fsdp2", "fsdp1"])
@pytest.mark.parametrize("tied", [False, True])
def test_in_bfloat16_losses_are_off_by_the_rounding_of_logits_alone(run_ranks, engine, tied):
    for losses, gradients in run_ranks(2, _off, engine, True, tied):
        assert losses < 2e-3 and gradients < 4e-2


def _unequal(bf16: bool, tied: bool) -> list[int]:
    """Which of the losses and gradients differ in any bit between the two engines."""
    ours, theirs = (_losses_and_gradients(e, bf16, tied) for e in ("minifsdp", "fsdp2"))
    assert all(gradient.any() for gradient in ours)
    pairs = enumerate(zip(ours, theirs, strict=True))
    return [at for at, (a, b) in pairs if a.dtype != b.dtype or not torch.equal(a, b)]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_both_sharding_engines_train_to_the_same_bits(run_ranks, bf16, tied):
    assert run_ranks(2, _unequal, bf16, tied) == [[], []]


def _head_unit() -> tuple[list[str], int, list[int]]:
    """The head's messages in a forward and a backward, how many weights of its shape autograd saves
    in the forward, and their bytes before the backward and after it."""
    net = sharded(model(), "minifsdp", True)
    saved: list[torch.Tensor] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == net.output.weight.shape:
            saved.append(tensor)
        return tensor

    tokens, targets, documents = batch(dist.get_rank())
    with stack.messages() as seen:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            losses = net(tokens, targets=targets, documents=documents)
        held_bytes = [sum(t.untyped_storage().nbytes() for t in saved)]
        losses.sum().backward()
    held_bytes.append(sum(t.untyped_storage().nbytes() for t in saved))
    return [message for message in seen if message.endswith("output")], len(saved), held_bytes


def test_the_head_is_gathered_once_each_way_and_freed_in_between(run_ranks):
    expected = (["AG output", "AG output", "RS output"], 1, [0, 0])
    assert run_ranks(2, _head_unit) == [expected] * 2


def _a_rank_without_targets(engine: str) -> list[torch.Tensor]:
    net = sharded(model(), engine, True)
    tokens, targets, documents = batch(dist.get_rank())
    if dist.get_rank() == 0:
        targets = torch.full_like(targets, -100)
    net(tokens, targets=targets, documents=documents).sum().backward()
    return [stack.whole(p.grad) for p in net.parameters()]


def _same_without_targets_on_a_rank() -> bool:
    ours, theirs = map(_a_rank_without_targets, ("minifsdp", "fsdp2"))
    return stack.same_bits(ours, theirs) and all(g.isfinite().all() and g.any() for g in ours)


def test_a_rank_without_a_single_target_takes_part(run_ranks):
    assert run_ranks(2, _same_without_targets_on_a_rank) == [True, True]


def test_a_frozen_head_is_left_alone_by_a_copy_of_the_model():
    net = model()
    net.output.requires_grad_(False)
    twin = copy.deepcopy(net)
    tokens, targets, documents = batch(0)
    for each in (net, twin):
        each(tokens, targets=targets, documents=documents).sum().backward()
        assert each.output.weight.grad is None and each.tok_embeddings.weight.grad.any()

"""Models to plan, sharded as `train.py` shards: Llama 2, and one of MPT's shape."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import minifsdp
from llama import Llama, LlamaConfig
from llama.lora import add_lora

Built = tuple[nn.Module, Callable[[nn.Module], Any]]


@dataclass(frozen=True)
class Options:
    """How a model is trained and sharded; fields as `train.py`'s flags."""

    activation_checkpointing: bool = False
    selective_checkpointing: bool = False
    """Keep attention's outputs and every other matrix product's, recompute the rest."""
    bf16: bool = False
    """Compute in bfloat16, reduce in float32, keep float32 rows."""
    reduce_bf16: bool = False
    """With bf16: reduce in bfloat16 too."""
    pure_bf16: bool = False
    """Rows, gradients and optimizer state in bfloat16 as well."""
    cpu_offload: bool = False
    reshard_after_forward: bool | int | None = None
    replicas: int = 1
    """HSDP: as many copies of the shards."""
    lora_rank: int = 0
    step_in_backward: bool = False
    head_chunk_bytes: int | None = None
    """Of the logits held at once; None: the head's own bound."""


def llama(config: LlamaConfig, device_type: str, options: Options) -> Built:
    """A Llama on meta, sharded over all ranks, and what makes its optimizer."""
    with torch.device("meta"):
        model = Llama(config)
    if options.lora_rank:
        add_lora(model, options.lora_rank, base_dtype=torch.bfloat16 if options.bf16 else None)
    if options.head_chunk_bytes is not None:
        model.output.chunk_bytes = options.head_chunk_bytes
    ends = [] if config.tie_embeddings else [model.tok_embeddings, model.output]
    return shard(model, list(model.layers), ends, device_type, options)


def shard(
    model: nn.Module, blocks: list[nn.Module], ends: list[nn.Module], device_type: str, o: Options
) -> Built:
    """Make a unit of each block and of each of `ends`; the root holds the rest."""
    if o.pure_bf16:
        model.bfloat16()
    if o.activation_checkpointing or o.selective_checkpointing:
        how = {"context_fn": _selective} if o.selective_checkpointing else {}
        for block in blocks:
            block.forward = functools.partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **how
            )
    world_size = dist.get_world_size()
    if o.replicas > 1:
        mesh = init_device_mesh(device_type, (o.replicas, world_size // o.replicas))
    else:
        mesh = init_device_mesh(device_type, (world_size,))
    settings: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": o.reshard_after_forward}
    if o.bf16:
        reduced = torch.bfloat16 if o.reduce_bf16 else torch.float32
        settings["mp_policy"] = minifsdp.MixedPrecisionPolicy(torch.bfloat16, reduced)
    if o.cpu_offload:
        settings["offload_policy"] = minifsdp.CPUOffloadPolicy()
    for module in (*blocks, *ends):
        minifsdp.fully_shard(module, **settings)
    minifsdp.fully_shard(model, **settings)
    return model, step_in_backward if o.step_in_backward else adamw


def _selective() -> Any:
    """What torchtitan calls selective checkpointing by operator."""
    products = {False: 0, True: 0}  # in forward, and while recomputing

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = func in _KEPT
        if func is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


_KEPT = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Fused AdamW over what is trained."""
    return _adamw([p for p in model.parameters() if p.requires_grad])


def _adamw(params: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def step_in_backward(model: nn.Module) -> Any:
    """The same, a unit at a time, as gradients arrive."""
    return minifsdp.step_in_backward(model, _adamw)


def tokens_and_targets(batch: int, seq: int, device_type: str) -> dict[str, Tensor]:
    """A micro-batch for a Llama, of one token everywhere: what it says costs nothing."""
    tokens = torch.zeros(batch, seq, dtype=torch.int64, device=device_type)
    return {"tokens": tokens, "targets": torch.zeros_like(tokens)}


# ---- MPT (MosaicML's llm-foundry): layer norms and linear layers with biases, GELU -----------


@dataclass(frozen=True)
class MPTConfig:
    """The shape that llm-foundry calls 70b."""

    dim: int = 8192
    n_layers: int = 80
    n_heads: int = 64
    vocab_size: int = 50368
    max_seq_len: int = 2048


class MPTBlock(nn.Module):
    def __init__(self, config: MPTConfig) -> None:
        super().__init__()
        dim = config.dim
        self.n_heads = config.n_heads
        self.norm_1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm_2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class MPT(nn.Module):
    """A decoder of MPT's shape: learned positions, the head tied to the embedding."""

    def __init__(self, config: MPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.dim)
        self.wpe = nn.Embedding(config.max_seq_len, config.dim)
        self.blocks = nn.ModuleList(MPTBlock(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def mpt(config: MPTConfig, device_type: str, options: Options) -> Built:
    """The same for MPT's shape; embedding and head are one matrix, the root's."""
    with torch.device("meta"):
        model = MPT(config)
    return shard(model, list(model.blocks), [], device_type, options)

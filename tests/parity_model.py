"""The model that parity is tested on: a Llama of three blocks, with what a case adds to it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llama import Llama, LlamaConfig
from llama.model import FeedForward, TransformerBlock

if TYPE_CHECKING:
    from parity import Case

VOCAB = 51


class Recomputed(nn.Module):
    """A block whose activations are recomputed: checkpointing outside the unit."""

    def __init__(self, block: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.block, self.use_reentrant = block, use_reentrant

    def forward(self, *args: object) -> Tensor:
        return checkpoint(self.block, *args, use_reentrant=self.use_reentrant)


class EitherFeedForward(nn.Module):
    """Two feed-forwards, of which even ranks use one and odd ranks the other."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.even, self.odd = FeedForward(dim, hidden), FeedForward(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(x) if dist.get_rank() % 2 else self.even(x)


class ParityLlama(Llama):
    """A Llama that says which of its modules become units."""

    def units(self) -> list[nn.Module]:
        """The blocks, and the spare one that forward never runs."""
        spare = [self.spare] if hasattr(self, "spare") else []
        return [getattr(block, "block", block) for block in self.layers] + spare


def build(case: Case) -> ParityLlama:
    """The case's model, the same on every rank."""
    heads, dim, hidden = (1, 2, 3) if case.rows == "few" else (3, 30, 77)
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
        tie_embeddings=case.parameters == "tied",
    )
    model = ParityLlama(config)
    if case.parameters == "unused on a rank":
        model.layers[1].feed_forward = EitherFeedForward(dim, hidden)
    if case.parameters == "module unused":
        model.spare = TransformerBlock(config, model.rotary)
    model.init_weights(torch.Generator().manual_seed(1))
    if case.parameters == "some frozen":
        model.layers[0].requires_grad_(False)
    if case.parameters in ("some frozen", "frozen, then not"):
        for block in model.layers:
            block.attention.wq.requires_grad_(False)
            block.ffn_norm.requires_grad_(False)
    if case.parameters == "module used twice":
        model.layers = nn.ModuleList([model.layers[i] for i in (0, 1, 1, 2)])
    _checkpoint(model, case.checkpointing)
    return model


def _checkpoint(model: ParityLlama, where: str) -> None:
    """Recompute each block: inside the unit (its forward), or outside (a module around it)."""
    if where == "none":
        return
    reentrant = where.endswith("reentrant")
    if where.startswith("inside"):
        for block in dict.fromkeys(model.layers):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
    else:
        model.layers = nn.ModuleList([Recomputed(block, reentrant) for block in model.layers])

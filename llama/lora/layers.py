"""Linear layers with adapters.

[Note: what a frozen matrix costs]
Its own bytes, in any type. A linear layer whose weight needs no gradient keeps no input for
backward, autograd computes its input's gradient alone, and an engine reduces those gradients that
are there. So W stays the parameter it was, under its name, and never enters a sum that is trained:
anything computed from W and the adapters together would need a gradient of W's size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llama.head import Head, chunks_of, with_target


class LoRALinear(nn.Linear):
    """A frozen linear layer with an adapter: `linear(x, W) + scale * B(A(dropout(x)))`.

    `lora_a` is `(rank, in_features)`, `lora_b` `(out_features, rank)`. The result has the type that
    the layer alone would give.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        nn.Linear.__init__(self, base.in_features, base.out_features, bias=False, device="meta")
        self.weight = base.weight
        self.rank, self.alpha, self.scale = rank, alpha, alpha / rank
        like = {
            "bias": False,
            "device": base.weight.device,
            "dtype": torch.promote_types(base.weight.dtype, torch.float32),
        }
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.lora_a = nn.Linear(base.in_features, rank, **like)
        self.lora_b = nn.Linear(rank, base.out_features, **like)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        low = self.lora_a(self.dropout(x.to(self.lora_a.weight.dtype)))
        # Scaled here, where it is smallest.
        return (result + self.lora_b(low * self.scale)).to(result.dtype)


class LoRAHead(LoRALinear, Head):
    """The output head with an adapter: logits, or losses of which no more than `chunk_bytes` of
    logits are held at once."""

    def __init__(self, base: Head, rank: int, alpha: float, dropout: float) -> None:
        super().__init__(base, rank, alpha, dropout)
        self.chunk_bytes = base.chunk_bytes

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return super().forward(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        rows_at_once = max(1, self.chunk_bytes // (self.out_features * wide.itemsize))
        x, flat = x.flatten(0, -2), targets.flatten()
        chosen = with_target(flat)
        chunks = chunks_of(len(chosen), rows_at_once) or [slice(0, 0)]  # one for the engine's sake
        losses = torch.zeros(len(flat), dtype=wide, device=x.device)
        for rows in chunks:
            piece = x[chosen[rows]], flat[chosen[rows]]
            if len(chunks) == 1:
                loss = self._losses(*piece)
            else:  # backward computes the logits again
                loss = checkpoint(self._losses, *piece, use_reentrant=False)
            losses = losses.index_copy(0, chosen[rows], loss)
        return losses.view(targets.shape)

    def _losses(self, x: Tensor, targets: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = super().forward(x).to(wide)
        return F.cross_entropy(logits, targets, reduction="none")


def adapters(model: nn.Module) -> dict[str, LoRALinear]:
    """The layers that have adapters, by their paths."""
    return {path: m for path, m in model.named_modules() if isinstance(m, LoRALinear)}


def is_adapter(name: str) -> bool:
    """Whether this is the name of an adapter's parameter."""
    return name.endswith((".lora_a.weight", ".lora_b.weight"))

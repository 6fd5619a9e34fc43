"""The output head: logits, or the loss of each token without ever holding all logits.

[Note: loss in chunks]
Logits of one batch are vocabulary times larger than a row of tokens: 4 x 4096 tokens of Llama 2
have 2 GiB of them in float32, and cross-entropy holds them three times. So the head takes the
targets itself, picks the tokens that have one, and goes through them a chunk at a time: forward
keeps each chunk's losses and drops its logits, backward computes them again (one more product with
the weight, a fourth of the head's work). It does so inside the module's own forward, because a
sharding engine gathers a unit's weight around its module's forward and backward: one message each.
The weight that autograd saved is the gathered one; it is whole again when backward reads it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor  # nothing public tells one
from torch.autograd.function import once_differentiable

NO_LOSS = -100  # the target that torch's cross_entropy leaves out by default
CHUNK_BYTES = 64 * 2**20  # of a chunk's logits in float32; backward holds them twice


class Head(nn.Linear):
    """A linear layer without bias from `dim` to the vocabulary, with cross-entropy built in.

    `chunk_bytes` bounds the logits held at once, in bytes of what the loss is computed in.
    """

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.chunk_bytes = CHUNK_BYTES

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits `(batch, seq, vocab)` of `x`, `(batch, seq, dim)`; or, given `targets`, integers
        `(batch, seq)`, the loss of each token, `(batch, seq)`, and 0 where the target is -100.

        Losses are float32, or float64 for such an `x`; logits have x's dtype first.
        """
        if targets is None:
            return super().forward(x)
        weight, device = self.weight, x.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, weight = x.to(dtype), weight.to(dtype)
        wide = torch.promote_types(x.dtype, torch.float32)
        rows_at_once = max(1, self.chunk_bytes // (self.out_features * wide.itemsize))
        losses = _Losses.apply(x.flatten(0, -2), weight, targets.flatten(), rows_at_once)
        return losses.view(targets.shape)


class _Losses(torch.autograd.Function):
    """`cross_entropy(x @ weight.T, targets, reduction="none")` of `(tokens, dim)` x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows_at_once: int) -> Tensor:
        losses = x.new_zeros(len(x), dtype=torch.promote_types(x.dtype, torch.float32))
        chosen = with_target(targets)
        if len(chosen) < len(x):
            x, targets = x[chosen], targets[chosen]
        chunks = chunks_of(len(x), rows_at_once)
        for rows in chunks:
            logits = F.linear(x[rows], weight)
            loss = F.cross_entropy(logits.to(losses.dtype), targets[rows], reduction="none")
            losses[chosen[rows]] = loss
        ctx.chunks = chunks
        # A single chunk is within the bound: it need not be computed again.
        ctx.save_for_backward(x, weight, targets, chosen, logits if len(chunks) == 1 else None)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, targets, chosen, kept = ctx.saved_tensors
        x_wanted, weight_wanted, *_ = ctx.needs_input_grad
        grad_x = x.new_zeros(len(grad_losses), x.shape[1]) if x_wanted else None
        # Sums of several chunks would lose bits in a narrower dtype.
        sum_dtype = grad_losses.dtype if len(ctx.chunks) > 1 else weight.dtype
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if weight_wanted else None
        for rows in ctx.chunks:
            logits = F.linear(x[rows], weight) if kept is None else kept
            grad = torch.softmax(logits.to(grad_losses.dtype), dim=-1)
            del logits
            grad[torch.arange(len(grad), device=grad.device), targets[rows]] -= 1
            grad = grad.mul_(grad_losses[chosen[rows], None]).to(x.dtype)
            if x_wanted:
                grad_x[chosen[rows]] = grad @ weight
            if weight_wanted and grad.dtype == sum_dtype:
                grad_weight.addmm_(grad.T, x[rows])
            elif weight_wanted:
                grad_weight += grad.T @ x[rows]
            del grad  # before the next chunk's
        return grad_x, grad_weight.to(weight.dtype) if weight_wanted else None, None, None


def with_target(targets: Tensor) -> Tensor:
    """Where `targets`, `(tokens,)`, have one: indices in order.

    Their number decides what is skipped, so a GPU is waited for here, once in a forward; all of the
    head's work follows, which keeps it busy.
    """
    wanted = targets != NO_LOSS
    if wanted.is_meta or isinstance(wanted, FakeTensor):  # no values, no choice
        return torch.arange(len(targets), device=targets.device)
    return wanted.nonzero().squeeze(1)


def chunks_of(count: int, rows_at_once: int) -> list[slice]:
    """`count` rows as few chunks of about the same size, each of at most `rows_at_once`."""
    chunks = -(-count // rows_at_once)
    return [slice(count * i // chunks, count * (i + 1) // chunks) for i in range(chunks)]

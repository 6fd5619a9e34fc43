"""Llama 2 in plain PyTorch, with Meta's parameter names and Hugging Face's rotary layout."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama.attention import Attention, Documents, RotaryTables
from llama.cache import KVCache, LayerCache
from llama.config import LlamaConfig
from llama.head import Head
from llama.parameters import local_part, named_parameters, own_rows


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x ** 2) + eps) * weight`, the quotient in float32 at least
    (Zhang and Sennrich, arXiv:1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class FeedForward(nn.Module):
    """`w2(silu(w1(x)) * w3(x))`: SwiGLU (Shazeer, arXiv:2002.05202)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each on a normalised copy and added back to `x`."""

    def __init__(self, config: LlamaConfig, rotary: RotaryTables) -> None:
        super().__init__()
        self.attention = Attention(config, rotary)
        self.feed_forward = FeedForward(config.dim, config.ffn_hidden)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions, mask, cache, documents)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Llama 2: `model(tokens)` maps token ids `(batch, seq)` to logits `(batch, seq, vocab)`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.rotary = RotaryTables(config.head_dim, config.rope_theta, config.max_seq_len)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(
            TransformerBlock(config, self.rotary) for _ in range(config.n_layers)
        )
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = Head(config.dim, config.vocab_size)
        self.tie_weights()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        *,
        targets: Tensor | None = None,
        documents: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Logits of the token after each token; or, given `targets`, the loss of each.

        `positions`, integers `(seq,)` or `(batch, seq)`, count from 0, or on from the cache, unless
        given. Attention is causal in the order of the tokens whatever the positions. With a cache
        the tokens continue what it holds and are added to it. `targets`, `(batch, seq)` int64, give
        losses of that shape, float32 at least, 0 where the target is -100 (see `llama.head`).
        `documents` holds the lengths of each row's documents, which sum to seq: tokens attend
        within their own document, and positions restart at 0 in each. ValueError for arguments that
        do not fit one another or the model.
        """
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be (batch, seq), not of shape {tuple(tokens.shape)}")
        if targets is not None and targets.shape != tokens.shape:
            raise ValueError(
                f"targets must be {tuple(tokens.shape)} as tokens are, not {tuple(targets.shape)}"
            )
        if documents is not None and cache is not None:
            raise ValueError(
                "documents and a cache cannot go together: one holds several documents a row, the "
                "other one"
            )
        packed = None if documents is None else Documents(documents, *tokens.shape)
        seq = tokens.shape[1]
        past = 0 if cache is None else cache.length
        longest = past + seq if packed is None else packed.longest
        if longest > self.config.max_seq_len:
            raise ValueError(
                f"a sequence of {longest} tokens exceeds max_seq_len {self.config.max_seq_len}: "
                "shorten it, or build the model with a larger LlamaConfig.max_seq_len"
            )
        if positions is not None:
            if positions.shape not in (tokens.shape, tokens.shape[1:]):
                raise ValueError(
                    f"positions must be (seq,) or (batch, seq) as tokens {tuple(tokens.shape)} "
                    f"are, not {tuple(positions.shape)}"
                )
        elif packed is not None:
            positions = packed.positions(tokens.device)
        elif cache is not None:
            positions = cache.positions(seq, tokens.device)
        else:
            positions = torch.arange(seq, device=tokens.device)
        mask = None if cache is None else cache.mask(seq, tokens.device)
        self.rotary.on(tokens.device)  # here, so that no compiled block has to build them
        x = self.tok_embeddings(tokens)
        for i, block in enumerate(self.layers):
            x = block(x, positions, mask, None if cache is None else cache.layers[i], packed)
        x = self.norm(x)
        return self.output(x) if targets is None else self.output(x, targets)

    def tie_weights(self) -> None:
        """Makes the head the embedding's parameter again where the configuration says so:
        `to_empty` and `to` on a meta model silently part the two."""
        if self.config.tie_embeddings and self.output.weight is not self.tok_embeddings.weight:
            self.output.weight = self.tok_embeddings.weight

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Fills every parameter: norms with ones, matrices from normal(0, 0.02), those that add to
        the residual stream (wo, w2) from normal(0, 0.02 / sqrt(2 n_layers)) (GPT-2).

        A parameter's values depend on the generator's state and its own name and shape alone, so a
        sharded model gets the rows of what a plain one gets. One full parameter is held at a time.
        """
        self.tie_weights()
        draw = torch.randint(2**62, (), generator=generator, device=generator.device).item()
        residual_std = 0.02 / (2 * self.config.n_layers) ** 0.5
        for name, parameter in named_parameters(self).items():
            local = local_part(parameter)
            if parameter.dim() == 1:
                local.fill_(1.0)
                continue
            own = torch.Generator(generator.device).manual_seed(draw ^ zlib.crc32(name.encode()))
            std = residual_std if name.endswith(("wo.weight", "w2.weight")) else 0.02
            full = torch.empty(parameter.shape, device=generator.device)
            local.copy_(full.normal_(0.0, std, generator=own)[own_rows(parameter)])

"""Llama 2 in plain PyTorch, with Meta's parameter names and Hugging Face's rotary layout.

Shape suffixes: B batch, S sequence, D dim, H query heads, K key and value heads, E head dim.
"""

from __future__ import annotations

import zlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama.cache import KVCache, LayerCache
from llama.config import LlamaConfig
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


class RotaryTables:
    """Cosines and sines of every position's angles, `(max_seq_len, head_dim / 2)` float32.

    [Note: rotary tables are neither parameters nor buffers]
    A buffer is garbage after construction on the meta device and `to_empty`; it is cast by
    `model.bfloat16()`, in which position 256 equals 257; and a sharding engine's mixed precision
    casts floating-point inputs of a block. So the tables are plain tensors of this plain object,
    built when a device first asks, and blocks are handed integer positions. They are float32 for
    every model, float64 included, because that is what Llama 2's weights were trained with.
    """

    def __init__(self, head_dim: int, theta: float, max_seq_len: int) -> None:
        self.head_dim, self.theta, self.max_seq_len = head_dim, theta, max_seq_len
        self._tables: tuple[Tensor, Tensor] | None = None

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The two tables on `device`, built at the first call and when the device changes."""
        if self._tables is None or self._tables[0].device != device:
            pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
            frequencies = 1.0 / (self.theta ** (pairs / self.head_dim))
            positions = torch.arange(self.max_seq_len, dtype=torch.float32, device=device)
            angles = torch.outer(positions, frequencies)
            self._tables = (angles.cos(), angles.sin())
        return self._tables


def rotate(x_BSHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pair (x[i], x[i + E/2]) of each head by its position's angle i: the half-split
    form of rotary embedding (Su et al., arXiv:2104.09864; Hugging Face's modeling_llama.py).

    `cos` and `sin` are `(batch or 1, seq, 1, E / 2)` float32; the result has x's dtype.
    """
    first, second = x_BSHE.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_BSHE.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions (Ainslie et al., arXiv:2305.13245)."""

    def __init__(self, config: LlamaConfig, rotary: RotaryTables) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.n_heads != config.n_kv_heads
        self.rotary = rotary
        kv_dim = config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(
        self, x_BSD: Tensor, positions: Tensor, mask: Tensor | None, cache: LayerCache | None
    ) -> Tensor:
        cos, sin = (table[positions].unsqueeze(-2) for table in self.rotary.on(x_BSD.device))
        heads = (*x_BSD.shape[:2], -1, self.head_dim)
        q_BHSE = rotate(self.wq(x_BSD).view(heads), cos, sin).transpose(1, 2)
        k_BKSE = rotate(self.wk(x_BSD).view(heads), cos, sin).transpose(1, 2)
        v_BKSE = self.wv(x_BSD).view(heads).transpose(1, 2)
        if cache is not None:
            k_BKSE, v_BKSE = cache.extend(k_BKSE, v_BKSE)
        mixed_BHSE = F.scaled_dot_product_attention(
            q_BHSE,
            k_BKSE,
            v_BKSE,
            attn_mask=mask,
            # A single token without a mask is the last one: it sees all that the cache holds.
            is_causal=mask is None and x_BSD.shape[1] > 1,
            enable_gqa=self.grouped,
        )
        return self.wo(mixed_BHSE.transpose(1, 2).flatten(2))


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
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions, mask, cache)
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
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie_weights()

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Logits of the token after each token.

        `positions`, integers `(seq,)` or `(batch, seq)`, count from 0, or on from the cache, unless
        given. Attention is causal in the order of the tokens whatever the positions. With a cache
        the tokens continue what it holds and are added to it.
        """
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be (batch, seq), not of shape {tuple(tokens.shape)}")
        seq = tokens.shape[1]
        past = 0 if cache is None else cache.length
        if past + seq > self.config.max_seq_len:
            raise ValueError(
                f"a sequence of {past + seq} tokens exceeds max_seq_len {self.config.max_seq_len}: "
                "shorten it, or build the model with a larger LlamaConfig.max_seq_len"
            )
        if positions is None:
            if cache is None:
                positions = torch.arange(seq, device=tokens.device)
            else:
                positions = cache.positions(seq, tokens.device)
        elif positions.shape not in (tokens.shape, tokens.shape[1:]):
            raise ValueError(
                f"positions must be (seq,) or (batch, seq) as tokens {tuple(tokens.shape)} are, "
                f"not {tuple(positions.shape)}"
            )
        mask = None if cache is None else cache.mask(seq, tokens.device)
        self.rotary.on(tokens.device)  # here, so that no compiled block has to build them
        x = self.tok_embeddings(tokens)
        for i, block in enumerate(self.layers):
            x = block(x, positions, mask, None if cache is None else cache.layers[i])
        return self.output(self.norm(x))

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

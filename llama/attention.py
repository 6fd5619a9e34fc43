"""Attention with rotary positions: causal over a row, over a cache, or within packed documents.

Shape suffixes: B batch, S sequence, D dim, H query heads, K key and value heads, E head dim,
T tokens of the whole batch, N documents, L tokens of a document.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama.cache import LayerCache
from llama.config import LlamaConfig


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


class Documents:
    """Where the rows of a batch are cut into documents that do not see one another.

    [Note: packed rows]
    A mask for a packed row would take memory, and time, by the square of the row's length, and
    flash kernels take none. So each document's own slice of the queries, keys and values goes
    through causal attention, and the results are laid end to end again. The rows of a batch are cut
    alike, as one long row of `batch * seq` tokens; neighbours of one length go together, as a batch
    of views. The lengths are Python integers, so nothing waits for a device, and this is a plain
    object, so an engine's casting of a block's inputs passes it by.
    """

    def __init__(self, lengths: Sequence[Sequence[int]], batch: int, seq: int) -> None:
        if len(lengths) != batch:
            raise ValueError(
                f"documents must hold a list of lengths for each of {batch} rows, not for "
                f"{len(lengths)}"
            )
        for row, of_row in enumerate(lengths):
            if sum(of_row) != seq:
                raise ValueError(
                    f"the documents of row {row} have {sum(of_row)} tokens in all, but the row has "
                    f"{seq}: padding counts as a document too"
                )
            if min(of_row) < 1:
                raise ValueError(f"row {row} has a document of {min(of_row)} tokens: leave it out")
        self.batch = batch
        self.lengths = [int(length) for of_row in lengths for length in of_row]
        self.longest = max(self.lengths, default=0)
        self.runs = [(len(list(same)), length) for length, same in itertools.groupby(self.lengths)]

    def positions(self, device: torch.device) -> Tensor:
        """Each token's place in its document, `(batch, seq)` int64."""
        ruler = torch.arange(self.longest, device=device)
        return torch.cat([ruler[:length] for length in self.lengths]).view(self.batch, -1)

    # Left out of a compiled block: the lengths of every batch would compile it anew.
    @torch.compiler.disable
    def attend(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
        """Causal attention within each document, `(batch, seq, heads, head_dim)`."""
        grouped = q_BSHE.shape[2] != k_BSKE.shape[2]
        tokens = [count * length for count, length in self.runs]
        pieces = (x.flatten(0, 1).split(tokens) for x in (q_BSHE, k_BSKE, v_BSKE))
        mixed_THE = []
        for (count, length), *qkv in zip(self.runs, *pieces, strict=True):
            qkv_NHLE = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)
            mixed_NHLE = F.scaled_dot_product_attention(
                *qkv_NHLE, is_causal=True, enable_gqa=grouped
            )
            mixed_THE.append(mixed_NHLE.transpose(1, 2).flatten(0, 1))
        return torch.cat(mixed_THE).view_as(q_BSHE)


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
        self,
        x_BSD: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        cos, sin = (table[positions].unsqueeze(-2) for table in self.rotary.on(x_BSD.device))
        heads = (*x_BSD.shape[:2], -1, self.head_dim)
        q_BSHE = rotate(self.wq(x_BSD).view(heads), cos, sin)
        k_BSKE = rotate(self.wk(x_BSD).view(heads), cos, sin)
        v_BSKE = self.wv(x_BSD).view(heads)
        if documents is not None:
            return self.wo(documents.attend(q_BSHE, k_BSKE, v_BSKE).flatten(2))
        k_BKSE, v_BKSE = k_BSKE.transpose(1, 2), v_BSKE.transpose(1, 2)
        if cache is not None:
            k_BKSE, v_BKSE = cache.extend(k_BKSE, v_BKSE)
        mixed_BHSE = F.scaled_dot_product_attention(
            q_BSHE.transpose(1, 2),
            k_BKSE,
            v_BKSE,
            attn_mask=mask,
            # A single token without a mask is the last one: it sees all that the cache holds.
            is_causal=mask is None and (cache is None or x_BSD.shape[1] > 1),
            enable_gqa=self.grouped,
        )
        return self.wo(mixed_BHSE.transpose(1, 2).flatten(2))

"""What Hugging Face and Meta call each parameter, and how Meta's files cut and order its rows."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from llama.config import LlamaConfig

EMBEDDING, HEAD = "tok_embeddings.weight", "output.weight"

_HF_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
# Of matrices; a norm's weight is the same in every file.
_META_CUTS = {
    "tok_embeddings": 1,
    "output": 0,
    "attention.wq": 0,
    "attention.wk": 0,
    "attention.wv": 0,
    "attention.wo": 1,
    "feed_forward.w1": 0,
    "feed_forward.w2": 1,
    "feed_forward.w3": 0,
}


def hf_name(name: str) -> str:
    """Hugging Face's name of one of our parameters: `layers.0.attention.wq.weight` is
    `model.layers.0.self_attn.q_proj.weight`."""
    layer, module = _parts(name)
    if module not in _HF_NAMES:
        raise ValueError(f"parameter {name} has no place in a Hugging Face Llama folder")
    return f"{'model.' if layer else ''}{layer}{_HF_NAMES[module]}.weight"


def meta_cut(name: str) -> int | None:
    """The dimension along which Meta's files share a parameter; None if each has it whole."""
    _, module = _parts(name)
    if module not in _HF_NAMES:
        raise ValueError(f"parameter {name} has no place in Meta's files")
    return _META_CUTS.get(module)


def meta_rows(name: str, config: LlamaConfig) -> Tensor | None:
    """For each of our rows, the row of Meta's joined matrix that it is; None if all are in place.

    [Note: rotary rows]
    Rotary embedding turns pairs of a head's rows. Meta pairs neighbours (2i, 2i + 1), Hugging Face
    and this model row i with row i + head_dim / 2. So, in each head of queries and keys, our first
    half is Meta's even rows and our second half its odd ones; nothing else differs.
    """
    _, module = _parts(name)
    heads = {"attention.wq": config.n_heads, "attention.wk": config.n_kv_heads}.get(module)
    if heads is None:
        return None
    rows = torch.arange(heads * config.head_dim)
    return rows.view(heads, config.head_dim // 2, 2).transpose(1, 2).reshape(-1)


def _parts(name: str) -> tuple[str, str]:
    """`layers.3.` or nothing, and the module after it, which is empty if it is none of Llama's."""
    module, _, kind = name.rpartition(".")
    layer = re.match(r"layers\.\d+\.", module)
    prefix = layer[0] if layer else ""
    return prefix, module.removeprefix(prefix) if kind == "weight" else ""


def some(names: set[str] | list[str]) -> str:
    """`a, b, c and 9 more`, in alphabetic order."""
    shown = sorted(names)[:3]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")

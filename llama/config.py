"""The shape of a Llama 2 model: presets, Hugging Face's config.json, Meta's params.json."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "7b": dict(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, ffn_hidden=11008),
    "13b": dict(dim=5120, n_layers=40, n_heads=40, n_kv_heads=40, ffn_hidden=13824),
    "34b": dict(
        dim=8192,
        n_layers=48,
        n_heads=64,
        n_kv_heads=8,
        ffn_hidden=22016,
        rope_theta=1e6,
        max_seq_len=16384,
    ),
    "70b": dict(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_hidden=28672),
    "tiny": dict(
        dim=128,
        n_layers=2,
        n_heads=4,
        n_kv_heads=4,
        ffn_hidden=256,
        vocab_size=512,
        max_seq_len=256,
    ),
}


@dataclass(frozen=True)
class LlamaConfig:
    """Everything that fixes a model's parameters and arithmetic; ValueError if inconsistent."""

    dim: int  # width of the residual stream
    n_layers: int
    n_heads: int  # query heads; head_dim is dim / n_heads
    n_kv_heads: int  # key and value heads, each shared by n_heads / n_kv_heads query heads
    ffn_hidden: int  # width inside the feed-forward
    vocab_size: int = 32000
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0  # base of the rotary wavelengths
    max_seq_len: int = 4096  # tokens; no position may reach it
    tie_embeddings: bool = False  # the output head is the embedding's own parameter

    def __post_init__(self) -> None:
        for name in (*_INTEGERS, "max_seq_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"LlamaConfig.{name} must be a positive integer, not {value!r}")
        for name in ("norm_eps", "rope_theta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"LlamaConfig.{name} must be a positive number, not {value!r}")
        if self.dim % self.n_heads:
            raise ValueError(
                f"LlamaConfig.dim ({self.dim}) must be a multiple of n_heads ({self.n_heads})"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"LlamaConfig.n_heads ({self.n_heads}) must be a multiple of "
                f"n_kv_heads ({self.n_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"LlamaConfig: dim / n_heads is {self.head_dim}, but rotary embedding turns pairs: "
                "it must be even"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads

    @property
    def num_parameters(self) -> int:
        """Exact number of parameters; a tied head counts once."""
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)
        block = attention + 3 * self.dim * self.ffn_hidden + 2 * self.dim
        tables = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return self.n_layers * block + tables + self.dim

    @classmethod
    def preset(cls, name: str) -> LlamaConfig:
        """The model called `7b`, `13b`, `34b` (Code Llama), `70b`, or `tiny` (runs on a laptop)."""
        if name not in PRESETS:
            raise ValueError(f"no preset named {name!r}; there are: {', '.join(PRESETS)}")
        return cls(**PRESETS[name])

    @classmethod
    def from_hf(cls, dir: str | Path) -> LlamaConfig:
        """Reads `config.json` of a Hugging Face Llama; ValueError for a variant that is not Llama 2
        (biases, scaled rotary embedding, another activation or head size)."""
        path = Path(dir) / "config.json"
        hf = _read_json(path)
        for key in ("rope_parameters", "rope_scaling"):
            if not isinstance(hf.get(key) or {}, dict):
                raise ValueError(f"{path}: {key!r} must be an object or null, not {hf[key]!r}")
        rope = hf.get("rope_parameters") or {}  # transformers 5; before it, rope_theta by itself
        scaling = hf.get("rope_scaling") or rope
        theta = rope if rope.get("rope_theta") is not None else hf
        tied = hf.get("tie_word_embeddings", False)
        if not isinstance(tied, bool):
            raise ValueError(f"{path}: 'tie_word_embeddings' must be true or false, not {tied!r}")
        heads = _take(hf, "num_attention_heads", path)
        dim = _take(hf, "hidden_size", path)
        fixed = {
            "model_type": (hf.get("model_type", "llama"), "llama"),
            "hidden_act": (hf.get("hidden_act", "silu"), "silu"),
            "attention_bias": (hf.get("attention_bias", False), False),
            "mlp_bias": (hf.get("mlp_bias", False), False),
            "rope type": (scaling.get("rope_type", scaling.get("type", "default")), "default"),
            "head_dim": (hf.get("head_dim") or dim // heads, dim // heads),
        }
        for key, (value, supported) in fixed.items():
            if value != supported:
                raise ValueError(f"{path}: {key} is {value!r}; this Llama 2 has {supported!r} only")
        return cls._from_file(
            path,
            dim=dim,
            n_layers=_take(hf, "num_hidden_layers", path),
            n_heads=heads,
            n_kv_heads=_take(hf, "num_key_value_heads", path, heads),
            ffn_hidden=_take(hf, "intermediate_size", path),
            vocab_size=_take(hf, "vocab_size", path),
            norm_eps=_take_number(hf, "rms_norm_eps", path, 1e-6),
            rope_theta=_take_number(theta, "rope_theta", path, 10000.0),
            max_seq_len=_take(hf, "max_position_embeddings", path, 2048),
            tie_embeddings=tied,
        )

    @classmethod
    def from_meta(cls, dir: str | Path) -> LlamaConfig:
        """Reads Meta's `params.json`; what it leaves out is as in meta-llama's model.py.

        `vocab_size` of -1 is taken from a `tokenizer.model` beside the file or one folder up, else
        it is 32000. The sequence length, which Meta does not record, is 4096, or Code Llama's 16384
        where `rope_theta` is Code Llama's 1e6.
        """
        path = Path(dir) / "params.json"
        meta = _read_json(path)
        if meta.get("use_scaled_rope"):
            raise ValueError(
                f"{path}: use_scaled_rope: this Llama has no scaling of its rotary embedding, so "
                "positions would be wrong: Llama 2 and Code Llama are understood"
            )
        dim = _take(meta, "dim", path)
        heads = _take(meta, "n_heads", path)
        multiple = _take(meta, "multiple_of", path)
        multiplier = _take_number(meta, "ffn_dim_multiplier", path, 1.0)
        counted = meta.get("vocab_size", -1) != -1
        theta = _take_number(meta, "rope_theta", path, 10000.0)
        return cls._from_file(
            path,
            dim=dim,
            n_layers=_take(meta, "n_layers", path),
            n_heads=heads,
            n_kv_heads=_take(meta, "n_kv_heads", path, heads),
            ffn_hidden=_meta_hidden(dim, multiple, multiplier),
            vocab_size=_take(meta, "vocab_size", path) if counted else _vocabulary_beside(path),
            norm_eps=_take_number(meta, "norm_eps", path, 1e-5),
            rope_theta=theta,
            max_seq_len=16384 if theta == 1e6 else 4096,
        )

    @classmethod
    def _from_file(cls, path: Path, **fields: Any) -> LlamaConfig:
        """The config of `fields`; a ValueError names the file that they are from."""
        try:
            return cls(**fields)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def to_hf(self) -> dict[str, Any]:
        """The contents of a `config.json` that transformers reads as LlamaForCausalLM."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.dim,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn_hidden,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": self.max_seq_len,
            "tie_word_embeddings": self.tie_embeddings,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    def to_meta(self) -> dict[str, Any]:
        """The contents of a `params.json` that gives this shape.

        `max_seq_len` and `tie_embeddings` are left out, and `rope_theta` where it is Llama 2's:
        Meta's own loader refuses keys that its `ModelArgs` lacks or is given twice.
        """
        base = int(2 * 4 * self.dim / 3)
        # Llama 2 7B and 13B, 70B, then whatever gives the hidden size: a multiple of 1 rounds
        # nothing up, and half above it int() cannot fall short by a rounding of the product.
        choices = [(256, 1.0), (4096, 1.3), (1, (self.ffn_hidden + 0.5) / base)]
        multiple, multiplier = next(
            c for c in choices if _meta_hidden(self.dim, *c) == self.ffn_hidden
        )
        return {
            "dim": self.dim,
            "multiple_of": multiple,
            **({} if multiplier == 1.0 else {"ffn_dim_multiplier": multiplier}),
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "n_layers": self.n_layers,
            "norm_eps": self.norm_eps,
            **({} if self.rope_theta == 10000.0 else {"rope_theta": self.rope_theta}),
            "vocab_size": self.vocab_size,
        }


def _meta_hidden(dim: int, multiple: int, multiplier: float) -> int:
    """Width inside the feed-forward as meta-llama's model.py computes it."""
    hidden = int(multiplier * int(2 * 4 * dim / 3))
    return math.ceil(hidden / multiple) * multiple


_INTEGERS = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_hidden", "vocab_size")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; is {path.parent} the model's folder?")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a JSON object, not a {type(content).__name__}")
    return content


def _take(content: dict[str, Any], key: str, path: Path, default: int | None = None) -> int:
    value = default if content.get(key) is None else content[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{path}: {key!r} must be a positive integer, not {value!r}")
    return value


def _take_number(content: dict[str, Any], key: str, path: Path, default: float) -> float:
    value = default if content.get(key) is None else content[key]
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"{path}: {key!r} must be a positive number, not {value!r}")
    return float(value)


def _vocabulary_beside(path: Path) -> int:
    from llama.tokenizer import Tokenizer  # SentencePiece is needed in this one case only

    for folder in (path.parent, path.parent.parent):
        if (folder / "tokenizer.model").is_file():
            return Tokenizer(folder / "tokenizer.model").vocab_size
    return 32000

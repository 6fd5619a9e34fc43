"""From one folder of weights to another, without a model: a buffer of rows at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from llama.config import LlamaConfig
from llama.model import Llama
from llama.weights import transfer
from llama.weights.consolidated import MetaSource
from llama.weights.hf import HFSink, HFSource
from llama.weights.meta import MetaSink
from llama.weights.names import EMBEDDING, HEAD
from llama.weights.publish import Ranks, published

FORMATS = ("hf", "meta")


def convert(
    source: tuple[str, str | Path],
    target: tuple[str, str | Path],
    dtype: torch.dtype | None = None,
    shards: int = 1,
    max_seq_len: int | None = None,
) -> LlamaConfig:
    """Writes the weights in one folder as another; both are given as `("hf" or "meta", folder)`.

    Values are cast to `dtype` (default: as they are stored). `shards` counts Meta's files. Meta
    does not record the sequence length or tied embeddings: `max_seq_len` gives the one, and a head
    that equals the embedding bit for bit is taken as tied. `tokenizer.model` goes along; in a
    download of Meta's it lies one folder up. Errors as in loading and saving.
    """
    (kind, dir), (target_kind, target_dir) = source, target
    config = LlamaConfig.from_hf(dir) if kind == "hf" else LlamaConfig.from_meta(dir)
    if max_seq_len is not None:
        config = replace(config, max_seq_len=max_seq_len)
    opened = HFSource(dir) if kind == "hf" else MetaSource(dir, config)
    if kind == "meta" and {EMBEDDING, HEAD} <= set(opened.stored):
        rows = slice(0, opened.stored[EMBEDDING].shape[0])
        config = replace(config, tie_embeddings=transfer.head_is_embedding(opened, rows))
    shapes = _shapes(config)
    transfer.check(
        opened, {name: (shape, dtype or torch.float32) for name, shape in shapes.items()}, config
    )
    if config.tie_embeddings:
        transfer.check_tie(opened, slice(0, shapes[EMBEDDING][0]))
    tensors = {
        name: (shape, dtype or opened.stored[opened.label(name)].dtype)
        for name, shape in shapes.items()
    }
    tokenizer = _tokenizer_of(Path(dir), kind)
    ranks = Ranks(sharded=False)
    with published(Path(target_dir), ranks) as folder:
        if target_kind == "hf":
            sink = HFSink(folder, config, tensors, tokenizer_path=tokenizer)
        else:
            sink = MetaSink(folder, config, tensors, shards, tokenizer_path=tokenizer)
        sink.create()
        transfer.copy(opened, sink, shapes)
        sink.finish(ranks)
    return config


def _shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape by its name, in the model's order."""
    with torch.device("meta"):
        model = Llama(config)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def _tokenizer_of(folder: Path, kind: str) -> Path | None:
    beside = [folder / "tokenizer.model"]
    if kind == "meta":
        beside.append(folder.resolve().parent / "tokenizer.model")
    return next((path for path in beside if path.is_file()), None)

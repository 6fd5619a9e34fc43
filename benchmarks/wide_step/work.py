"""What is trained: the model, its batch, its optimizer; and what processes tell each other."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llama import Llama, LlamaConfig
from minifsdp import fully_shard

WIDE = replace(LlamaConfig.preset("70b"), n_layers=2)
WIDE_PARAMETERS = 2_235_604_992
RANKS, SEQ, SEED = 2, 16, 0
LEARNING_RATE = 1.0  # the first step without momentum: of less, most rounds away in bfloat16
VARIANTS = ("same row", "own rows")
"""Of the global batch of a row for each rank: all ranks take its first, or each its own."""


class Job(NamedTuple):
    """What all processes are told."""

    config: LlamaConfig
    folder: Path

    def tokens(self) -> Tensor:
        """The global batch, (RANKS, SEQ + 1): inputs, and targets one further."""
        generator = torch.Generator().manual_seed(SEED)
        return torch.randint(self.config.vocab_size, (RANKS, SEQ + 1), generator=generator)

    def say(self, name: str, figures: dict[str, Any]) -> None:
        """Write figures for the verdict."""
        (self.folder / f"{name}.json").write_text(json.dumps(figures))

    def said(self, name: str) -> Any:
        """What a process wrote with `say`."""
        return json.loads((self.folder / f"{name}.json").read_text())


def on_meta(config: LlamaConfig) -> Llama:
    """The model in bfloat16 without memory, its blocks recomputed in backward."""
    with torch.device("meta"):
        model = Llama(config).bfloat16()
    for block in model.layers:  # before sharding, so that recomputation finds full weights
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )
    return model


def sharded(config: LlamaConfig) -> tuple[Llama, Callable[[nn.Module], torch.optim.Optimizer]]:
    """The same, a unit for each block, the embedding and the head; and what makes its optimizer."""
    model = on_meta(config)
    for module in (*model.layers, model.tok_embeddings, model.output, model):
        fully_shard(module)
    return model, sgd


def fill(model: Llama) -> None:
    """Memory and weights: what `SEED` gives, whatever the number of ranks."""
    model.to_empty(device="cpu")
    model.init_weights(torch.Generator().manual_seed(SEED))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD: it has no state."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def backward(model: nn.Module, rows: Tensor) -> float:
    """Forward and backward of rows, (batch, SEQ + 1); the mean loss of their tokens."""
    loss = model(rows[:, :-1], targets=rows[:, 1:]).mean()
    loss.backward()
    return loss.item()

"""What is trained: Llamas of a few shapes, on random text that is the same under every engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama import Llama, LlamaConfig

_HEAD_DIM = 64
_VOCABULARY = 256


@dataclass(frozen=True)
class Work:
    """A model and a batch of `batch` sequences of `seq` tokens on every rank."""

    name: str
    about: str
    dim: int
    n_layers: int
    batch: int
    seq: int
    rounds: int
    """How many timed rounds are enough, unless the user says otherwise."""

    @property
    def config(self) -> LlamaConfig:
        heads = 4 if self.dim == _HEAD_DIM else self.dim // _HEAD_DIM
        return LlamaConfig(
            dim=self.dim,
            n_layers=self.n_layers,
            n_heads=heads,
            n_kv_heads=heads,
            ffn_hidden=self.dim * 11 // 4,
            vocab_size=_VOCABULARY,
            max_seq_len=self.seq,
        )

    def describe(self) -> dict[str, Any]:
        """The work as a JSON object, with its number of parameters."""
        shape = {k: v for k, v in asdict(self).items() if k not in ("about", "rounds")}
        return shape | {"parameters": self.config.num_parameters}

    def model(self, seed: int) -> Llama:
        """The model on the CPU; `seed` fixes its weights."""
        model = Llama(self.config)
        model.init_weights(torch.Generator().manual_seed(seed))
        return model

    def tokens(self, seed: int, step: int, rank: int, device: torch.device) -> Tensor:
        """The batch of one rank in one step, (batch, seq + 1): inputs, and targets one further."""
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + rank)
        shape = (self.batch, self.seq + 1)
        return torch.randint(_VOCABULARY, shape, generator=generator).to(device)

    def shard_bytes(self, world_size: int, sharded: bool) -> int:
        """Bytes of a rank's float32 parameter rows, padding included, and two moments of them.

        A parameter of `rows` gives each rank ceil(rows / world_size); an engine that does not shard
        keeps all of them.
        """
        with torch.device("meta"):
            parameters = list(Llama(self.config).parameters())
        ranks = world_size if sharded else 1
        own_numel = sum(-(-p.shape[0] // ranks) * p[0].numel() for p in parameters)
        return own_numel * 4 * 3


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy of each next token; tokens (batch, seq + 1)."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


WORKS = {
    work.name: work
    for work in (
        Work("short", "short sequences: communication weighs most", 512, 4, 2, 64, 20),
        Work("host", "tiny blocks: the host's work between kernels decides", 64, 16, 1, 16, 20),
        Work("medium", "longer sequences: compute hides communication", 512, 4, 2, 512, 5),
        Work("compute", "long sequences, wide blocks: compute decides", 1024, 2, 1, 1024, 4),
        Work("memory", "few tokens: no activations to hide what engines hold", 512, 4, 1, 16, 20),
        Work("tiny", "to see that the benchmark works", 64, 2, 1, 8, 5),
    )
}

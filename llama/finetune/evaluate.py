"""What a model is worth: its loss for each token, its exact answers, and what it says.

Every function runs the model equally often on every rank, however its work divides, since a sharded
model that one rank runs alone waits for the others for ever.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from llama import Tokenizer
from llama.finetune.data import NO_LOSS, Example, eval_batches
from llama.generate import generate


class Question(NamedTuple):
    """A prompt with one right answer."""

    kind: str
    prompt: list[int]  # token ids, up to where the answer begins
    answer: str


def summed_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy summed over the targets that are not -100, in float32.

    `tokens` and `targets` are (batch, seq).
    """
    logits = model(tokens).float().flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=NO_LOSS, reduction="sum")


@torch.no_grad()
def mean_loss(
    model: nn.Module, examples: Sequence[Example], batch: int, pad_id: int, device: torch.device
) -> float:
    """Mean loss of a target token over all `examples`; a rank takes `batch` at a time."""
    rank, world_size = _rank_and_world_size()
    loss_and_targets = torch.zeros(2, dtype=torch.float64, device=device)
    for tokens, targets in eval_batches(examples, batch, pad_id, rank, world_size):
        loss = summed_loss(model, tokens.to(device), targets.to(device))
        loss_and_targets += torch.stack([loss, (targets != NO_LOSS).sum().to(loss)])
    if world_size > 1:
        dist.all_reduce(loss_and_targets)
    loss, targets = loss_and_targets.tolist()
    return loss / targets


def exact_match(
    model: nn.Module, tokenizer: Tokenizer, questions: Sequence[Question], batch: int = 64
) -> dict[str, float]:
    """Share of `questions` answered to the letter: of each kind, and over all as "all"."""
    rank, world_size = _rank_and_world_size()
    kinds = sorted({question.kind for question in questions})
    longest = max(len(tokenizer.encode(question.answer)) for question in questions) + 4
    right_and_asked = torch.zeros(len(kinds), 2, dtype=torch.float64)
    for start in range(0, len(questions), batch * world_size):
        mine = questions[start + rank : start + batch * world_size : world_size]
        said = answers(model, tokenizer, [q.prompt for q in mine], longest)
        for question, text in zip(mine, said, strict=True):
            row = right_and_asked[kinds.index(question.kind)]
            row += torch.tensor([text == question.answer, True])
    if world_size > 1:
        dist.all_reduce(right_and_asked)
    right, asked = right_and_asked.unbind(1)
    shares = dict(zip(kinds, (right / asked).tolist(), strict=True))
    return {"all": (right.sum() / asked.sum()).item()} | shares


def answers(
    model: nn.Module, tokenizer: Tokenizer, prompts: Sequence[list[int]], max_new_tokens: int
) -> list[str]:
    """The likeliest answer to each prompt, as long as asked for or as the model allows."""
    room = model.config.max_seq_len - max(map(len, prompts), default=0)
    new = generate(model, prompts, min(max_new_tokens, room), eos_id=tokenizer.eos_id)
    return [tokenizer.decode(answer).strip() for answer in new]


def _rank_and_world_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

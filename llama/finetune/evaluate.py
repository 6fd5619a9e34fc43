"""What a model is worth: its loss for each token, its exact answers, and what it says.

Every function runs the model equally often on every rank, however its work divides, since a sharded
model that one rank runs alone waits for the others for ever.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llama import Tokenizer
from llama.finetune.data import NO_LOSS, Example, eval_batches
from llama.generate import generate


class Question(NamedTuple):
    """A prompt with one right answer."""

    kind: str
    prompt: list[int]  # token ids, up to where the answer begins
    answer: str


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and afterwards in what it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def summed_loss(
    model: nn.Module,
    tokens: Tensor,
    targets: Tensor,
    documents: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Cross-entropy summed over the targets that are not -100, 0-d, float32 at least.

    `tokens` and `targets` are (batch, seq); `documents` are the lengths of each row's documents,
    where rows are packed.
    """
    return model(tokens, targets=targets, documents=documents).sum()


@torch.no_grad()
def mean_loss(
    model: nn.Module,
    examples: Sequence[Example],
    batch: int,
    pad_id: int,
    device: torch.device,
    pack_to: int | None = None,
) -> float:
    """Mean loss of a target token over all `examples`; a rank takes `batch` rows at a time, of one
    example each or of as many as `pack_to` tokens hold. ValueError where nothing is learnt."""
    rank, world_size = _rank_and_world_size()
    loss_and_targets = torch.zeros(2, dtype=torch.float64, device=device)
    with without_dropout(model):
        for part in eval_batches(examples, batch, pad_id, rank, world_size, pack_to):
            tokens, targets = part.tokens.to(device), part.targets.to(device)
            loss = summed_loss(model, tokens, targets, part.documents)
            loss_and_targets += torch.stack([loss, (targets != NO_LOSS).sum().to(loss)])
    if world_size > 1:
        dist.all_reduce(loss_and_targets)
    loss, targets = loss_and_targets.tolist()
    if targets == 0:
        raise ValueError(
            f"none of the {len(examples)} examples to evaluate on has a token that bears loss, so "
            "there is no mean: evaluate on dialogs with answers, or on texts"
        )
    return loss / targets


def perplexity(loss: float) -> float:
    """`exp(loss)` of a mean loss in nats: infinity where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


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
    with without_dropout(model):
        new = generate(model, prompts, min(max_new_tokens, room), eos_id=tokenizer.eos_id)
    return [tokenizer.decode(answer).strip() for answer in new]


def _rank_and_world_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

"""The loop that appends tokens: greedy or sampled, one prompt or many, plain model or sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from llama.cache import KVCache


class Refusal(ValueError):
    """Arguments do not fit the model, on this rank or another; no rank has run a forward."""


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_ids: Sequence[int] | Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
    *,
    on_token: Callable[[int, int], object] | None = None,
    cache: KVCache | None = None,
) -> list[int] | list[list[int]]:
    """The tokens that follow a prompt, or those of each prompt of a batch, without the prompt.

    A sequence ends before `eos_id`, or after `max_new_tokens`. Temperature 0 takes the likeliest
    token; else tokens are drawn from the `top_p` likeliest mass (nucleus sampling, Holtzman et al.,
    arXiv:1904.09751). `model` is a Llama, or wrapped so that it still has its `config`. ValueError
    (a `Refusal`) for prompts that do not fit the model.

    `on_token(row, token)` is told each token as soon as it is chosen, and ends the row after it by
    returning true; on a sharded model it must not raise. `cache` is for one prompt: what it holds
    are the prompt's first tokens, so only the others are fed; it then holds the new ones too, but
    for the last. An exception leaves it in no certain state.

    [Note: generation on a sharded model]
    Every forward gathers parameters from all ranks, so ranks must take the same number of steps
    though their prompts, even their number (a rank may bring an empty batch), differ. All ranks
    call this; before each token they ask one another whether anybody still runs, and a rank that
    is through feeds the model a token nobody looks at. A rank whose prompts are refused says so in
    the first exchange, and the others stop too.
    """
    single = isinstance(prompt_ids, str) or (
        len(prompt_ids) > 0 and not isinstance(prompt_ids[0], Sequence)
    )
    prompts = [list(prompt_ids)] if single else [list(prompt) for prompt in prompt_ids]
    groups, device = ranks_and_device(model)
    refusal = _refusal(model, prompts, max_new_tokens, temperature, top_p)
    if refusal is None and cache is not None:
        refusal = _misfit(cache, prompts, max_new_tokens)
    if _agreed(refusal is not None, groups, device):
        raise Refusal(refusal or "generate: another rank's arguments were refused, see there")

    new_ids: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts))) if max_new_tokens else set()
    if cache is None:
        tokens, cache = _left_padded(model, prompts, max_new_tokens, device)
    else:
        tokens = torch.tensor([prompts[0][cache.length :]], device=device)
    while _agreed(bool(open_rows), groups, device):
        if not open_rows:
            model(torch.zeros(1, 1, dtype=torch.int64, device=device))
            continue
        logits = model(tokens, cache=cache)[:, -1].float()
        tokens = _choose(logits, temperature, top_p, generator)[:, None]
        for row, token in enumerate(tokens[:, 0].tolist()):
            if row not in open_rows:
                continue
            if token == eos_id:
                open_rows.remove(row)
                continue
            new_ids[row].append(token)
            stop = on_token is not None and on_token(row, token)
            if stop or len(new_ids[row]) == max_new_tokens:
                open_rows.remove(row)
    return new_ids[0] if single else new_ids


def _refusal(
    model: nn.Module,
    prompts: list[list[int]],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
) -> str | None:
    """What is wrong with the arguments, if anything."""
    config = model.config
    if any(isinstance(token, str) for prompt in prompts for token in prompt):
        return (
            "generate takes token ids, not text: encode it with encode_dialog or Tokenizer.encode"
        )
    if max_new_tokens < 0:
        return f"max_new_tokens must not be negative, but is {max_new_tokens}"
    if not temperature >= 0:
        return f"temperature must be 0 or more, but is {temperature}"
    if not 0 < top_p <= 1:
        return f"top_p must be above 0 and at most 1, but is {top_p}"
    for number, prompt in enumerate(prompts):
        if not prompt:
            return f"prompt {number} is empty: it needs one token at least, such as BOS"
        if len(prompt) + max_new_tokens > config.max_seq_len:
            return (
                f"prompt {number} has {len(prompt)} tokens; with max_new_tokens {max_new_tokens} "
                f"that exceeds the model's max_seq_len {config.max_seq_len}: shorten one of them"
            )
        if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            return (
                f"prompt {number} has a token outside the model's vocabulary of "
                f"{config.vocab_size}: is the tokenizer the model's own?"
            )
    return None


def _misfit(cache: KVCache, prompts: list[list[int]], max_new_tokens: int) -> str | None:
    """Why `cache` cannot go on with the prompts, if it cannot."""
    if len(prompts) != 1 or cache.padding is not None:
        return f"a cache to go on with is for one prompt, without padding, not for {len(prompts)}"
    if cache.length >= len(prompts[0]):
        return f"the cache holds {cache.length} tokens, but must hold fewer than the prompt has"
    if len(prompts[0]) + max_new_tokens > cache.capacity:
        return f"the prompt and {max_new_tokens} new tokens exceed the cache's {cache.capacity}"
    return None


def _left_padded(
    model: nn.Module, prompts: list[list[int]], max_new_tokens: int, device: torch.device
) -> tuple[Tensor, KVCache]:
    """Prompts as `(batch, longest)` tokens that all end at the right edge, and their cache."""
    longest = max(map(len, prompts), default=0)
    missing = [longest - len(prompt) for prompt in prompts]
    rows = [[0] * pad + prompt for pad, prompt in zip(missing, prompts, strict=True)]
    padding = torch.tensor(missing, device=device) if any(missing) else None
    cache = KVCache(model.config.n_layers, longest + max_new_tokens, padding)
    return torch.tensor(rows, dtype=torch.int64, device=device), cache


def _choose(
    logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None
) -> Tensor:
    """One token id for each row of `(batch, vocab)` logits."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    # Drawn where the generator lives: a seed on the CPU gives the same text on any device.
    where = logits.device if generator is None else generator.device
    probabilities = torch.softmax(logits.to(where) / temperature, dim=-1)
    ranked, order = probabilities.sort(dim=-1, descending=True)
    likelier = ranked.cumsum(dim=-1) - ranked  # mass of all likelier tokens: 0 for the likeliest
    ranked = ranked.masked_fill(likelier >= top_p, 0.0)
    drawn = torch.multinomial(ranked, 1, generator=generator)
    return order.gather(-1, drawn)[:, 0].to(logits.device)


def ranks_and_device(model: nn.Module) -> tuple[list[dist.ProcessGroup], torch.device]:
    """The process groups whose ranks must run `model` equally often (none for a plain model), and
    the device that computes: not the parameters' own where they are offloaded."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            return mesh.get_all_groups(), torch.device(mesh.device_type)
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):  # FSDP1 has no DTensors to know it by
            return [module.process_group], module.compute_device
    return [], next(model.parameters()).device


def _agreed(flag: bool, groups: list[dist.ProcessGroup], device: torch.device) -> bool:
    """Whether `flag` is true on any rank of the groups."""
    if not groups:
        return flag
    votes = torch.tensor(int(flag), device=device)
    for group in groups:
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=group)
    return bool(votes.item())

"""Answers as text: how they are drawn, streamed, and continued without computing anything twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from llama.cache import KVCache
from llama.generate.conversation import Conversation
from llama.generate.decode import generate
from llama.generate.stream import TextStream
from llama.tokenizer import Tokenizer


@dataclass(frozen=True)
class Settings:
    """How a model is to answer; ValueError for what no model can do."""

    max_new_tokens: int = 512  # the longest answer, if the model's sequence has room for it
    temperature: float = 0.0  # 0: always the likeliest token
    top_p: float = 1.0  # share of the likeliest mass that is drawn from
    seed: int = 0  # of what is drawn
    system: str = ""  # the system text
    raw: bool = False  # continue a text as it is, outside the chat format

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be 1 or more, but is {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or more, but is {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, but is {self.top_p}")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must be from -2**63 to 2**64 - 1, but is {self.seed}")
        if self.raw and self.system:
            raise ValueError("a system text is a part of the chat format, which raw leaves out")


class Replier:
    """Answers one prompt after another.

    What the last prompt and its answer have in common with the next prompt is not computed again:
    its keys and values are kept. On a sharded model the other ranks call `accompany` meanwhile.
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, settings: Settings) -> None:
        self._model, self._tokenizer, self._settings = model, tokenizer, settings
        self._cache: KVCache | None = None
        self._cached: list[int] = []  # the tokens whose keys and values the cache holds
        self.seed(settings.seed)

    def seed(self, seed: int) -> None:
        """Draw from here on as `seed` says: on the CPU, so that every device draws the same."""
        self._generator = torch.Generator().manual_seed(seed)

    def reply(self, prompt: Sequence[int], on_text: Callable[[str], object] | None = None) -> str:
        """The answer to `prompt`, token ids.

        `on_text` gets it piece by piece, one a token and some empty, and ends it by returning true;
        on a sharded model it must not raise.
        """
        prompt, settings = list(prompt), self._settings
        after = prompt if settings.raw else ()
        stream = TextStream(self._tokenizer, after, strip=not settings.raw)
        pieces: list[str] = []

        def give(piece: str) -> object:
            pieces.append(piece)
            return on_text is not None and on_text(piece)

        cache = self._held_of(prompt)
        new = generate(
            self._model,
            prompt,
            min(settings.max_new_tokens, self._model.config.max_seq_len - len(prompt)),
            settings.temperature,
            settings.top_p,
            self._tokenizer.eos_id,
            self._generator,
            on_token=lambda row, token: give(stream.push(token)),
            cache=cache,
        )
        self._cache, self._cached = cache, [*prompt, *new][: cache.length]
        give(stream.finish())
        return "".join(pieces)

    def accompany(self) -> None:
        """Take part in the forwards of another rank's reply, until all ranks have theirs."""
        settings = self._settings
        generate(self._model, [], settings.max_new_tokens, settings.temperature, settings.top_p)

    def _held_of(self, prompt: list[int]) -> KVCache:
        """A cache that holds as many of the first tokens of `prompt` as were computed before."""
        cache, self._cache = self._cache, None  # lost, unless the reply comes to its end
        if cache is None:
            config = self._model.config
            return KVCache(config.n_layers, config.max_seq_len)
        held = 0
        for old, new in zip(self._cached, prompt[:-1], strict=False):  # one token must be fed
            if old != new:
                break
            held += 1
        for layer in cache.layers:
            layer.length = held
        return cache


def prompt_ids(tokenizer: Tokenizer, text: str, settings: Settings, max_seq_len: int) -> list[int]:
    """The prompt that `text` alone makes; ValueError if it makes none, or leaves no room."""
    if not text.strip():
        raise ValueError("a prompt is blank: give it some text")
    if not settings.raw:
        return Conversation(tokenizer, max_seq_len, settings.system).ask(text).ids
    ids = tokenizer.encode(text, bos=True)
    if len(ids) >= max_seq_len:
        raise ValueError(
            f"a prompt takes {len(ids)} tokens, and the model reads {max_seq_len} at once, what "
            "follows included: shorten it"
        )
    return ids


def answer_all(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    settings: Settings,
    write: Callable[[str], object] | None = None,
) -> list[str]:
    """The answer to each prompt by itself, on every rank; ValueError, on every rank, if one is bad.

    Ranks take the prompts in turn. `write` gets the answers in the prompts' order, a newline after
    each: on the only rank piece by piece, else on rank 0 alone and as they are finished. What is
    drawn depends on a prompt's number, not on the number of ranks.
    """
    several = dist.is_initialized() and dist.get_world_size() > 1
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    max_seq_len = model.config.max_seq_len
    encoded = [prompt_ids(tokenizer, text, settings, max_seq_len) for text in prompts]
    replier = Replier(model, tokenizer, settings)
    answers: list[str] = []
    for first in range(0, len(prompts), world_size):
        number, answer = first + rank, None
        if number < len(prompts):
            replier.seed((settings.seed + number) % 2**64)
            answer = replier.reply(encoded[number], None if several else write)
        else:
            replier.accompany()
        if not several:
            answers.append(answer)
            if write:
                write("\n")
            continue
        said: list[str | None] = [None] * world_size
        dist.all_gather_object(said, answer)
        answers += [text for text in said if text is not None]
        if write and rank == 0:
            write("".join(f"{text}\n" for text in answers[first:]))
    return answers

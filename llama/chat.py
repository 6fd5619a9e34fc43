"""Llama 2's chat format: messages to token ids, with a mask of the tokens to learn.

One turn is `BOS [INST] user [/INST] answer EOS`, each turn with a BOS and an EOS of its own; the
system text stands inside the first user text (meta-llama's generation.py, `chat_completion`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

TAGS = ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")


class Encoder(Protocol):
    """What this module needs of a tokenizer: `llama.Tokenizer` has it."""

    bos_id: int
    eos_id: int

    def encode(self, text: str) -> list[int]: ...


class Segment(NamedTuple):
    """A stretch of an example: BOS, `text` and, if it is `closed`, EOS.

    What follows `prompt` is learnt, EOS included, and with a prompt of "" all but BOS.
    """

    prompt: str  # the beginning of `text` that is given; all of it where an answer is asked for
    text: str
    closed: bool


def segments(messages: Sequence[Mapping[str, str]]) -> list[Segment]:
    """The turns of a dialog, as Llama 2 was trained on them.

    A message is `{"role": "system" | "user" | "assistant", "content": text}`: at most one system
    text, first (a blank one is as none), then user and assistant in turns. A dialog that ends with
    a user's text is left open for the model to answer. Raises ValueError, naming the message, for
    any other order, for a blank text, and for text that holds one of the format's own tags: they
    are ordinary characters, so a user who writes them could speak in the system's name.
    """
    system, texts = checked_texts(messages)
    if system:
        texts[0] = f"<<SYS>>\n{system}\n<</SYS>>\n\n{texts[0]}"
    turns: list[Segment] = []
    for user, answer in zip(texts[::2], [*texts[1::2], None], strict=False):
        prompt = f"[INST] {user} [/INST]"
        open_turn = Segment(prompt, prompt, False)
        turns.append(open_turn if answer is None else Segment(prompt, f"{prompt} {answer} ", True))
    return turns


def encode_dialog(
    tokenizer: Encoder, messages: Sequence[Mapping[str, str]]
) -> tuple[list[int], list[int]]:
    """Token ids of a dialog and a loss mask of the same length: 1 on answers and their EOS.

    See `segments` for what a dialog is; it raises the same errors.
    """
    ids: list[int] = []
    loss_mask: list[int] = []
    for segment in segments(messages):
        prompt_ids, text_ids = tokenizer.encode(segment.prompt), tokenizer.encode(segment.text)
        segment_ids, mask = join(tokenizer, segment, prompt_ids, text_ids)
        ids += segment_ids
        loss_mask += mask
    return ids, loss_mask


def join(
    tokenizer: Encoder, segment: Segment, prompt_ids: list[int], text_ids: list[int]
) -> tuple[list[int], list[int]]:
    """Ids and loss mask of a segment whose prompt and text have these ids.

    The text is encoded as one, because that is what Llama 2 saw; what is learnt begins at the first
    token that the prompt alone does not have, so one that joins prompt and answer is learnt.
    """
    begin = _common_prefix(prompt_ids, text_ids)
    ends = [tokenizer.eos_id] * segment.closed
    ids = [tokenizer.bos_id, *text_ids, *ends]
    return ids, [0] * (1 + begin) + [1] * (len(ids) - 1 - begin)


def tag_in(text: str) -> str | None:
    """The first of the chat format's own tags that `text` holds."""
    return next((tag for tag in TAGS if tag in text), None)


def checked_texts(messages: Sequence[Mapping[str, str]]) -> tuple[str, list[str]]:
    """The system's text, "" for none, and the others, user and assistant in turns, all stripped.

    Raises ValueError as `segments` does.
    """
    texts: list[str] = []
    system = ""
    for number, message in enumerate(messages, start=1):
        where = f"message {number} of {len(messages)}"
        try:
            role, content = message["role"], message["content"]
        except (KeyError, TypeError):
            raise ValueError(f'{where}: must be {{"role": ..., "content": ...}}') from None
        if not isinstance(content, str):
            raise ValueError(f"{where}: content must be text, not {type(content).__name__}")
        tag = tag_in(content)
        if tag is not None:
            raise ValueError(f"{where}: {role} text holds the chat format's tag {tag}: remove it")
        if role == "system" and number == 1:
            system = content.strip()
            continue
        expected = "assistant" if len(texts) % 2 else "user"
        if role not in ("system", "user", "assistant"):
            raise ValueError(f"{where}: unknown role {role!r}; there are system, user, assistant")
        if role != expected:
            raise ValueError(f"{where}: role is {role!r} where {expected!r} is due")
        if not content.strip():
            raise ValueError(f"{where}: {role} text is blank")
        texts.append(content.strip())
    if not texts:
        raise ValueError("a dialog needs at least one user message")
    return system, texts


def _common_prefix(one: list[int], other: list[int]) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length

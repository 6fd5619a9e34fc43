"""Llama 2's chat format: messages to token ids, with a mask of the tokens to learn.

One turn is `BOS [INST] user [/INST] answer EOS`, each turn with a BOS and an EOS of its own; the
system text stands inside the first user text (meta-llama's generation.py, `chat_completion`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

TAGS = ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")


class Encoder(Protocol):
    """What this module needs of a tokenizer: `llama.Tokenizer` has it."""

    bos_id: int
    eos_id: int

    def encode(self, text: str) -> list[int]: ...


def encode_dialog(
    tokenizer: Encoder, messages: Sequence[Mapping[str, str]]
) -> tuple[list[int], list[int]]:
    """Token ids of a dialog and a loss mask of the same length: 1 on answers and their EOS.

    A message is `{"role": "system" | "user" | "assistant", "content": text}`: at most one system
    text, first (a blank one is as none), then user and assistant in turns. A dialog that ends with
    a user's text is left open for the model to answer. Raises ValueError, naming the message, for
    any other order, for a blank text, and for text that holds one of the format's own tags: they
    are ordinary characters, so a user who writes them could speak in the system's name.
    """
    texts = _checked_texts(messages)
    ids: list[int] = []
    loss_mask: list[int] = []
    for user, answer in zip(texts[::2], [*texts[1::2], None], strict=False):
        prompt_ids = tokenizer.encode(f"[INST] {user} [/INST]")
        turn_ids = prompt_ids
        if answer is not None:
            turn_ids = tokenizer.encode(f"[INST] {user} [/INST] {answer} ")
        # Encoded as one text, because that is what Llama 2 saw; the answer begins at the first
        # token that the prompt alone does not have, so one that joins both is learnt.
        begin = _common_prefix(prompt_ids, turn_ids)
        ids += [tokenizer.bos_id, *turn_ids]
        loss_mask += [0] * (1 + begin) + [1] * (len(turn_ids) - begin)
        if answer is not None:
            ids.append(tokenizer.eos_id)
            loss_mask.append(1)
    return ids, loss_mask


def _checked_texts(messages: Sequence[Mapping[str, str]]) -> list[str]:
    """Stripped texts, user and assistant alternating, the system's put into the first."""
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
        tag = next((tag for tag in TAGS if tag in content), None)
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
    if system:
        texts[0] = f"<<SYS>>\n{system}\n<</SYS>>\n\n{texts[0]}"
    return texts


def _common_prefix(one: list[int], other: list[int]) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length

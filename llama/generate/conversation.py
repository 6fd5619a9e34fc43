"""A dialog in progress: what was said, what of it still fits, and how the model is to read it."""

from __future__ import annotations

from typing import NamedTuple

from llama.chat import Encoder, encode_dialog


class Asked(NamedTuple):
    """A prompt that ends where the model is to answer."""

    ids: list[int]
    dropped: int  # oldest turns, a question and its answer each, that no longer fitted


class Conversation:
    """Turns of user and assistant after a system text, kept within `max_seq_len` tokens.

    `reserve` tokens are kept free for an answer as long as there are older turns to drop for it.
    ValueError, which leaves everything as it was, for text that the chat format cannot hold.
    """

    def __init__(
        self, tokenizer: Encoder, max_seq_len: int, system: str = "", reserve: int = 1
    ) -> None:
        self._tokenizer, self._max_seq_len, self._reserve = tokenizer, max_seq_len, reserve
        self._turns: list[tuple[str, str]] = []
        self._question: str | None = None  # waiting for its answer
        self._system = ""
        self.instruct(system)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The system text, if any, and the turns that are finished."""
        return self._messages(self._turns)

    def instruct(self, system: str) -> None:
        """Replace the system text, for all turns; a blank one is as none."""
        trial = [_message("system", system), _message("user", "?")]
        ids, _ = encode_dialog(self._tokenizer, trial)
        if len(ids) >= self._max_seq_len:
            raise ValueError(
                f"the system text takes {len(ids)} tokens, of {self._max_seq_len} that the model "
                "reads at once: shorten it"
            )
        self._system = system

    def ask(self, text: str) -> Asked:
        """The prompt of the dialog so far and the user's next text; ValueError if that alone
        leaves no room for an answer."""
        first = 0  # of the turns that stay
        while True:
            messages = [*self._messages(self._turns[first:]), _message("user", text)]
            ids, _ = encode_dialog(self._tokenizer, messages)
            alone = first == len(self._turns)
            if len(ids) + (1 if alone else self._reserve) <= self._max_seq_len:
                break
            if alone:
                raise ValueError(
                    f"the text takes {len(ids)} tokens, and the model reads {self._max_seq_len} at "
                    "once, its answer included: shorten it"
                )
            first += 1
        del self._turns[:first]
        self._question = text
        return Asked(ids, first)

    def answer(self, text: str) -> None:
        """Keep the open question with its answer; ValueError, and both are forgotten, for an
        answer that cannot be a part of prompts: a blank one, or one with the format's tags."""
        if self._question is None:
            raise RuntimeError("Conversation.answer: no question is open; call ask first")
        turn, self._question = (self._question, text), None
        encode_dialog(self._tokenizer, self._messages([turn]))
        self._turns.append(turn)

    def reset(self) -> None:
        """Forget all turns; the system text stays."""
        self._turns.clear()
        self._question = None

    def _messages(self, turns: list[tuple[str, str]]) -> list[dict[str, str]]:
        messages = [_message("system", self._system)] if self._system.strip() else []
        for question, answer in turns:
            messages += [_message("user", question), _message("assistant", answer)]
        return messages


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}

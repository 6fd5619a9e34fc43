"""Token ids to text while they come in: whole characters only, and nothing taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_UNREADABLE = "\ufffd"  # what SentencePiece decodes each byte of an unfinished character to
_LONGEST_UNFINISHED = 3  # bytes: a fourth finishes any UTF-8 character


class Decoder(Protocol):
    """What this module needs of a tokenizer: `llama.Tokenizer` has it."""

    def decode(self, ids: Sequence[int]) -> str: ...


class TextStream:
    """The text of a growing sequence of tokens, in pieces that join to what `decode` gives it.

    The tokens continue `after`, whose text is not given again. With `strip`, the joined pieces are
    the decoded text without white space at its ends.

    [Note: streaming text]
    A token's text depends on its neighbours: one at the beginning loses its space, and one of
    byte fallback is a part of a character. So all ids are decoded at each token (0.3 ms for 4096),
    and of the text only what later tokens cannot change is given: not the last bytes that make no
    character yet, and no white space that may turn out to be the end.
    """

    def __init__(self, decoder: Decoder, after: Sequence[int] = (), strip: bool = False) -> None:
        self._decoder = decoder
        self._ids = list(after)
        self._strip = strip
        self._given = len(decoder.decode(self._ids))  # characters

    def push(self, token: int) -> str:
        """The text that `token` makes certain, often its own, "" where it needs another."""
        self._ids.append(token)
        text = self._decoder.decode(self._ids)
        unfinished = len(text) - len(text.rstrip(_UNREADABLE))
        return self._rest(text[: len(text) - min(unfinished, _LONGEST_UNFINISHED)])

    def finish(self) -> str:
        """The text held back, once no token follows."""
        return self._rest(self._decoder.decode(self._ids))

    def _rest(self, text: str) -> str:
        if self._strip:
            text = text.strip()
        piece = text[self._given :]
        self._given += len(piece)
        return piece

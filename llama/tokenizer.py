"""Text to token ids and back, with a SentencePiece model such as Llama 2's `tokenizer.model`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from sentencepiece import SentencePieceProcessor


class Tokenizer:
    """A SentencePiece model with begin and end tokens.

    FileNotFoundError or ValueError, naming the path, for a file that is missing or no such model.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{path}: no such file; a SentencePiece model is needed")
        self._pieces = SentencePieceProcessor()
        content = self.path.read_bytes()
        self.sha256 = hashlib.sha256(content).hexdigest()
        try:
            self._pieces.LoadFromSerializedProto(content)
        except RuntimeError:
            raise ValueError(f"{path}: not a SentencePiece model (tokenizer.model)") from None
        self.vocab_size: int = self._pieces.vocab_size()
        self.bos_id: int = self._pieces.bos_id()
        self.eos_id: int = self._pieces.eos_id()
        if self.bos_id < 0 or self.eos_id < 0:
            raise ValueError(f"{path}: has no begin or no end token; train it with bos_id, eos_id")
        # Llama 2's model has no token for padding; positions that hold it bear no loss anyway.
        self.pad_id: int = self._pieces.pad_id() if self._pieces.pad_id() >= 0 else self.eos_id

    @property
    def special_pieces(self) -> dict[str, str]:
        """The texts that stand for control tokens: `{"bos_token": "<s>", ...}`."""
        ids = {"bos": self.bos_id, "eos": self.eos_id, "unk": self._pieces.unk_id()}
        return {f"{name}_token": self._pieces.id_to_piece(i) for name, i in ids.items()}

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        """Token ids of `text`, in which control tokens such as `</s>` are plain characters."""
        ids = self._pieces.encode(text)
        return [self.bos_id] * bos + ids + [self.eos_id] * eos

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """The token ids of each text, as `encode` gives them, found by `threads` threads."""
        return self._pieces.encode(list(texts), num_threads=threads) if texts else []

    def piece(self, i: int) -> str:
        """How the model writes token `i`, a space as U+2581; `<unused>` beyond the vocabulary."""
        return self._pieces.id_to_piece(i) if 0 <= i < self.vocab_size else "<unused>"

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens left out; an id that a larger model made up beyond
        the vocabulary reads as the unknown token."""
        unknown = self._pieces.unk_id()
        return self._pieces.decode([i if 0 <= i < self.vocab_size else unknown for i in ids])

"""Files that commands of a page name and that its reader brings: small ones, made there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from llama import Llama, LlamaConfig
from llama.finetune.tasks import TOKENIZER_PATH
from llama.weights import save_hf, save_meta

_ROLES = ("user", "assistant")


def _dialogs(path: Path) -> None:
    said = [["Hello", "Hi there"], ["How are you?", "Well"], ["Count", "one two three four"]]
    turns = [[{"role": r, "content": c} for r, c in zip(_ROLES, s, strict=True)] for s in said]
    path.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns * 4))


def _text(path: Path) -> None:
    path.write_text("It was a dark night.\n" * 20)


def _books(path: Path) -> None:
    path.mkdir()
    _text(path / "book.txt")


def _model() -> Llama:
    config = LlamaConfig(32, 2, 4, 2, 64, vocab_size=512, max_seq_len=4096)
    model = Llama(config)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def _hf(path: Path) -> None:
    save_hf(_model(), path, tokenizer_path=TOKENIZER_PATH)


def _meta(path: Path) -> None:
    save_meta(_model(), path)
    shutil.copy(TOKENIZER_PATH, path / "tokenizer.model")


# (pattern whose group is a name, what makes it); a name that is there already is left alone.
MATERIALS: list[tuple[str, Callable[[Path], None]]] = [
    (r"(?<=\s)(\S*llama-2-\d+b-meta)\b", _meta),
    (r"(?:--model |\s(?=\S+/tokenizer))(\S*?llama-2-\d+b)(?=[\s/]|$)", _hf),
    (r"[\s\"']([\w./-]+\.jsonl)\b", _dialogs),
    (r"[\s\"']([\w./-]+\.model)\b", lambda path: shutil.copy(TOKENIZER_PATH, path)),
    (r"[\s\"']([\w./-]+\.txt)\b", _text),
    (r"[\s\"'](\w+)/(?:=[\d.]+)?(?=[\s\"']|$)", _books),
]

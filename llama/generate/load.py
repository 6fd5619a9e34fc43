"""A model and its tokenizer from a folder in Hugging Face layout, ready to answer."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from llama.config import LlamaConfig
from llama.model import Llama
from llama.tokenizer import Tokenizer
from llama.weights import load_hf, load_peft


def load(
    folder: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    adapter: str | Path | None = None,
) -> tuple[Llama, Tokenizer]:
    """The model in `folder`, with parameters of `dtype` on `device`, and its `tokenizer.model`.

    Parameters are made there and in that type and filled from the files, so that no second copy of
    them exists. `adapter` is a folder of low-rank adapters as PEFT writes it. FileNotFoundError or
    ValueError, naming folder or file and the remedy, for what is missing or of another kind.
    """
    folder = Path(folder)
    check_folder(folder)
    config = LlamaConfig.from_hf(folder)
    tokenizer = Tokenizer(folder / "tokenizer.model")
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{tokenizer.path} has {tokenizer.vocab_size} pieces, the model a vocabulary of "
            f"{config.vocab_size}: it is another model's tokenizer"
        )
    with torch.device("meta"):
        model = Llama(config)
    model.to(dtype).to_empty(device=device)
    model.requires_grad_(False)
    load_hf(model, folder)
    if adapter is not None:
        load_peft(model, adapter)
    return model.eval(), tokenizer


def check_folder(folder: Path) -> None:
    """FileNotFoundError or ValueError for a folder that is missing, or that a run has made."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # LlamaConfig says what is wrong with it
    if isinstance(content, dict) and {"arguments", "model"} <= content.keys():
        export = folder / "export"
        when = "" if export.is_dir() else ", once it has finished"
        raise ValueError(f"{folder} is a run folder: its model is {export}{when}")

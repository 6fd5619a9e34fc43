"""Weights from and to Hugging Face folders, for plain models and for sharded ones.

Loading, a rank reads the rows it holds and no others; saving, no rank holds more than one full
parameter, except rank 0, which collects one output file.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from llama.config import LlamaConfig
from llama.parameters import full_copy, local_part, named_parameters, own_rows
from llama.tokenizer import Tokenizer

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"  # how others name a file that is alone and has no index

_HF_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def hf_name(name: str) -> str:
    """Hugging Face's name of one of our parameters: `layers.0.attention.wq.weight` is
    `model.layers.0.self_attn.q_proj.weight`."""
    module, _, kind = name.rpartition(".")
    layer = re.match(r"layers\.\d+\.", module)
    prefix = layer[0] if layer else ""
    if module.removeprefix(prefix) not in _HF_NAMES or kind != "weight":
        raise ValueError(f"parameter {name} has no place in a Hugging Face Llama folder")
    return f"{'model.' if prefix else ''}{prefix}{_HF_NAMES[module.removeprefix(prefix)]}.weight"


@torch.no_grad()
def load_hf(model: nn.Module, dir: str | Path) -> None:
    """Fills a Llama's parameters from the safetensors files of a Hugging Face folder.

    The model is plain or sharded by rows (DTensor); then every rank calls this and reads its own
    rows only. Values are cast from any floating-point type to the parameter's. Raises
    FileNotFoundError, or ValueError naming the tensor and its file, for files that are missing or
    damaged, tensors missing, left over or of another shape, and parameters still on meta.
    """
    folder = Path(dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    model.tie_weights()
    parameters = {hf_name(name): p for name, p in named_parameters(model).items()}
    with ExitStack() as stack:
        found = _tensors_in(folder, stack)
        left_over = set(found) - set(parameters)
        if model.config.tie_embeddings:
            left_over.discard("lm_head.weight")  # some files repeat the embedding under its name
        missing = set(parameters) - set(found)
        if missing or left_over:
            parts = [("lacks", missing), ("has, unknown to the model,", left_over)]
            what = "; ".join(f"{verb} {_some(names)}" for verb, names in parts if names)
            raise ValueError(f"{folder}: {what}: is the model's LlamaConfig that of this folder?")
        for name, parameter in parameters.items():
            path, file = found[name]
            stored = file.get_slice(name)
            if tuple(stored.get_shape()) != tuple(parameter.shape):
                raise ValueError(
                    f"{path}: {name} has shape {tuple(stored.get_shape())}, the model's parameter "
                    f"{tuple(parameter.shape)}: is its LlamaConfig that of this folder?"
                )
            rows = own_rows(parameter)
            if rows.start == rows.stop:
                continue
            values = stored[rows]
            if not values.is_floating_point():
                raise ValueError(
                    f"{path}: {name} holds {values.dtype}, which is quantised or no weight: only "
                    "floating-point weights can be loaded"
                )
            local_part(parameter).copy_(values)


def save_hf(
    model: nn.Module,
    dir: str | Path,
    dtype: torch.dtype | None = None,
    tokenizer_path: str | Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a Llama as a Hugging Face folder that transformers loads as LlamaForCausalLM.

    The model is plain, or sharded by rows (DTensor): then every rank calls this and rank 0 writes.
    Values are cast to `dtype` (default: each parameter's own). Weights go into files of at most
    `max_shard_bytes` (one larger tensor gets a file to itself), with an index of them.
    All is written beside `dir` and renamed at the end, so `dir` is complete or absent; ValueError
    if it exists and is not an empty folder. A failure on rank 0 is raised on every rank.
    """
    parameters = {hf_name(name): p for name, p in named_parameters(model).items()}
    sharded = any(isinstance(p, DTensor) for p in parameters.values())
    writes = not sharded or dist.get_rank() == 0
    target = Path(os.path.abspath(dir))
    unfinished = target.with_name(f".{target.name}.unfinished-{os.getpid()}")
    files = list(_divide(parameters, dtype, max_shard_bytes))

    def on_writer(action: Callable[[], None]) -> None:
        failure: Exception | None = None
        if writes:
            try:
                action()
            except Exception as error:
                failure = error
        if sharded:
            message = [None if failure is None else f"{type(failure).__name__}: {failure}"]
            dist.broadcast_object_list(message, src=0)
            if failure is None and message[0] is not None:
                raise RuntimeError(f"rank 0 could not write {target}: {message[0]}")
        if failure is not None:
            raise failure

    def begin() -> None:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"{target}: exists; remove it or choose another folder to save to")
        unfinished.mkdir(parents=True)
        tokenizer = None if tokenizer_path is None else Tokenizer(tokenizer_path)
        _write_descriptions(unfinished, model.config, dtype or _common_dtype(parameters), tokenizer)
        _write_index(unfinished, files, parameters, dtype)

    try:
        on_writer(begin)
        for number, names in enumerate(files, start=1):
            held: dict[str, torch.Tensor] = {}
            for name in names:
                full = full_copy(parameters[name], dtype)
                if writes:
                    held[name] = full.cpu().contiguous()
                del full
            path = unfinished / _file_name(number, len(files))
            on_writer(functools.partial(_write_weights, path, held))
        on_writer(lambda: unfinished.replace(target))
    finally:
        if writes:
            shutil.rmtree(unfinished, ignore_errors=True)


def _tensors_in(folder: Path, stack: ExitStack) -> dict[str, tuple[Path, Any]]:
    """Each tensor's file, by path and open (the stack closes it); rotary tables left out."""
    index = folder / INDEX
    if index.is_file():
        try:
            placed: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index}: not a safetensors index: {error!r}") from None
        paths = [folder / name for name in sorted(set(placed.values()))]
    else:
        placed, paths = {}, [folder / SINGLE]
    found: dict[str, tuple[Path, Any]] = {}
    for path in paths:
        if not path.is_file():
            reason = f"{INDEX} names it" if placed else f"and no {INDEX} in its place"
            raise FileNotFoundError(f"{path}: no such file, {reason}")
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise ValueError(f"{path}: damaged, or not a safetensors file: {error}") from None
        found |= {name: (path, file) for name in file.keys()}  # noqa: SIM118
    astray = [name for name, file in placed.items() if found.get(name, (None,))[0] != folder / file]
    if astray:
        raise ValueError(f"{index}: {_some(astray)} not in the file that the index names")
    return {name: at for name, at in found.items() if not name.endswith("rotary_emb.inv_freq")}


def _divide(
    parameters: dict[str, nn.Parameter], dtype: torch.dtype | None, max_bytes: int
) -> Iterator[list[str]]:
    """Names in their order, cut into output files of at most `max_bytes`."""
    names: list[str] = []
    held_bytes = 0
    for name, parameter in parameters.items():
        size_bytes = parameter.numel() * (dtype or parameter.dtype).itemsize
        if names and held_bytes + size_bytes > max_bytes:
            yield names
            names, held_bytes = [], 0
        names.append(name)
        held_bytes += size_bytes
    yield names


def _file_name(number: int, total: int) -> str:
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def _write_weights(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    # safetensors keeps its file to the user: give it the permissions that others get.
    path.chmod(stat.S_IMODE(path.with_name(INDEX).stat().st_mode))


def _write_index(
    folder: Path,
    files: list[list[str]],
    parameters: dict[str, nn.Parameter],
    dtype: torch.dtype | None,
) -> None:
    total_bytes = sum(p.numel() * (dtype or p.dtype).itemsize for p in parameters.values())
    placed = {
        name: _file_name(number, len(files))
        for number, names in enumerate(files, start=1)
        for name in names
    }
    _write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": placed})


def _write_descriptions(
    folder: Path, config: LlamaConfig, dtype: torch.dtype, tokenizer: Tokenizer | None
) -> None:
    """`config.json`, `generation_config.json` and, if given, the tokenizer."""
    special = {"bos_token_id": 1, "eos_token_id": 2}
    if tokenizer is not None:
        special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        shutil.copyfile(tokenizer.path, folder / "tokenizer.model")
        # Without this transformers would put no BOS before a text.
        reading = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
        _write_json(folder / "tokenizer_config.json", reading | tokenizer.special_pieces)
    name = str(dtype).removeprefix("torch.")
    _write_json(folder / "config.json", {**config.to_hf(), **special, "torch_dtype": name})
    _write_json(folder / "generation_config.json", {**special, "do_sample": False})


def _common_dtype(parameters: dict[str, nn.Parameter]) -> torch.dtype:
    """The type that most parameters' numbers have, for config.json."""
    numels: dict[torch.dtype, int] = {}
    for parameter in parameters.values():
        numels[parameter.dtype] = numels.get(parameter.dtype, 0) + parameter.numel()
    return max(numels, key=lambda dtype: numels[dtype])


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _some(names: set[str] | list[str]) -> str:
    """`a, b, c and 9 more`, in alphabetic order."""
    shown = sorted(names)[:3]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")

"""LoRA adapters in files of Hugging Face's peft: a configuration and one safetensors file.

The format (huggingface/peft, "PEFT checkpoint format"): tensors are called as the layer is in
transformers, below `base_model.model.`, with `lora_A.weight` and `lora_B.weight` at the end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llama.lora import ALL_LINEAR, HF_TARGETS, adapters, add_lora, is_adapter
from llama.model import Llama
from llama.parameters import Owners, local_part, materialise, named_parameters, own_rows
from llama.weights import transfer
from llama.weights.header import Place, lay_out, read_header
from llama.weights.names import EMBEDDING, HEAD, hf_name, some
from llama.weights.publish import OpenFiles, Ranks, check_space, write_json
from llama.weights.ranges import read_rows, row_bytes, write_rows
from llama.weights.transfer import Tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ENDINGS = {".lora_a.weight": ".lora_A.weight", ".lora_b.weight": ".lora_B.weight"}

# Fields of a configuration that say nothing about what a trained adapter computes.
_SILENT = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "loftq_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
# Ways to begin that leave the base's weights as they are; others (PiSSA, OLoRA, ...) change them.
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")


class LoRAConfig(NamedTuple):
    """What `adapter_config.json` says of adapters that this project can compute."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]  # Hugging Face's names


def save_peft(
    model: nn.Module,
    dir: str | Path,
    base_model_name_or_path: str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a Llama's adapters as a folder that peft loads beside the base model.

    `base_model_name_or_path` is what peft is told to load first. Ranks write together, values are
    cast to `dtype` if given, and `dir` is complete or absent, as in `save_hf`. ValueError for a
    model without adapters.
    """
    layers = adapters(model)
    if not layers:
        raise ValueError("the model has no LoRA adapters to save: call add_lora first")
    parameters = {name: p for name, p in named_parameters(model).items() if is_adapter(name)}
    described = _describe(_config_of(model), base_model_name_or_path)

    def open_sink(folder: Path, tensors: Tensors) -> _Sink:
        return _Sink(folder, transfer.as_written(tensors, dtype), described)

    transfer.save_parameters(parameters, dir, open_sink)


@torch.no_grad()
def load_peft(model: Llama, dir: str | Path) -> None:
    """Fills a Llama's adapters from a folder of peft's, each rank its own rows.

    A model without adapters is given those that the folder describes, so it must not be sharded
    yet; its alpha, rank and layers are the folder's. Adapters on meta get memory. Where the head is
    a target, peft writes embedding and head too: then they are loaded as well. Raises
    FileNotFoundError, or ValueError naming field or tensor, before anything is changed, for
    adapters that compute something else (DoRA, biases, other modules trained whole, ...) or belong
    to another model.
    """
    folder = Path(dir)
    config = read_config(folder / CONFIG)
    stored = _read_tensors(folder)
    _check(folder, stored, config, model)
    if not adapters(model):
        add_lora(model, config.rank, config.alpha, config.dropout, config.targets)
    owners = Owners(model)
    for name, parameter in named_parameters(model, allow_meta=True).items():
        label = _label(name)
        if label not in stored:
            continue
        if parameter.is_meta:
            parameter = materialise(parameter, owners)
        place, rows = stored[label], own_rows(parameter)
        offset = place.offset + rows.start * row_bytes(place.shape, place.dtype)
        read_rows(place.path, offset, place.dtype, local_part(parameter), label)


def read_config(path: Path) -> LoRAConfig:
    """The adapters that an `adapter_config.json` describes; ValueError naming a field that asks
    for more than plain LoRA, or that is no value."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file: is it a folder of peft's?")
    try:
        fields = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: no JSON object: {error}") from None
    plain = {
        "peft_type": ("LORA",),
        "bias": ("none", None),
        "init_lora_weights": (*_PLAIN_STARTS, None),
    }
    for name, accepted in plain.items():
        if (value := fields.pop(name, None)) not in accepted:
            raise _refused(path, name, value)
    numbers = {"r": int, "lora_alpha": (int, float), "lora_dropout": (int, float)}
    values = {}
    for name, kind in numbers.items():
        value = values[name] = fields.pop(name, 0 if name == "lora_dropout" else None)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{path}: {name} is {value!r}, no number")
    targets = fields.pop("target_modules", None)
    targets = [targets] if isinstance(targets, str) else targets
    if not isinstance(targets, list) or not targets:
        raise ValueError(f"{path}: target_modules is {targets!r}, no list of layers")
    # A layer's whole path stands in some; whether all blocks have it, the tensors tell.
    layers = sorted({str(target).rpartition(".")[2] for target in targets})
    if unknown := set(layers) - set(HF_TARGETS.values()) - {ALL_LINEAR}:
        raise ValueError(f"{path}: target_modules has {some(unknown)}, no linear layer of Llama's")
    for name, value in fields.items():
        if value and name not in _SILENT:
            raise _refused(path, name, value)
    return LoRAConfig(values["r"], values["lora_alpha"], values["lora_dropout"], tuple(layers))


def _refused(path: Path, name: str, value: object) -> ValueError:
    return ValueError(
        f"{path}: {name} is {value!r}, which is not supported: plain LoRA is, without bias or "
        "modules trained whole"
    )


def _config_of(model: nn.Module) -> LoRAConfig:
    layers = adapters(model)
    some_layer = next(iter(layers.values()))
    ours = {path.rpartition(".")[2] for path in layers}
    dropout = getattr(some_layer.dropout, "p", 0.0)
    targets = tuple(hf for own, hf in HF_TARGETS.items() if own in ours)
    return LoRAConfig(some_layer.rank, some_layer.alpha, dropout, targets)


def _describe(config: LoRAConfig, base: str | None) -> dict[str, Any]:
    alpha = config.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": config.dropout,
        "target_modules": list(config.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def _label(name: str) -> str:
    """peft's name of one of our parameters."""
    for own, theirs in _ENDINGS.items():
        if name.endswith(own):
            layer = hf_name(name.removesuffix(own) + ".weight")
            return _PREFIX + layer.removesuffix(".weight") + theirs
    wrapped = hf_name(name).removesuffix(".weight") + ".base_layer.weight"
    return _PREFIX + (wrapped if name == HEAD else hf_name(name))


def _read_tensors(folder: Path) -> dict[str, Place]:
    path = folder / WEIGHTS
    if not path.is_file():
        reason = ""
        if (folder / "adapter_model.bin").exists():
            reason = "; adapter_model.bin is a pickle, which is not read: convert it first"
        raise FileNotFoundError(f"{path}: no such file{reason}")
    return read_header(path)


def _check(folder: Path, stored: dict[str, Place], config: LoRAConfig, model: Llama) -> None:
    """ValueError unless the folder has the adapters of such a model, no more and no fewer."""
    with torch.device("meta"):
        alike = Llama(model.config)
    add_lora(alike, config.rank, config.alpha, config.dropout, config.targets)
    own, theirs = adapters(model), _config_of(alike)
    if own and (ours := _config_of(model))._replace(dropout=theirs.dropout) != theirs:
        raise ValueError(
            f"{folder / CONFIG}: it describes {_told(theirs)}, but the model has {_told(ours)}"
        )
    shapes = {_label(name): tuple(p.shape) for name, p in alike.named_parameters()}
    wanted = {_label(name) for name, _ in alike.named_parameters() if is_adapter(name)}
    along = set()
    if "lm_head" in theirs.targets:
        along = {_label(EMBEDDING), _label(HEAD)}
    missing, left_over = wanted - stored.keys(), stored.keys() - wanted - along
    if missing or left_over:
        parts = [("lacks", missing), ("has, unknown to the model,", left_over)]
        what = "; ".join(f"{verb} {some(names)}" for verb, names in parts if names)
        raise ValueError(f"{folder / WEIGHTS}: {what}: are these adapters of this model?")
    for label, place in stored.items():
        if place.shape != shapes[label]:
            raise ValueError(
                f"{place.path}: {label} has shape {place.shape}, the model's {shapes[label]}: is "
                f"it the rank that {CONFIG} says, and the LlamaConfig of the base?"
            )
        if not place.dtype.is_floating_point or place.dtype.itemsize < 2:
            raise ValueError(f"{place.path}: {label} holds {place.dtype}, not 16- to 64-bit floats")


def _told(config: LoRAConfig) -> str:
    return f"rank {config.rank}, alpha {config.alpha:g} and layers {', '.join(config.targets)}"


class _Sink:
    """A folder of peft's that is being written."""

    def __init__(self, folder: Path, tensors: Tensors, described: dict[str, Any]) -> None:
        self._folder, self._path, self._described = folder, folder / WEIGHTS, described
        labelled = {_label(name): about for name, about in tensors.items()}
        self._header, self._places, self._size = lay_out(self._path, labelled)
        self._open = OpenFiles()

    def create(self) -> None:
        check_space(self._folder, self._size)
        write_json(self._folder / CONFIG, self._described)
        with self._path.open("wb") as file:
            file.write(self._header)
            file.truncate(self._size)

    def write(self, name: str, first: int, values: Tensor) -> None:
        place = self._places[_label(name)]
        offset = place.offset + first * row_bytes(place.shape, place.dtype)
        write_rows(self._open.fd(place.path), offset, values, place.dtype, name)

    def flush(self) -> None:
        self._open.close()

    def finish(self, ranks: Ranks) -> None:
        """Nothing is left to do."""

"""Hugging Face folders: safetensors files, an index of them, and what describes the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from llama.config import LlamaConfig
from llama.tokenizer import Tokenizer
from llama.weights import transfer
from llama.weights.header import Place, lay_out, read_header
from llama.weights.names import hf_name, some
from llama.weights.publish import OpenFiles, Ranks, check_space, write_json
from llama.weights.ranges import nbytes, read_rows, row_bytes, write_rows
from llama.weights.transfer import Tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"  # how others name a file that is alone and has no index
MAX_SHARD_BYTES = 5_000_000_000


def load_hf(model: nn.Module, dir: str | Path) -> None:
    """Fills a Llama's parameters from the safetensors files of a Hugging Face folder.

    The model is plain or sharded by rows (DTensor); then every rank calls this and reads its own
    rows only. Parameters on the meta device get memory as they are filled: on the CPU, or where the
    mesh is (a model to be offloaded needs `to_empty(device="cpu")` first). Values are cast from any
    floating-point type to the parameter's. Raises FileNotFoundError, or ValueError naming the
    tensor and its file, before anything is changed, for files that are missing or damaged, tensors
    missing, left over, of another shape or no floats, and a config.json of another kind of model.
    """
    transfer.load(model, HFSource(dir))


def save_hf(
    model: nn.Module,
    dir: str | Path,
    dtype: torch.dtype | None = None,
    tokenizer_path: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a Llama as a Hugging Face folder that transformers loads as LlamaForCausalLM.

    The model is plain, or sharded by rows (DTensor): then every rank calls this and writes its own
    rows, into a file system that all see. Nothing but the A of adapters is gathered; buffers of
    16 MiB are held beyond the shard. A matrix with an adapter is written as their sum, which leaves
    the model as it is. Values are cast to `dtype` (default: each parameter's own), sums once, from
    float32 at least. Weights go into files of at most
    `max_shard_bytes` (one larger tensor gets a file to itself), with an index of them.
    All is written beside `dir` and renamed at the end, so `dir` is complete or absent. ValueError
    if it exists and is not an empty folder, OSError where the disk has no room. A failure on any
    rank is raised on every rank.
    """

    def open_sink(folder: Path, tensors: Tensors) -> HFSink:
        return HFSink(folder, model.config, tensors, dtype, tokenizer_path, max_shard_bytes)

    transfer.save(model, dir, open_sink)


class HFSource:
    """An opened Hugging Face folder; every file's header has been read and checked."""

    def __init__(self, dir: str | Path) -> None:
        self.folder = Path(dir)
        if not self.folder.is_dir():
            raise FileNotFoundError(f"{self.folder}: no such folder")
        self.stored = {
            name: place
            for name, place in _tensors_in(self.folder).items()
            if not name.endswith("rotary_emb.inv_freq")  # old exports hold rotary tables
        }

    def label(self, name: str) -> str:
        return hf_name(name)

    def check_config(self, config: LlamaConfig) -> None:
        path = self.folder / "config.json"
        if path.exists():
            transfer.check_heads(path, LlamaConfig.from_hf(self.folder), config)

    def read(self, name: str, rows: slice, out: Tensor) -> None:
        place = self.stored[hf_name(name)]
        offset = place.offset + rows.start * row_bytes(place.shape, place.dtype)
        read_rows(place.path, offset, place.dtype, out, hf_name(name))


def _tensors_in(folder: Path) -> dict[str, Place]:
    index = folder / INDEX
    if index.is_file():
        try:
            placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(placed.values()))
            if any(Path(name).name != name for name in names):
                raise ValueError("it names files outside its folder")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: not a safetensors index: {error!r}") from None
    else:
        placed, names = {}, [SINGLE]
    found: dict[str, Place] = {}
    for path in (folder / name for name in names):
        if not path.is_file():
            reason = f"{INDEX} names it" if placed else f"and no {INDEX} in its place"
            if not placed and any(folder.glob("pytorch_model*.bin")):
                reason += "; pytorch_model.bin is a pickle, which is not read: convert it first"
            raise FileNotFoundError(f"{path}: no such file, {reason}")
        found |= read_header(path)
    nowhere = [n for n, file in placed.items() if n not in found or found[n].path != folder / file]
    if nowhere:
        raise ValueError(f"{index}: {some(nowhere)} not in the file that the index names")
    return found


class HFSink:
    """A Hugging Face folder that is being written."""

    def __init__(
        self,
        folder: Path,
        config: LlamaConfig,
        tensors: Tensors,
        dtype: torch.dtype | None = None,
        tokenizer_path: str | Path | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        self.folder, self.config, self.tokenizer_path = folder, config, tokenizer_path
        written = transfer.as_written(tensors, dtype)
        self._tensors: Tensors = {hf_name(name): about for name, about in written.items()}
        files = list(_divide(self._tensors, max_shard_bytes))
        self._headers: dict[Path, tuple[bytes, int]] = {}  # and the file's size in bytes
        self._places: dict[str, Place] = {}
        for number, names in enumerate(files, start=1):
            path = folder / f"model-{number:05d}-of-{len(files):05d}.safetensors"
            header, places, size = lay_out(path, {name: self._tensors[name] for name in names})
            self._headers[path] = (header, size)
            self._places |= places
        self._open = OpenFiles()

    def create(self) -> None:
        check_space(self.folder, sum(size for _, size in self._headers.values()))
        self._describe()
        total_bytes = sum(nbytes(*about) for about in self._tensors.values())
        placed = {name: self._places[name].path.name for name in self._tensors}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": placed}
        write_json(self.folder / INDEX, index)
        for path, (header, size) in self._headers.items():
            with path.open("wb") as file:
                file.write(header)
                file.truncate(size)

    def _describe(self) -> None:
        """`config.json`, `generation_config.json` and, if given, the tokenizer."""
        special = {"bos_token_id": 1, "eos_token_id": 2}
        if self.tokenizer_path is not None:
            tokenizer = Tokenizer(self.tokenizer_path)
            special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
            shutil.copyfile(tokenizer.path, self.folder / "tokenizer.model")
            # Without this transformers would put no BOS before a text.
            reading = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
            write_json(self.folder / "tokenizer_config.json", reading | tokenizer.special_pieces)
        name = str(_common_dtype(self._tensors)).removeprefix("torch.")
        about = {**self.config.to_hf(), **special, "torch_dtype": name}
        write_json(self.folder / "config.json", about)
        write_json(self.folder / "generation_config.json", {**special, "do_sample": False})

    def write(self, name: str, first: int, values: Tensor) -> None:
        place = self._places[hf_name(name)]
        offset = place.offset + first * row_bytes(place.shape, place.dtype)
        write_rows(self._open.fd(place.path), offset, values, place.dtype, name)

    def flush(self) -> None:
        self._open.close()

    def finish(self, ranks: Ranks) -> None:
        """Nothing is left to do: a safetensors file has no checksums."""


def _divide(tensors: Tensors, max_bytes: int) -> Iterator[list[str]]:
    """Names in their order, cut into output files of at most `max_bytes`."""
    names: list[str] = []
    held_bytes = 0
    for name, about in tensors.items():
        if names and held_bytes + nbytes(*about) > max_bytes:
            yield names
            names, held_bytes = [], 0
        names.append(name)
        held_bytes += nbytes(*about)
    yield names


def _common_dtype(tensors: Tensors) -> torch.dtype:
    """The type that most numbers have, for config.json."""
    numels: dict[torch.dtype, int] = {}
    for shape, dtype in tensors.values():
        numels[dtype] = numels.get(dtype, 0) + torch.Size(shape).numel()
    return max(numels, key=lambda dtype: numels[dtype])

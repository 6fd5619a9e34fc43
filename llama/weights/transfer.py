"""Between a model and files: what must fit, what each rank reads and writes.

A source is an opened folder to read from, a sink one that is being written; both speak of
parameters by our names and of rows in our order, whatever their files look like.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llama.config import LlamaConfig
from llama.lora import is_adapter, merged_rows
from llama.parameters import (
    Owners,
    local_part,
    materialise,
    named_parameters,
    own_rows,
    rows_to_write,
)
from llama.weights.header import Place
from llama.weights.names import EMBEDDING, HEAD, some
from llama.weights.publish import Ranks, published
from llama.weights.ranges import row_bytes, rows_per_chunk

Tensors = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and type by our name


class Source(Protocol):
    """A folder of weights to read."""

    folder: Path
    stored: dict[str, Place]  # by the folder's own names, the whole tensor's shape and type

    def label(self, name: str) -> str:
        """The folder's name for our parameter `name`."""

    def check_config(self, config: LlamaConfig) -> None:
        """ValueError if the folder describes a model that computes something else."""

    def read(self, name: str, rows: slice, out: Tensor) -> None:
        """Fill `out`, `(rows, ...)`, with those rows of parameter `name`."""


class Sink(Protocol):
    """A folder of weights to write."""

    def create(self) -> None:
        """Make the files, without weights; one rank does."""

    def write(self, name: str, first: int, values: Tensor) -> None:
        """Write rows of parameter `name`, from row `first` on."""

    def flush(self) -> None:
        """Bring to the disk what this rank has written."""

    def finish(self, ranks: Ranks) -> None:
        """Complete the files once all ranks have flushed; all ranks call it."""


@torch.no_grad()
def load(model: nn.Module, source: Source) -> None:
    """Fill the rows of the model that this rank holds, after all has been checked.

    Parameters on the meta device are given memory one at a time, as they are filled. Adapters,
    which no such folder has, are left alone.
    """
    model.tie_weights()
    everything = named_parameters(model, allow_meta=True)
    parameters = {name: p for name, p in everything.items() if not is_adapter(name)}
    check(source, {name: (tuple(p.shape), p.dtype) for name, p in parameters.items()}, model.config)
    source.check_config(model.config)
    if model.config.tie_embeddings:
        check_tie(source, own_rows(parameters[EMBEDDING]))
    owners = Owners(model)
    for name, parameter in parameters.items():
        if parameter.is_meta:
            parameter = materialise(parameter, owners)
        rows = own_rows(parameter)
        if rows.start < rows.stop:
            source.read(name, rows, local_part(parameter))


def save(model: nn.Module, dir: str | Path, open_sink: Callable[[Path, Tensors], Sink]) -> None:
    """Write the model's rows, each rank its own, into the files that `open_sink` lays out.

    Adapted matrices are written with the adapters added in.
    """
    everything = named_parameters(model)
    parameters = {name: p for name, p in everything.items() if not is_adapter(name)}
    save_parameters(parameters, dir, open_sink, merged_rows(model))


def save_parameters(
    parameters: Mapping[str, Tensor],
    dir: str | Path,
    open_sink: Callable[[Path, Tensors], Sink],
    sums: Mapping[Tensor, Callable[[slice], Tensor]] | None = None,
) -> None:
    """Write the rows of these parameters; all ranks that share them call it.

    Of one that is in `sums` those rows are written that its function gives for a slice of what this
    rank holds.
    """
    tensors = {name: (tuple(p.shape), p.dtype) for name, p in parameters.items()}
    ranks = Ranks(any(isinstance(p, DTensor) for p in parameters.values()))

    def write() -> None:
        for name, parameter in parameters.items():
            rows, own = rows_to_write(parameter, first_rank=ranks.rank == 0), own_rows(parameter)
            values = (sums or {}).get(parameter, local_part(parameter).detach().__getitem__)
            count = rows_per_chunk(row_bytes(tuple(parameter.shape), torch.float32))
            for first in range(rows.start, rows.stop, count):
                last = min(first + count, rows.stop)
                sink.write(name, first, values(slice(first - own.start, last - own.start)))
        sink.flush()

    with published(Path(dir), ranks) as folder:
        sink = open_sink(folder, tensors)
        ranks.first(sink.create)
        ranks.each(write)
        sink.finish(ranks)


def as_written(tensors: Tensors, dtype: torch.dtype | None) -> Tensors:
    """`tensors` in the type they are written in; ValueError for one that is no type of weights."""
    written = {name: (shape, dtype or own) for name, (shape, own) in tensors.items()}
    for name, (_, kind) in written.items():
        if kind not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f"{name} cannot be saved as {kind}: choose a 16-, 32- or 64-bit float")
    return written


def check(source: Source, wanted: Tensors, config: LlamaConfig) -> None:
    """ValueError naming tensors that are missing, unknown, or of another shape or kind of type."""
    labels = {source.label(name): about for name, about in wanted.items()}
    left_over = set(source.stored) - set(labels)
    if config.tie_embeddings:
        left_over.discard(source.label(HEAD))  # some repeat the embedding under the head's name
    missing = set(labels) - set(source.stored)
    if missing or left_over:
        parts = [("lacks", missing), ("has, unknown to the model,", left_over)]
        what = "; ".join(f"{verb} {some(names)}" for verb, names in parts if names)
        biased = any(name.endswith(".bias") for name in left_over)
        remedy = "this Llama has no biases" if biased else "is it the model's LlamaConfig's folder?"
        raise ValueError(f"{source.folder}: {what}: {remedy}")
    for label, (shape, dtype) in labels.items():
        place = source.stored[label]
        if place.shape != shape:
            raise ValueError(
                f"{place.path}: {label} has shape {place.shape}, the model's parameter {shape}: is "
                "its LlamaConfig that of this folder?"
            )
        if not place.dtype.is_floating_point or place.dtype.itemsize < 2:
            raise ValueError(
                f"{place.path}: {label} holds {place.dtype}, the model's parameter {dtype}: "
                "quantised weights are not understood, 16-, 32- and 64-bit floats are"
            )


def check_heads(path: Path, described: LlamaConfig, config: LlamaConfig) -> None:
    """ValueError if a folder's model has other heads, which shapes do not always show."""
    theirs = (described.n_heads, described.n_kv_heads)
    if theirs != (config.n_heads, config.n_kv_heads):
        raise ValueError(
            f"{path}: its model has {theirs[0]} heads and {theirs[1]} key and value heads, this "
            f"one's LlamaConfig {config.n_heads} and {config.n_kv_heads}"
        )


def check_tie(source: Source, rows: slice) -> None:
    """ValueError if a folder has a head of its own, whose `rows` a tied model would lose."""
    if source.label(HEAD) in source.stored and not head_is_embedding(source, rows):
        raise ValueError(
            f"{source.folder}: {source.label(HEAD)} differs from {source.label(EMBEDDING)}, but "
            "the model ties the two: build it with tie_embeddings=False"
        )


def head_is_embedding(source: Source, rows: slice) -> bool:
    """Whether these rows of the head are the embedding's, bit for bit."""
    embedding, head = (source.stored[source.label(name)] for name in (EMBEDDING, HEAD))
    if embedding.shape != head.shape or embedding.dtype != head.dtype:
        return False
    count = rows_per_chunk(row_bytes(embedding.shape, embedding.dtype))
    for first in range(rows.start, rows.stop, count):
        part = slice(first, min(first + count, rows.stop))
        shape = (part.stop - part.start, *embedding.shape[1:])
        pair = [torch.empty(shape, dtype=embedding.dtype) for _ in range(2)]
        for name, out in zip((EMBEDDING, HEAD), pair, strict=True):
            source.read(name, part, out)
        if not torch.equal(pair[0].view(torch.uint8), pair[1].view(torch.uint8)):
            return False
    return True


def copy(source: Source, sink: Sink, tensors: Mapping[str, tuple[int, ...]]) -> None:
    """Bring every tensor from one folder to another, a buffer of rows at a time."""
    for name, shape in tensors.items():
        dtype = source.stored[source.label(name)].dtype
        count = rows_per_chunk(row_bytes(shape, dtype))
        for first in range(0, shape[0], count):
            last = min(first + count, shape[0])
            values = torch.empty(last - first, *shape[1:], dtype=dtype)
            source.read(name, slice(first, last), values)
            sink.write(name, first, values)
    sink.flush()

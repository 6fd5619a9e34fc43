"""Meta's folders: `consolidated.NN.pth`, matrices cut among the files, and `params.json`."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import torch
from torch import Tensor, nn

from llama.config import LlamaConfig
from llama.tokenizer import Tokenizer
from llama.weights import transfer
from llama.weights.archive import Archive
from llama.weights.consolidated import MetaSource
from llama.weights.names import EMBEDDING, HEAD, meta_cut, meta_rows
from llama.weights.publish import OpenFiles, Ranks, check_space, write_json
from llama.weights.ranges import row_bytes, rows_per_chunk, write_rows
from llama.weights.transfer import Tensors


def load_meta(model: nn.Module, dir: str | Path) -> None:
    """Fills a Llama's parameters from Meta's `consolidated.NN.pth` files, however many there are.

    Plain, sharded and meta-built models as in `load_hf`; each rank copies its own rows, straight
    from the mapped files, so it holds its shard and at most one tensor's worth of their pages. The
    files are opened with `weights_only=True`: code in a pickle is refused, never run. Meta has no
    tied embeddings: into a model that ties, a folder loads whose head equals its embedding, or that
    has no head. Raises FileNotFoundError or ValueError, naming file and tensor, as `load_hf` does,
    and for a file of the set that is missing.
    """
    transfer.load(model, MetaSource(dir, model.config))


def save_meta(
    model: nn.Module,
    dir: str | Path,
    shards: int = 1,
    dtype: torch.dtype | None = None,
    tokenizer_path: str | Path | None = None,
) -> None:
    """Writes a Llama as Meta distributes it: `shards` `consolidated.NN.pth` files, `params.json`
    and, if given, `tokenizer.model`.

    Ranks write together, adapters are added in, and failures end, as in `save_hf`. Meta's files
    have no tied embeddings:
    a tied matrix is written twice, as embedding and as head. ValueError if heads, key and value
    heads, hidden size or vocabulary cannot be shared evenly among `shards`.
    """

    def open_sink(folder: Path, tensors: Tensors) -> MetaSink:
        return MetaSink(folder, model.config, tensors, shards, dtype, tokenizer_path)

    transfer.save(model, dir, open_sink)


class MetaSink:
    """A folder of Meta's that is being written."""

    def __init__(
        self,
        folder: Path,
        config: LlamaConfig,
        tensors: Tensors,
        shards: int = 1,
        dtype: torch.dtype | None = None,
        tokenizer_path: str | Path | None = None,
    ) -> None:
        _check_shards(config, shards)
        self.folder, self.config, self.tokenizer_path = folder, config, tokenizer_path
        if config.tie_embeddings:
            tensors = {**tensors, HEAD: tensors[EMBEDDING]}
        pieces: Tensors = {}
        for name, (shape, kind) in transfer.as_written(tensors, dtype).items():
            piece, cut = list(shape), meta_cut(name)
            if cut is not None:
                piece[cut] //= shards
            pieces[name] = (tuple(piece), kind)
        self._pieces = pieces
        self._archives = [
            Archive(folder / f"consolidated.{k:02d}.pth", pieces) for k in range(shards)
        ]
        self._open = OpenFiles()

    def create(self) -> None:
        check_space(self.folder, sum(archive.largest_bytes for archive in self._archives))
        write_json(self.folder / "params.json", self.config.to_meta())
        if self.tokenizer_path is not None:
            path = Tokenizer(self.tokenizer_path).path
            shutil.copyfile(path, self.folder / "tokenizer.model")
        for archive in self._archives:
            archive.create()

    def write(self, name: str, first: int, values: Tensor) -> None:
        count = rows_per_chunk(row_bytes(tuple(values.shape), values.dtype))
        for begin in range(0, len(values), count):
            self._write(name, first + begin, values[begin : begin + count])
        if self.config.tie_embeddings and name == EMBEDDING:
            self.write(HEAD, first, values)

    def _write(self, name: str, first: int, values: Tensor) -> None:
        cut, order = meta_cut(name), meta_rows(name, self.config)
        columns = self._pieces[name][0][-1]
        if cut == 1:
            for k in range(len(self._archives)):
                part = values[:, k * columns : (k + 1) * columns]
                self._write_piece(k, name, first, part)
        elif cut is None:
            for k in range(len(self._archives)):
                self._write_piece(k, name, first, values)
        else:
            rows = torch.arange(first, first + len(values))
            if order is not None:
                rows, sorting = order[rows].sort()
                values = values[sorting.to(values.device)]
            per_file = self._pieces[name][0][0]
            # Rows that follow one another in one file are written together.
            broken = (rows.diff() != 1) | (rows[1:] % per_file == 0)
            ends = [0, *(broken.nonzero().flatten() + 1).tolist(), len(rows)]
            for begin, end in itertools.pairwise(ends):
                k, at = divmod(int(rows[begin]), per_file)
                self._write_piece(k, name, at, values[begin:end])

    def _write_piece(self, k: int, name: str, first: int, values: Tensor) -> None:
        archive, (shape, dtype) = self._archives[k], self._pieces[name]
        offset = archive.offsets[name] + first * row_bytes(shape, dtype)
        write_rows(self._open.fd(archive.path), offset, values, dtype, name)

    def flush(self) -> None:
        self._open.close()

    def finish(self, ranks: Ranks) -> None:
        records = [(k, record) for k, a in enumerate(self._archives) for record in a.tensor_records]

        def checksums() -> dict[tuple[int, str], int]:
            try:
                return {
                    (k, record): archive.checksum(self._open.fd(archive.path), record)
                    for k, record in records[ranks.rank :: ranks.size]
                    for archive in [self._archives[k]]
                }
            finally:
                self._open.close()

        merged = {key: crc for part in ranks.each(checksums) for key, crc in part.items()}

        def finish() -> None:
            for k, archive in enumerate(self._archives):
                own = {record: crc for (file, record), crc in merged.items() if file == k}
                archive.finish(self._open.fd(archive.path), own)
            self._open.close()

        ranks.first(finish)


def _check_shards(config: LlamaConfig, shards: int) -> None:
    if not isinstance(shards, int) or isinstance(shards, bool) or shards < 1:
        raise ValueError(f"shards must be a positive integer, not {shards!r}")
    for field in ("n_heads", "n_kv_heads", "ffn_hidden", "vocab_size"):
        if getattr(config, field) % shards:
            raise ValueError(
                f"{shards} files cannot share {getattr(config, field)} ({field}) evenly: choose a "
                "number that divides it"
            )

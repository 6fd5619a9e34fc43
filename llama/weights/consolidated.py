"""Meta's `consolidated.NN.pth` files, read: matrices joined, rows brought into our order."""

from __future__ import annotations

import re
import zipfile
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from llama.config import LlamaConfig
from llama.weights import transfer
from llama.weights.header import Place
from llama.weights.names import meta_cut, meta_rows, some
from llama.weights.ranges import cast_into, nbytes, row_bytes, rows_per_chunk


class MetaSource:
    """An opened folder of Meta's.

    [Note: mapped files and memory]
    `torch.load(mmap=True)` reads nothing but the pickle; a copy brings in the pages it touches, and
    they stay the process's until the map is dropped. So the files are opened again each time as
    many bytes have been copied as the largest tensor has.
    """

    def __init__(self, dir: str | Path, config: LlamaConfig) -> None:
        self.folder, self.config = Path(dir), config
        if not self.folder.is_dir():
            raise FileNotFoundError(f"{self.folder}: no such folder")
        self._paths = _files_in(self.folder)
        self._files: list[dict[str, Tensor]] | None = None
        self._touched_bytes = self._largest_bytes = 0
        opened = self._opened()
        for path, tensors in zip(self._paths, opened, strict=True):
            astray = set(tensors) ^ set(opened[0])
            if astray:
                raise ValueError(f"{path}: {some(astray)} in it or in {self._paths[0].name} only")
        self._check_count(opened[0])
        self.stored = {name: self._joined(name, opened) for name in opened[0]}
        self._largest_bytes = max(nbytes(p.shape, p.dtype) for p in self.stored.values())

    def _check_count(self, first: dict[str, Tensor]) -> None:
        """FileNotFoundError if files are missing at the end, where numbers leave no gap."""
        name, whole = "layers.0.attention.wq.weight", self.config.dim
        if name not in first or first[name].dim() != 2 or not first[name].shape[0]:
            return  # refused later, by its name
        count = whole // first[name].shape[0]
        if count > len(self._paths) and whole % first[name].shape[0] == 0:
            raise FileNotFoundError(
                f"{self.folder / f'consolidated.{len(self._paths):02d}.pth'}: no such file; "
                f"{name} is {tuple(first[name].shape)} in each and ({whole}, {whole}) in the "
                f"model, so there must be {count} files, not {len(self._paths)}"
            )

    def _joined(self, name: str, opened: list[dict[str, Tensor]]) -> Place:
        """The whole tensor's shape and type."""
        pieces = [tensors[name] for tensors in opened]
        for path, piece in zip(self._paths, pieces, strict=True):
            if (piece.shape, piece.dtype) != (pieces[0].shape, pieces[0].dtype):
                raise ValueError(
                    f"{path}: {name} is {tuple(piece.shape)} {piece.dtype}, in "
                    f"{self._paths[0].name} {tuple(pieces[0].shape)} {pieces[0].dtype}"
                )
        shape = list(pieces[0].shape)
        try:
            cut = meta_cut(name)
        except ValueError:
            cut = None  # unknown, and refused later
        if cut is not None and cut < len(shape):
            shape[cut] *= len(pieces)
        return Place(self._paths[0], 0, pieces[0].dtype, tuple(shape))

    def _opened(self, needed_bytes: int = 0) -> list[dict[str, Tensor]]:
        self._touched_bytes += needed_bytes
        if self._files is None or self._touched_bytes > self._largest_bytes:
            self._files = None
            self._files = [_open(path) for path in self._paths]
            self._touched_bytes = needed_bytes
        return self._files

    def label(self, name: str) -> str:
        return name

    def check_config(self, config: LlamaConfig) -> None:
        path = self.folder / "params.json"
        if path.exists():
            transfer.check_heads(path, LlamaConfig.from_meta(self.folder), config)

    def read(self, name: str, rows: slice, out: Tensor) -> None:
        cut, order = meta_cut(name), meta_rows(name, self.config)
        size = row_bytes(self.stored[name].shape, self.stored[name].dtype)
        count = rows_per_chunk(size)
        opened = self._opened((rows.stop - rows.start) * size)
        pieces = [tensors[name] for tensors in opened]
        del opened
        for first in range(rows.start, rows.stop, count):
            last = min(first + count, rows.stop)
            target = out[first - rows.start : last - rows.start]
            if cut is None:
                self._agree(name, [piece[first:last] for piece in pieces])
                cast_into(target, pieces[0][first:last], name)
            elif cut == 1:
                columns = pieces[0].shape[1]
                for k, piece in enumerate(pieces):
                    part = target[:, k * columns : (k + 1) * columns]
                    cast_into(part, piece[first:last], name)
            else:
                wanted = torch.arange(first, last) if order is None else order[first:last]
                for k, piece in enumerate(pieces):
                    here = (wanted // len(piece) == k).nonzero().flatten()
                    if len(here) == last - first and order is None:
                        begin = first - k * len(piece)
                        cast_into(target, piece[begin : begin + last - first], name)
                    elif len(here):
                        values = piece[wanted[here] - k * len(piece)].to(target.device)
                        target[here.to(target.device)] = _cast(values, target.dtype, name)

    def _agree(self, name: str, pieces: list[Tensor]) -> None:
        for path, piece in zip(self._paths, pieces, strict=True):
            if not torch.equal(piece.view(torch.uint8), pieces[0].view(torch.uint8)):
                raise ValueError(f"{path}: {name} differs from that in {self._paths[0].name}")


def _files_in(folder: Path) -> list[Path]:
    found = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := re.fullmatch(r"consolidated\.(\d+)\.pth", path.name))
    }
    for number in range(max(found, default=0) + 1):
        if number not in found:
            missing = folder / f"consolidated.{number:02d}.pth"
            raise FileNotFoundError(f"{missing}: no such file; {len(found)} others are there")
    return [found[number] for number in sorted(found)]


def _open(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, mapped; ValueError naming the file for whatever else it holds."""
    path.open("rb").close()  # what raises OSError from here on is a damaged file
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # it shows itself in many ways
        raise ValueError(
            f"{path}: refused, and nothing in it was run: damaged, older than torch's zip format, "
            f"or a pickle of more than tensors ({type(error).__name__}: {_first_line(error)})"
        ) from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"{path}: holds a {type(content).__name__}, not tensors by name")
    tensors = {}
    for name, tensor in content.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
            raise ValueError(f"{path}: {name!r} is not a tensor as Meta's files have it")
        if name != "rope.freqs":  # rotary tables, which are computed
            tensors[name] = tensor
    _check_records(path, list(content.values()))
    return tensors


def _check_records(path: Path, tensors: list[Tensor]) -> None:
    """ValueError unless each tensor's bytes are a whole record of the zip, and lie there as they
    are: mapping takes them from where they begin, whatever is there."""
    with zipfile.ZipFile(path) as archive:
        records = [info for info in archive.infolist() if "/data/" in info.filename]
    if any(info.compress_type != zipfile.ZIP_STORED for info in records):
        raise ValueError(f"{path}: is compressed, and cannot be mapped: store it uncompressed")
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    wrong = Counter(storages.values()) - Counter(info.file_size for info in records)
    if wrong:
        raise ValueError(
            f"{path}: damaged: no record has the {next(iter(wrong)):,} bytes of one of its tensors"
        )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def _cast(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    cast_into(out, values, name)
    return out

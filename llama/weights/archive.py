"""A file that `torch.load` opens, laid out before any value is known, so that ranks can fill it.

[Note: writing a .pth file in place]
`torch.save` wants every tensor of a file at once. But what it writes is plain: an uncompressed zip
archive with the values of each storage in a record `data/N`, and a pickle, `data.pkl`, that says
which tensor is which record. All sizes follow from the shapes, so every rank knows where each row
goes and writes it there; checksums and zip headers, which need the values, are written at the end.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llama.weights.ranges import CHUNK_BYTES, nbytes

_ALIGNMENT = 64  # bytes, torch's own
_LIMIT = 0xFFFFFFFF  # sizes and offsets from here on need zip64's 8-byte fields
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
}


class _Record(NamedTuple):
    name: bytes
    header: int  # where its zip header is, bytes from the start of the file
    data: int  # where its content is
    size: int

    @property
    def wide(self) -> bool:
        return self.size >= _LIMIT


class Archive:
    """A `.pth` file of `tensors`, `{name: (shape, dtype)}`, and where in it each begins."""

    def __init__(self, path: Path, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self.path = path
        self._small = {
            "data.pkl": _pickle(tensors),
            "byteorder": b"little",
            "version": b"3\n",
        }
        sizes = {name: len(content) for name, content in self._small.items()}
        sizes |= {f"data/{i}": nbytes(*about) for i, about in enumerate(tensors.values())}
        self._records: dict[str, _Record] = {}
        end = 0
        for name, size in sizes.items():
            full_name = f"{path.stem}/{name}".encode()
            data = end + 30 + len(full_name) + 20 + 4  # fields, name, zip64 field, padding's head
            data += -data % _ALIGNMENT
            self._records[name] = _Record(full_name, end, data, size)
            end = data + size
        self._directory = end
        self.offsets = {name: self._records[f"data/{i}"].data for i, name in enumerate(tensors)}
        # An entry takes at most 46 bytes, its name and 28 bytes of zip64; the ends take 98.
        entries = sum(74 + len(record.name) for record in self._records.values())
        self.largest_bytes = end + entries + 98

    @property
    def tensor_records(self) -> list[str]:
        """The names of the records that hold values."""
        return [name for name in self._records if name not in self._small]

    def create(self) -> None:
        """Makes the file, without values: they read as zero."""
        with self.path.open("wb") as file:
            file.truncate(self._directory)

    def checksum(self, fd: int, name: str) -> int:
        """The CRC-32 of a record as the file, open as `fd`, holds it now."""
        record, crc = self._records[name], 0
        at, end = record.data, record.data + record.size
        while at < end:
            content = os.pread(fd, min(CHUNK_BYTES, end - at), at)
            if not content:
                raise ValueError(f"{self.path}: was cut short while it was written")
            crc, at = zlib.crc32(content, crc), at + len(content)
        return crc

    def finish(self, fd: int, checksums: dict[str, int]) -> None:
        """Writes the zip headers and the directory, with each tensor record's checksum."""
        for name, content in self._small.items():
            _write(fd, content, self._records[name].data)
            checksums = checksums | {name: zlib.crc32(content)}
        directory = b""
        for name, record in self._records.items():
            _write(fd, _header(record, checksums[name]), record.header)
            directory += _entry(record, checksums[name])
        count, size = len(self._records), len(directory)
        end = self._directory + size
        wide = struct.pack(
            "<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, size, self._directory
        )
        wide += struct.pack("<IIQI", 0x07064B50, 0, end, 1)
        short = min(count, 0xFFFF)
        last = struct.pack(
            "<IHHHHIIH",
            0x06054B50,
            0,
            0,
            short,
            short,
            min(size, _LIMIT),
            min(self._directory, _LIMIT),
            0,
        )
        needed = count >= 0xFFFF or self._directory >= _LIMIT
        _write(fd, directory + (wide if needed else b"") + last, self._directory)


class _Stored:
    """Stands in a pickle for a tensor whose values are in record `data/{key}`."""

    def __init__(self, key: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.storage = _Storage(str(key), torch.Size(shape).numel(), _STORAGES[dtype])
        strides = [torch.Size(shape[i + 1 :]).numel() for i in range(len(shape))]
        self.layout = (0, tuple(shape), tuple(strides), False, OrderedDict())

    def __reduce__(self) -> tuple[Any, ...]:
        # Private in name only: every file that torch.save wrote names this function.
        return torch._utils._rebuild_tensor_v2, (self.storage, *self.layout)


class _Storage(NamedTuple):
    key: str
    numel: int
    kind: type


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if isinstance(obj, _Storage):
            return ("storage", obj.kind, obj.key, "cpu", obj.numel)
        return None


def _pickle(tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> bytes:
    """What `torch.save` would pickle for a dict of `tensors`."""
    content = {name: _Stored(i, *about) for i, (name, about) in enumerate(tensors.items())}
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(content)
    return buffer.getvalue()


def _header(record: _Record, crc: int) -> bytes:
    """A record's zip header, padded up to where its content begins."""
    size = _LIMIT if record.wide else record.size
    extra = struct.pack("<HHQQ", 1, 16, record.size, record.size) if record.wide else b""
    padding = record.data - record.header - 30 - len(record.name) - len(extra) - 4
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return (
        struct.pack(
            "<IHHHHHIIIHH",
            0x04034B50,
            45 if record.wide else 20,
            0x800,  # names are UTF-8
            0,
            0,
            0x21,  # 1 January 1980: the same weights give the same bytes
            crc,
            size,
            size,
            len(record.name),
            len(extra),
        )
        + record.name
        + extra
    )


def _entry(record: _Record, crc: int) -> bytes:
    """A record's entry in the zip directory."""
    far = record.header >= _LIMIT
    wide = [record.size, record.size] if record.wide else []
    wide += [record.header] if far else []
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size = _LIMIT if record.wide else record.size
    version = 45 if wide else 20
    return (
        struct.pack(
            "<IHHHHHHIIIHHHHHII",
            0x02014B50,
            version,
            version,
            0x800,
            0,
            0,
            0x21,
            crc,
            size,
            size,
            len(record.name),
            len(extra),
            0,
            0,
            0,
            0,
            _LIMIT if far else record.header,
        )
        + record.name
        + extra
    )


def _write(fd: int, content: bytes, offset: int) -> None:
    while content:
        written = os.pwrite(fd, content, offset)
        content, offset = content[written:], offset + written

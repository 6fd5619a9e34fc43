"""Rows of tensors from and to byte ranges of files, through buffers of a fixed size.

[Note: reading by ranges instead of mapping files]
A mapped file is read in whole readahead windows: a quarter of a tensor read through safetensors'
`get_slice` took 1.3 times its bytes from a cold disk, and its pages count as the process's own
while the map lives. `preadv` reads what is asked for, into the parameter's own memory where the
types are equal. Writing, `pwrite` lets every rank write its rows of one file at once, with nothing
gathered.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

CHUNK_BYTES = 16 * 2**20


def rows_per_chunk(row_bytes: int) -> int:
    """How many rows fit into one buffer; at least one."""
    return max(1, CHUNK_BYTES // max(1, row_bytes))


def row_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of one row, a slice along dimension 0, of a tensor."""
    return torch.Size(shape[1:]).numel() * dtype.itemsize


def nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return torch.Size(shape).numel() * dtype.itemsize


def read_rows(path: Path, offset: int, dtype: torch.dtype, out: Tensor, name: str) -> None:
    """Fills `out`, rows of any float type on any device, from `dtype` values at byte `offset`."""
    if not out.numel():
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):  # no readahead into rows that are not asked for
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        if out.is_cpu and out.is_contiguous() and out.dtype == dtype:
            _read(fd, offset, out, path)
            return
        size = row_bytes(tuple(out.shape), dtype)
        count = min(len(out), rows_per_chunk(size))
        buffer = torch.empty(count, *out.shape[1:], dtype=dtype)
        for first in range(0, len(out), count):
            target = out[first : first + count]
            values = buffer[: len(target)]
            _read(fd, offset + first * size, values, path)
            cast_into(target, values, name)
    finally:
        os.close(fd)


def write_rows(fd: int, offset: int, values: Tensor, dtype: torch.dtype, name: str) -> None:
    """Writes rows on any device as `dtype` values to byte `offset` of an open file."""
    values = values.detach()
    size = row_bytes(tuple(values.shape), dtype)
    count = rows_per_chunk(size)
    for first in range(0, len(values), count):
        rows = values[first : first + count]
        if rows.dtype != dtype:
            wide, rows = rows, torch.empty(rows.shape, dtype=dtype, device=rows.device)
            cast_into(rows, wide, name)
        content = _bytes_of(rows.cpu().contiguous())
        at = offset + first * size
        while content:
            written = os.pwrite(fd, content, at)
            content, at = content[written:], at + written


def cast_into(target: Tensor, values: Tensor, name: str) -> None:
    """Copies values of any floating type; ValueError for one that is too large for float16.

    The other types reach as far as one another, or nearly, so that checking them would cost a pass
    for nothing.
    """
    target.copy_(values)
    if target.dtype == torch.float16 and values.dtype != torch.float16:
        beyond = target.isinf() & values.to(target.device).isfinite()
        if beyond.any():
            raise ValueError(
                f"{name} has values beyond float16's largest, 65504, and is {values.dtype}: choose "
                "bfloat16 or float32"
            )


def _read(fd: int, offset: int, out: Tensor, path: Path) -> None:
    content = _bytes_of(out)
    while content:
        count = os.preadv(fd, [content], offset)
        if not count:
            raise ValueError(f"{path}: ends before byte {offset + len(content)}: it was cut short")
        content, offset = content[count:], offset + count


def _bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(values.detach().reshape(-1).view(torch.uint8).numpy())

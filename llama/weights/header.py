"""The header of a safetensors file: which tensors it holds, of which type and shape, and where.

The format (huggingface/safetensors, "Format"): 8 bytes with the header's length, little-endian; the
header, a JSON object padded with spaces; the tensors' bytes, side by side without gaps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llama.weights.ranges import nbytes

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER_BYTES = 100_000_000  # as safetensors itself has it


class Place(NamedTuple):
    """Where a file holds a tensor."""

    path: Path
    offset: int  # bytes from the start of the file
    dtype: torch.dtype
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, Place]:
    """Every tensor's place; ValueError naming the file if it is no whole safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER_BYTES):
            raise _damaged(path, f"its header would be {length} bytes long, the file is {size}")
        text = file.read(length)
    try:
        content = json.loads(text.decode("utf-8"))
        content.pop("__metadata__", None)
        places = {name: _place(path, 8 + length, about) for name, about in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"its header cannot be read: {error!r}") from None
    end = 8 + length
    for name, place in sorted(places.items(), key=lambda item: item[1].offset):
        if not nbytes(place.shape, place.dtype):
            continue
        if place.offset != end:
            raise _damaged(path, f"{name} begins at byte {place.offset}, not at {end}")
        end += nbytes(place.shape, place.dtype)
    if end != size:
        raise _damaged(path, f"it is {size} bytes long, its header speaks of {end}")
    return places


def _place(path: Path, data: int, about: dict[str, Any]) -> Place:
    dtype, shape, (begin, end) = about["dtype"], about["shape"], about["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"type {dtype!r} is not known")
    for number in (*shape, begin, end):
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ValueError(f"{number!r} is no size")
    place = Place(path, data + begin, DTYPES[dtype], tuple(shape))
    if end - begin != nbytes(place.shape, place.dtype):
        raise ValueError(f"{end - begin} bytes are not a tensor {dtype} of shape {shape}")
    return place


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path}: damaged, or not a safetensors file: {reason}")


def lay_out(
    path: Path, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> tuple[bytes, dict[str, Place], int]:
    """The header of a file of `tensors`, their places in it and its size in bytes.

    Wider types come first, so that every tensor begins at a multiple of its type's size.
    """
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (shape, dtype) in sorted(tensors.items(), key=lambda item: -item[1][1].itemsize):
        end = begin + nbytes(shape, dtype)
        content[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = 8 + len(text)
    places = {
        name: Place(path, data + content[name]["data_offsets"][0], dtype, shape)
        for name, (shape, dtype) in tensors.items()
    }
    return len(text).to_bytes(8, "little") + text, places, data + begin

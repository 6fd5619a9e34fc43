"""Memory that kernels take and give back before they return, so that no operator's result tells.

For a CPU measured operator by operator with the profiler (a test holds these formulas), for a GPU
read in the flash-attention kernel's public source (mha_bwd in flash_api.cpp). Not known here: what
oneDNN packs for bfloat16 products on a CPU, what cuBLAS keeps (part of a plan's reserve), sorting
in an embedding's backward on a GPU: each small beside what an operator returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_FLASH_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_FLASH_GPU = "_scaled_dot_product_flash_attention"


def of(func: Any, args: Any, kwargs: dict[str, Any], results: Sequence[torch.Tensor]) -> list[int]:
    """Bytes that an operator takes beside its results, one after the other."""
    name = func.overloadpacket.__name__
    if name == _FLASH_CPU:
        return [_flash_cpu(*args[:2])]
    if name == f"{_FLASH_CPU}_backward":
        return [_flash_cpu_backward(*args[1:3])]
    if name == f"{_FLASH_GPU}_backward":
        return [_flash_gpu_backward(*args[1:3])]
    return []


def _tile(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """Rows of queries and of keys that the CPU's kernel takes at once."""
    rows = query.shape[2]
    queries = 256 if rows >= 768 else 64 if rows >= 192 else 32
    return min(queries, rows), min(512, key.shape[2])


def _flash_cpu(query: torch.Tensor, key: torch.Tensor) -> int:
    """Scores, their maxima and sums, and a tile of the result, in float32; scores once more in a
    half type. One of each a thread."""
    queries, keys = _tile(query, key)
    numel = queries * (keys + 2 + query.shape[3])
    half = queries * keys * query.itemsize if query.itemsize < 4 else 0
    return torch.get_num_threads() * (numel * max(4, query.itemsize) + half)


def _flash_cpu_backward(query: torch.Tensor, key: torch.Tensor) -> int:
    """Two tiles of scores, in the half type too, and a sum for each row."""
    queries, keys = _tile(query, key)
    half = 2 * queries * keys * query.itemsize if query.itemsize < 4 else 0
    wide = max(4, query.itemsize)
    return torch.get_num_threads() * ((2 * keys + 1) * queries * wide + half)


def _flash_gpu_backward(query: torch.Tensor, key: torch.Tensor) -> int:
    """The queries' gradient and a sum for each row in float32; where heads share keys, gradients of
    keys and values for every head before they are added up."""
    batch, heads, rows, dim = query.shape
    rows = -(-rows // 128) * 128
    nbytes = 4 * batch * heads * rows * (-(-dim // 32) * 32 + 1)
    if heads != key.shape[1]:
        nbytes += 2 * batch * heads * key.shape[2] * dim * key.itemsize
    return nbytes


def of_message(func: Any, args: Any) -> int:
    """Bytes that a collective takes while it is under way: gloo copies the whole message (of an
    all-gather twice, one copy after the other). On its own threads, so when exactly is not known.
    """
    if func.overloadpacket.__name__ not in ("_allgather_base_", "_reduce_scatter_base_"):
        return 0
    given = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return max(t.nbytes for t in given) if given and given[0].device.type == "cpu" else 0

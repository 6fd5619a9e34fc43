"""The order in which gloo's ring adds, so that our own exchange rounds exactly as gloo does.

Addition in floating point is not associative: (a + b) + c and a + (b + c) differ in the last bit.
gloo reduces a message of N elements in segments; the segment's place in the ring decides the order.
Found by experiment against gloo's ring all-reduce, which its reduce-scatter is underneath.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

_MAX_SEGMENT_BYTES = 2**20


class Span(NamedTuple):
    """Elements [start, stop) of one rank's piece, all summed in the ring order of `owner`."""

    start: int
    stop: int
    owner: int


def summation_order(owner: int, world_size: int) -> list[int]:
    """Ranks in the order their values are added: ((o-1) + (o-2)) + ... + o, modulo world size."""
    return [(owner - i) % world_size for i in range(1, world_size)] + [owner]


@lru_cache(maxsize=4096)
def spans(piece_numel: int, world_size: int, element_bytes: int, rank: int) -> tuple[Span, ...]:
    """Cut `rank`'s piece of a message of `world_size` equal pieces where the order changes."""
    numel = piece_numel * world_size
    wanted = max(-(-numel * element_bytes // _MAX_SEGMENT_BYTES), 2 * world_size)
    per_rank = -(-wanted // world_size)
    segment = per_rank * -(-numel // (per_rank * world_size))
    first = rank * piece_numel
    position, end, result = first, first + piece_numel, []
    while position < end:
        owner = position // segment
        stop = min(end, (owner + 1) * segment)
        result.append(Span(position - first, stop - first, owner))
        position = stop
    return tuple(result)

"""Which rows of a parameter a rank keeps."""

from __future__ import annotations


def rows_of(rows: int, world_size: int, rank: int) -> range:
    """The rows of a parameter with `rows` rows that `rank` of `world_size` ranks keeps.

    As `torch.chunk` splits: ceil(rows / world_size) each, until they run out; 7 rows on 4 ranks are
    0-1, 2-3, 4-5, 6. A rank for which nothing is left keeps an empty range, such as range(0).
    """
    raise NotImplementedError

"""Where rows lie: which rank holds which rows of a parameter, and where they travel in a message.

Integers only: no tensors, no process group. One parameter of 7 rows on 4 ranks, one of 2 rows::

    rank        0        1        2        3
    A (7 rows)  A0 A1    A2 A3    A4 A5    A6 --
    B (2 rows)  B0       B1       --       --

    flat shard of rank r, and piece r of a message:  [ A's slot | B's slot ]
    "--" is padding: every slot has the size of the first rank's, so all pieces are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class RowLayout:
    """The rows of one parameter on `world_size` ranks, split as `torch.chunk` splits dim 0."""

    rows: int
    row_numel: int
    world_size: int

    def __post_init__(self) -> None:
        if self.rows < 0 or self.row_numel < 0 or self.world_size < 1:
            raise ValueError(f"not a layout: {self}")

    @cached_property
    def rows_per_rank(self) -> int:
        """Rows on the first rank, and the size of every slot, in rows."""
        return -(-self.rows // self.world_size)

    @cached_property
    def slot_numel(self) -> int:
        """Elements in one rank's slot, padding included."""
        return self.rows_per_rank * self.row_numel

    @cached_property
    def numel(self) -> int:
        """Elements of the whole parameter, without padding."""
        return self.rows * self.row_numel

    @cached_property
    def padded_numel(self) -> int:
        """Elements of the whole parameter with every rank's padding."""
        return self.slot_numel * self.world_size

    def rows_of(self, rank: int) -> range:
        """Rows that `rank` holds; empty for trailing ranks once the rows have run out."""
        start = min(rank * self.rows_per_rank, self.rows)
        return range(start, min(start + self.rows_per_rank, self.rows))

    def numel_of(self, rank: int) -> int:
        """Elements that `rank` holds, without padding."""
        return len(self.rows_of(rank)) * self.row_numel


@dataclass(frozen=True)
class PieceLayout:
    """Slots of parameters side by side: one rank's piece of a message, or its flat shard."""

    slots: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[RowLayout]) -> PieceLayout:
        return cls(tuple(layout.slot_numel for layout in rows))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each slot starts, in elements."""
        starts, position = [], 0
        for slot in self.slots:
            starts.append(position)
            position += slot
        return tuple(starts)

    @cached_property
    def numel(self) -> int:
        """Elements in one rank's piece."""
        return sum(self.slots)

"""Rows are split as torch.chunk splits them, and slots tile a message without gaps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minifsdp.collectives.packed import place_rows
from minifsdp.layout import PieceLayout, RowLayout

WORLD_SIZES = st.integers(1, 17)
ROWS = st.integers(0, 100)


def rows_by_rank(rows: int, world_size: int) -> list[int]:
    layout = RowLayout(rows, 3, world_size)
    return [len(layout.rows_of(rank)) for rank in range(world_size)]


@pytest.mark.parametrize(("rows", "expected"), [(2, [1, 1, 0, 0]), (7, [2, 2, 2, 1])])
def test_rows_on_four_ranks(rows, expected):
    assert rows_by_rank(rows, 4) == expected


@given(rows=ROWS, world_size=WORLD_SIZES)
def test_rows_are_those_of_torch_chunk(rows, world_size):
    chunks = [c.tolist() for c in torch.arange(rows).chunk(world_size)]
    chunks += [[] for _ in range(world_size - len(chunks))]
    layout = RowLayout(rows, 1, world_size)
    assert [list(layout.rows_of(rank)) for rank in range(world_size)] == chunks


@given(rows=ROWS, row_numel=st.integers(0, 9), world_size=WORLD_SIZES)
def test_ranks_hold_every_element_once_and_none_more_than_a_slot(rows, row_numel, world_size):
    layout = RowLayout(rows, row_numel, world_size)
    held = [layout.numel_of(rank) for rank in range(world_size)]
    assert sum(held) == layout.numel == rows * row_numel
    assert max(held) == held[0] == layout.slot_numel
    assert layout.padded_numel == world_size * layout.slot_numel >= layout.numel


@given(
    shapes=st.lists(st.tuples(ROWS, st.integers(0, 9)), min_size=1, max_size=9),
    world_size=WORLD_SIZES,
)
def test_slots_tile_the_piece(shapes, world_size):
    layouts = [RowLayout(rows, row_numel, world_size) for rows, row_numel in shapes]
    piece = PieceLayout.of(layouts)
    ends = [start + slot for start, slot in zip(piece.offsets, piece.slots, strict=True)]
    assert piece.offsets == (0, *ends[:-1])
    assert piece.numel == ends[-1]
    assert all(
        layout.numel_of(rank) <= slot
        for layout, slot in zip(layouts, piece.slots, strict=True)
        for rank in range(world_size)
    )


@given(
    shapes=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4)), min_size=1, max_size=5),
    world_size=st.integers(1, 7),
)
def test_a_message_holds_each_ranks_rows_then_zeros(shapes, world_size):
    layouts = [RowLayout(rows, row_numel, world_size) for rows, row_numel in shapes]
    piece = PieceLayout.of(layouts)
    message = torch.full((world_size, piece.numel), torch.nan)
    grads = []
    for (rows, row_numel), layout, offset in zip(shapes, layouts, piece.offsets, strict=True):
        grad = torch.randn(rows, row_numel)
        place_rows(message[:, offset : offset + layout.slot_numel], grad.view(-1))
        grads.append(grad)
    for rank in range(world_size):
        expected = []
        for grad, layout in zip(grads, layouts, strict=True):
            mine = layout.rows_of(rank)
            rows = grad[mine.start : mine.stop].flatten()
            expected += [rows, torch.zeros(layout.slot_numel - rows.numel())]
        assert torch.equal(message[rank], torch.cat(expected))


@pytest.mark.parametrize("numbers", [(-1, 2, 2), (2, -1, 2), (2, 2, 0)])
def test_impossible_numbers_are_refused(numbers):
    with pytest.raises(ValueError, match="not a layout"):
        RowLayout(*numbers)

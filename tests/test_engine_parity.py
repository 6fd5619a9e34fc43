"""The engine computes upstream's bits: losses, gradients, norms and parameters."""

from __future__ import annotations

import itertools

import pytest
from parity import Case, differences
from parity_matrix import AXES, cover, impossible, table, wanted

from minifsdp import reduction

CELLS = sorted(cover(2), key=lambda cell: cell.world_size)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"W={cell.world_size} {cell.case}")
def test_every_bit_equals_upstream(run_ranks, cell):
    assert run_ranks(cell.world_size, differences, cell.case) == [[]] * cell.world_size


def test_each_pair_of_settings_that_can_meet_does():
    met = set()
    for cell in CELLS:
        settings = {"world_size": str(cell.world_size)} | {
            axis: getattr(cell.case, axis) for axis in AXES if axis != "world_size"
        }
        assert impossible(settings) is None
        met.update(itertools.combinations(settings.items(), 2))
    assert set(wanted(2)) <= met


def test_the_table_counts_cells_that_differ():
    cell = CELLS[0]
    line = next(x for x in table({cell: ["a loss"]}).splitlines() if cell.case.precision in x)
    assert "| 0/1 |" in line


def _without_division(case: Case) -> list[str]:
    """`differences` with the engine's division by the number of ranks left out."""
    scaling = reduction.scaling
    reduction.scaling = lambda *args: scaling(*args)._replace(average_shards=False)
    try:
        return differences(case)
    finally:
        reduction.scaling = scaling


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_skipped_division_is_found(run_ranks, world_size):
    found = run_ranks(world_size, _without_division, Case())
    assert all(names for names in found)

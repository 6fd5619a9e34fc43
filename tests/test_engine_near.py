"""Rows that few neighbours keep: the same bytes at each forward, none while on their way."""

from __future__ import annotations

import stack
import torch

from minifsdp import events


def near() -> stack.Stack:
    return stack.shard(stack.build(), reshard_after_forward=2)


def _evaluated() -> list[tuple[list[int], int]]:
    """Bytes that each of three forwards gathers for a block, and that it leaves held."""
    model = near()
    unit, found = model.layers[0]._unit(), []
    for _ in range(3):
        sizes: list[int] = []
        with (
            torch.no_grad(),
            events.listening(
                lambda e, s=sizes: s.append(e.nbytes) if e[:2] == ("all_gather", unit.name) else 0
            ),
        ):
            model(stack.batch())
        found.append((sizes, unit.held()["unsharded"]))
    return found


def test_each_forward_gathers_from_neighbours_and_leaves_the_same_bytes(run_ranks):
    whole = 4 * (8 * stack.DIM + 8 + 8 * 7 + 8)  # rows of 7 and 6, padded for 4 ranks
    for first, *later in run_ranks(4, _evaluated):
        few = 4 * (8 * stack.DIM + 8 + 6 * 7 + 6)  # padded for 2 ranks
        assert first == ([whole], few // 2)
        assert later == [([few], few // 2)] * 2


def _on_its_way() -> None:
    model = near()
    model(stack.batch())
    block = model.layers[0]
    block.unshard(async_op=False)
    block._unit().reshard_near()
    rows = block.up.weight.to_local()
    assert rows.shape[0] in (3, 4)
    block._unit().unshard()
    block._unit().reshard_near()  # not yet whole: there is nothing to keep
    assert block.up.weight.to_local() is rows or torch.equal(block.up.weight.to_local(), rows)
    model.reshard()
    block.reshard()
    stack.step(model)


def test_what_has_not_arrived_is_not_kept_near(run_ranks):
    run_ranks(4, _on_its_way)

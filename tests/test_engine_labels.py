"""Messages say which unit they are of, so that ranks in different ones are told."""

from __future__ import annotations

import pytest
import stack
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import fully_shard
from minifsdp.collectives import shared


def _labels() -> set[tuple[str, int]]:
    """Kinds and unit numbers of all messages of a step."""
    seen, label = set(), shared.label

    def noted(kind: str, unit: int, nbytes: int) -> int:
        seen.add((kind, unit))
        return label(kind, unit, nbytes)

    shared.label = noted
    try:
        stack.step(stack.shard(stack.build()))
    finally:
        shared.label = label
    return seen


def test_each_message_says_which_unit_it_is_of(run_ranks):
    kinds = ("all-gather", "reduce-scatter")
    assert run_ranks(2, _labels) == [{(kind, unit) for kind in kinds for unit in range(4)}] * 2


class Either(nn.Module):
    """Two units of one size, which ranks run in different orders."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) if dist.get_rank() else self.a(self.b(x))


def _different_orders() -> None:
    model = Either()
    for module in (model.a, model.b, model):
        fully_shard(module)
    with pytest.raises(RuntimeError, match=r"another message \(all-gather of unit number"):
        model(torch.ones(1, 3))


def test_units_of_one_size_in_another_order_are_not_taken_for_one_another(run_ranks):
    run_ranks(2, _different_orders, spoils=True)

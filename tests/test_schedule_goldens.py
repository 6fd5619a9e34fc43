"""Which messages a step sends, in which order, of how many bytes: goldens and their formula.

A step of L blocks sends, for each unit, one gather in forward, one more in backward if it was
resharded, and one reduction. A message has `ranks * slots * itemsize` bytes: every rank's slots,
each of `ceil(rows / ranks)` rows.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from minifsdp import MixedPrecisionPolicy, events, fully_shard
from minifsdp.collectives import use_collectives

NAMES = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR"}
ROWS, COLUMNS = 5, 5  # of each block's one matrix; the root has one of 3 rows


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, COLUMNS))
        self.recomputes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            return checkpoint(lambda t: torch.tanh(t @ self.weight), x, use_reentrant=False)
        return torch.tanh(x @ self.weight)


class Model(nn.Module):
    """Three blocks after a matrix that is the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.stem = nn.Parameter(torch.randn(3, COLUMNS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.stem
        for block in self.blocks:
            x = block(x)
        return x


def _messages(case: str, collectives: str) -> list[tuple[str, int]]:
    """The messages of the third step, by short names, with their bytes."""
    use_collectives(collectives)
    settings: dict = {}
    if case == "reshard False":
        settings["reshard_after_forward"] = False
    if case == "bf16":
        settings["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if case == "HSDP":
        names = ("replicate", "shard")
        settings["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    model = Model()
    for block in model.blocks:
        block.recomputes = case == "checkpointing"
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    if case == "prefetch 2 ahead":
        first, second, third = model.blocks
        model.set_modules_to_forward_prefetch([first, second])
        first.set_modules_to_forward_prefetch([second, third])
        model.set_modules_to_backward_prefetch([third, second])
        third.set_modules_to_backward_prefetch([second, first])
    seen: list[events.Event] = []
    for step in range(3):
        micro_batches = 2 if case == "un-synced accumulation" else 1
        with events.listening(seen.append):
            for micro in range(micro_batches):
                model.set_requires_gradient_sync(micro == micro_batches - 1)
                model(torch.ones(2, 3)).float().sum().backward()
        if step < 2:
            seen.clear()
    short = [
        (NAMES[e.kind], e.unit.replace("blocks.", "l"), e.nbytes) for e in seen if e.kind in NAMES
    ]
    return [(f"{kind} {unit}", nbytes) for kind, unit, nbytes in short]


FORWARD = "AG root, AG l0, AG l1, AG l2, "
BACKWARD = "AG l2, AG l1, RS l2, AG l0, RS l1, RS l0, RS root"
GOLDENS = {
    "plain": FORWARD + BACKWARD,
    "bf16": FORWARD + BACKWARD,
    "checkpointing": FORWARD + BACKWARD,
    "reshard False": FORWARD + "RS l2, RS l1, RS l0, RS root",
    "un-synced accumulation": FORWARD + "AG l2, AG l1, AG l0, " + FORWARD + BACKWARD,
    "prefetch 2 ahead": FORWARD + "AG l2, AG l1, AG l0, RS l2, RS l1, RS l0, RS root",
    "HSDP": FORWARD
    + "AG l2, AG l1, RS l2, AG l0, AR l2, RS l1, AR l1, RS l0, AR l0, RS root, AR root",
}
SHARED_HSDP = "AG l2, AG l1, RS l2, AR l2, AG l0, RS l1,"


def _bytes(kind: str, unit: str, case: str, world_size: int) -> int:
    """The formula."""
    ranks = 2 if case == "HSDP" else world_size
    rows = 3 if unit == "root" else ROWS
    itemsize = 2 if case == "bf16" and kind == "AG" else 4
    piece = -(-rows // ranks) * COLUMNS * itemsize
    return piece if kind == "AR" else ranks * piece


@pytest.mark.parametrize("collectives", ["shared", "direct", "backend"])
@pytest.mark.parametrize("case", list(GOLDENS))
def test_a_step_sends_these_messages_in_this_order(run_ranks, case, collectives):
    golden = GOLDENS[case]
    if collectives == "shared":  # reductions are over at once, so replicas' need not wait
        golden = golden.replace("AG l2, AG l1, RS l2, AG l0, AR l2, RS l1,", SHARED_HSDP)
    for world_size in (4,) if case == "HSDP" else (2, 3):
        for messages in run_ranks(world_size, _messages, case, collectives):
            assert ", ".join(name for name, _ in messages) == golden
            for name, nbytes in messages:
                assert nbytes == _bytes(*name.split(), case, world_size), name


def test_counts_follow_the_formula():
    """Per step of L blocks: L + 1 gathers forward, L or none in backward, L + 1 reductions."""
    for case, golden in GOLDENS.items():
        micro_batches = 2 if case == "un-synced accumulation" else 1
        again = 0 if case == "reshard False" else 3
        assert golden.count("AG") == micro_batches * (3 + 1 + again)
        assert golden.count("RS") == 3 + 1
        assert golden.count("AR") == (3 + 1 if case == "HSDP" else 0)

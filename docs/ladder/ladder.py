"""The rungs in order, what each holds and sends by formula, and the table of what each took."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import task
import torch.distributed as dist
from link import Link
from trial import Figures, Seen, measure

from minifsdp import MixedPrecisionPolicy, OffloadPolicy

RUNGS = [
    "rung0_whole",
    "rung1_gather_everything",
    "rung2_free_and_gather_again",
    "rung3_prefetch",
    "rung4_mixed_precision",
    "rung5_accumulation",
    "rung6_offload",
    "rung7_engine",
]
_PLAIN = {"precision": MixedPrecisionPolicy(), "micro_batches": 1, "offload": OffloadPolicy()}


class Trial(NamedTuple):
    """A rung as it is measured; `settings` go to its `train`."""

    label: str
    rung: str
    settings: dict[str, Any]


TRIALS = [Trial(rung.partition("_")[0], rung, {}) for rung in RUNGS[:-1]]
TRIALS += [Trial("rung7, as rung3", RUNGS[-1], _PLAIN), Trial("rung7", RUNGS[-1], {})]


def train_of(rung: str) -> Callable[..., Iterator[Seen]]:
    return importlib.import_module(rung).train


class Volume(NamedTuple):
    """In bytes, of one rank."""

    held: int  # the most at once, host included, activations left out
    sent: int  # a step


def by_formula(world_size: int) -> list[Volume]:
    """What rungs 0 to 6 hold and send. U is a whole unit, H the same in bfloat16.

    Of what is held at most, in the order of the sums below: rows or parameters and their two
    moments; gradients that wait for the optimizer, or to be sent; the unit at work, its parameters
    and its gradients; the next unit, on its way here; the gradients of the one before, on their
    way out. Which unit is at work then, the last or the last but one, follows from what is least.
    """
    units, whole = task.BLOCKS, 4 * task.BLOCK_NUMEL
    half = whole // 2
    rows = whole // world_size
    arriving = whole
    arriving_half = half + half // world_size  # with the cast rows that are sent
    leaving = whole + whole - rows  # a message out, and of each other rank a piece in
    moments = 2 * units * rows
    cast = 4 * task.DIM * task.HIDDEN  # the largest parameter's gradient, as it is added to float32
    passed = (world_size - 1) * rows  # bytes a unit sends to be gathered once, or reduced
    accumulating = (units - 1) * whole + 2 * half + arriving_half + leaving + cast
    return [
        Volume(units * (whole + 2 * whole) + units * whole + 2 * whole + rows, units * 2 * passed),
        Volume(units * rows + moments + units * whole + units * whole, units * 2 * passed),
        Volume(units * rows + moments + (units - 1) * rows + 2 * whole, units * 3 * passed),
        Volume(
            units * rows + moments + (units - 3) * rows + 2 * whole + arriving + leaving,
            units * 3 * passed,
        ),
        Volume(
            units * rows + moments + (units - 3) * rows + 2 * half + arriving_half + leaving,
            units * 2 * passed,
        ),
        Volume(units * rows + moments + accumulating, units * 3 * passed),
        Volume(units * rows + moments + units * rows + accumulating, units * 3 * passed),
    ]


def measure_all(steps: int, mbit_per_second: float) -> list[Figures]:
    """Each trial on this group's ranks, one after the other; this rank's figures."""
    return [
        measure(train_of(trial.rung), Link(mbit_per_second), steps, **trial.settings)
        for trial in TRIALS
    ]


def table(figures: Sequence[Figures], world_size: int) -> str:
    """One line a trial, in Markdown."""
    expected = by_formula(world_size)
    lines = [
        "| | holds at most, MiB | of it on the host | by formula | sends a step, MiB "
        "| a step, ms | of it waiting |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for at, (trial, took) in enumerate(zip(TRIALS, figures, strict=True)):
        formula = _mib(expected[at].held) if at < len(expected) else ""
        host = _mib(took.host_bytes) if took.host_bytes else ""
        times = f"{1e3 * took.seconds:.0f} | {1e3 * took.waited_seconds:.0f}"
        lines.append(
            f"| {trial.label} | {_mib(took.peak_bytes)} | {host} | {formula} "
            f"| {_mib(took.sent_bytes)} | {times} |"
        )
    return "\n".join(lines)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f}"


def print_table(steps: int, mbit_per_second: float, path: str) -> None:
    """Measure all; rank 0 prints the table, and writes it to `path`."""
    made = table(measure_all(steps, mbit_per_second), dist.get_world_size())
    if dist.get_rank() == 0:
        print(made)
        with open(path, "w") as file:
            file.write(made)

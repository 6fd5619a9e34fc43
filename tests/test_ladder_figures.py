"""What the rungs of docs/ladder hold and send, and in which order; their page; that they run."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

# Rungs are scripts: they import their neighbours by name.
sys.path.append(str(Path(__file__).parents[1] / "docs" / "ladder"))

import ladder
import page
import task
import trial
from link import Link
from test_ladder import MIXED, PREFETCH, small_task

FOLDER = page.FOLDER

# Memory, messages, order


def volumes() -> list[tuple[int, int]]:
    """What rungs 0 to 6 hold and send with all but no activations."""
    usual, task.BATCH = task.BATCH, 4
    try:
        taken = [trial.measure(ladder.train_of(rung), Link(), 4) for rung in ladder.RUNGS[:-1]]
    finally:
        task.BATCH = usual
    return [(figures.peak_bytes, figures.sent_bytes) for figures in taken]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rung_holds_and_sends_what_its_formula_says(run_ranks, world_size):
    unit = 4 * task.BLOCK_NUMEL
    for of_rank in run_ranks(world_size, volumes):
        for rung, formula, (held, sent) in zip(
            ladder.RUNGS[:-1], ladder.by_formula(world_size), of_rank, strict=True
        ):
            assert sent == formula.sent, rung
            assert 0 <= held - formula.held < unit / 16, f"{rung}: {held} and {formula.held}"


def order_of_events() -> list[str]:
    """What the units of the third rung do in one step."""
    rung, seen = importlib.import_module(PREFETCH), []

    def logged(method: Callable) -> Callable:
        def call(unit: Any, *args: Any) -> Any:
            seen.append((method.__name__, unit))
            return method(unit, *args)

        return call

    names = ["start_gather", "forward", "backward", "start_reduce", "finish_reduce"]
    usual = {name: getattr(rung.Unit, name) for name in names}
    try:
        for name, method in usual.items():
            setattr(rung.Unit, name, logged(method))
        with small_task():
            list(rung.train(Link(), 1))
    finally:
        for name, method in usual.items():
            setattr(rung.Unit, name, method)
    units = list(dict.fromkeys(unit for _, unit in seen))
    return [f"{name} {units.index(unit)}" for name, unit in seen]


def test_messages_start_a_unit_early_and_gradients_are_waited_for_a_unit_late(run_ranks):
    events = run_ranks(2, order_of_events)[0]
    at = {event: events.index(event) for event in events if "start_gather" not in event}
    forward = events[: at["forward 3"]]
    backward = events[at["forward 3"] :]
    for unit in range(3):
        assert forward.index(f"start_gather {unit + 1}") < at[f"forward {unit}"]
        early = at["forward 3"] + backward.index(f"start_gather {unit}")
        assert early < at[f"backward {unit + 1}"]
        assert at[f"backward {unit}"] < at[f"finish_reduce {unit + 1}"]
        assert at[f"finish_reduce {unit + 1}"] < at[f"start_reduce {unit}"]


def seconds_on_the_line() -> tuple[float, float]:
    """Of two messages started together, until each was there."""
    link = Link(mbit_per_second=8)
    dist.barrier()
    began = time.perf_counter()
    messages = [link.all_gather(torch.zeros(5_000)), link.all_gather(torch.zeros(5_000))]
    arrived = []
    for message in messages:
        message.wait()
        arrived.append(time.perf_counter() - began)
    return arrived[0], arrived[1]


def test_a_pretended_line_carries_one_message_after_the_other(run_ranks):
    for first, second in run_ranks(2, seconds_on_the_line):  # 20,000 bytes at 1 MB a second each
        assert first >= 0.02
        assert second >= 0.04


# The page, and the rungs as scripts


def test_rungs_below_the_last_are_whole_in_one_file_without_the_engine():
    for rung in ladder.RUNGS[:-1]:
        source = (FOLDER / f"{rung}.py").read_text()
        assert "minifsdp" not in source
        assert len(source.splitlines()) < 150
        imported = set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE))
        standard = {"__future__", "collections", "itertools", "typing"}
        assert imported <= standard | {"torch", "link", "task", "trial"}


def figures_of_all() -> list[trial.Figures]:
    return ladder.measure_all(4, 0)


HELD = re.compile(r"^(\| rung[^|]+\| )(\d+\.\d\d)", re.MULTILINE)


def without_measures(text: str) -> str:
    return HELD.sub(r"\1", page.without_times(text))


def test_the_page_is_up_to_date_but_for_its_times(run_ranks):
    text = (FOLDER / "README.md").read_text()
    measured = ladder.table(run_ranks(2, figures_of_all)[0], 2)
    fresh = page.refreshed(text, page.code_parts() | {"table": measured + "\n"})
    again = "README.md is not up to date: run `python docs/ladder --write`"
    assert without_measures(fresh) == without_measures(text), again
    held, held_before = ([float(found[2]) for found in HELD.finditer(p)] for p in (fresh, text))
    for at, one in enumerate(ladder.TRIALS):
        # Scratch memory of products in bfloat16 depends on the processor.
        is_float32 = one.rung < MIXED or one.settings
        assert abs(held[at] - held_before[at]) <= (0 if is_float32 else 0.25), again
    assert set(re.findall(r"<!-- made: (\S+) -->", text)) == {"table", *ladder.RUNGS}
    rows = re.findall(r"^\| rung.*\| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert len(rows) == len(ladder.TRIALS)
    assert all(int(waited) <= int(step) for step, waited in rows)


def test_a_rung_runs_as_a_script_on_ranks_of_its_own():
    command = [sys.executable, str(FOLDER / f"{PREFETCH}.py"), "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    losses = re.search(r"^losses((?: \d+\.\d+){4})$", done.stdout, re.MULTILINE)
    assert losses, done.stdout
    assert re.search(r"^holds at most \d+\.\d\d MiB$", done.stdout, re.MULTILINE)
    assert re.search(r"^takes \d+ ms a step, of it \d+ waiting", done.stdout, re.MULTILINE)

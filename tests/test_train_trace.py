"""`train.py --trace`: what the engine did in a few steps of a run, in the run's folder."""

from collections.abc import Callable
from pathlib import Path

import pytest
from test_train import MODEL, STEPS, Run, train_in_pool, write_dialogs
from test_train_errors import checked
from test_train_features import die_in_pool

from minifsdp.trace import load


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*write_dialogs(tmp_path_factory.mktemp("data")), *MODEL, *STEPS]


def test_the_steps_after_the_first_two_are_traced_on_all_ranks_and_nothing_changes_by_it(
    flags: list[str], run_ranks: Callable[..., list], tmp_path: Path
) -> None:
    plain, traced = Run(tmp_path / "plain"), Run(tmp_path / "traced")
    run_ranks(2, train_in_pool, plain.out, flags)
    run_ranks(2, train_in_pool, traced.out, [*flags, "--trace", "3", "--no-sync"])
    trace = load(traced.out / "trace.json")
    assert sorted(trace.ranks) == [0, 1]
    assert [len(ranks_own.iterations) for ranks_own in trace.ranks.values()] == [3, 3]
    assert {"layers.0", "optimizer"} <= set(trace.ranks[0].units)
    assert "<html" in (traced.out / "trace.html").read_text()
    assert 'href="trace.html"' in (traced.out / "report.html").read_text()
    assert traced.losses == plain.losses
    assert not (plain.out / "trace.html").exists()
    assert "trace.html" not in (plain.out / "report.html").read_text()


def test_a_trace_is_written_as_soon_as_its_steps_are_over_and_again_by_a_resumed_run(
    flags: list[str], run_ranks: Callable[..., list], tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    stopping = [*flags, "--save-every", "2", "--trace", "1-3"]
    run_ranks(2, die_in_pool, run.out, stopping, 5, "reading data")
    first = load(run.out / "trace.json")
    assert len(first.ranks[1].iterations) == 3
    run_ranks(2, train_in_pool, run.out, ["--resume"])  # which traces nothing by itself
    assert load(run.out / "trace.json").ranks[0].events == first.ranks[0].events
    run_ranks(2, train_in_pool, run.out, ["--resume", "--steps", "8", "--trace", "8-8"])
    assert len(load(run.out / "trace.json").ranks[1].iterations) == 1


@pytest.mark.parametrize(
    ("asked", "steps_done", "steps"),
    [
        ("3", 0, [3, 4, 5]),
        ("3", 2, [5, 6]),  # it ends before
        ("2-4", 0, [2, 3, 4]),
        ("2-4", 2, [3, 4]),
        ("2-4", 5, []),
    ],
)
def test_steps_are_counted_from_the_launch_or_named(
    asked: str, steps_done: int, steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama.finetune.inputs.TASK_EXAMPLES", 100)
    job = checked(["--out", str(tmp_path / "run"), "--steps", "6", "--trace", asked])
    assert [step + 1 for step in job.traced(steps_done)] == steps

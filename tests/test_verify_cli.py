"""`python -m minifsdp.verify`: ranks it launches, exit codes, errors that name who and where."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import planted_engines as planted
import pytest

import minifsdp.verify
from minifsdp.verify import compare
from minifsdp.verify.__main__ import main
from minifsdp.verify.launch import _serve

ROOT = Path(__file__).parents[1]
NET = ["--model", "tests.planted_engines:build", "--batch", "tests.planted_engines:batch"]


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_a_fault_exits_1_and_prints_where(capsys, tmp_path):
    written = tmp_path / "report.json"
    engine = ["--engine", "tests.planted_engines:skipped_division"]
    assert main([*NET, *engine, "--steps", "1", "--json", str(written)]) == 1
    printed = capsys.readouterr().out
    assert "looks like: every gradient of unit layers.1 is 2x" in printed
    told = json.loads(written.read_text())
    assert told["ok"] is False
    first = told["comparisons"][0]["first"]
    assert (first["phase"], first["unit"], first["step"]) == ("gradient", "layers.1", 0)


def test_the_example_of_the_docstring_runs_and_exits_0(tmp_path):
    text = minifsdp.verify.__doc__
    example = text[text.index("    # mine.py") : text.index("    python -m")]
    (tmp_path / "mine.py").write_text(textwrap.dedent(example))
    command = next(x for x in text.splitlines() if "--model mine:build" in x).split()[1:]
    done = subprocess.run(
        [sys.executable, *command, "--world-size", "1", "--steps", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "EQUAL BITS" in done.stdout and "4 units" in done.stdout


MISTAKES = [
    (["--model", "nowhere.mod:build"], "--model nowhere.mod:build: no module 'nowhere'; run from"),
    (["--model", "tests.nowhere:build"], "no module 'tests.nowhere'"),
    (["--model", "tests.planted_engines:bild"], "tests.planted_engines has no 'bild'; it has"),
    (["--model", "tests.planted_engines"], "give it as package.module:name"),
    (["--engine", "fsdp3"], "no engine 'fsdp3': give minifsdp, fsdp2"),
    (["--against", ""], "give the tested one and another"),
    (["--against", "minifsdp"], "engine minifsdp is there twice"),
    (["--accumulate", "0"], "accumulate is 0: give a whole number of at least 1"),
    (["--clip", "-1"], "clip is -1.0: give a norm above 0"),
    (["--world-size", "0"], "world_size is 0: give a whole number of at least 1"),
    (["--device", "cuda"], "device cuda has 0 GPUs for 2 ranks"),
    (["--device", "tpu"], "device is 'tpu': give cpu or cuda"),
    (["--optimizer", "adam"], "optimizer is 'adam': give adamw, sgd"),
    (["--json", "nowhere/report.json"], "there is no folder nowhere"),
    (["--loss", "tests.planted_engines:nothing"], "--loss tests.planted_engines:nothing"),
    (["--batch", "tests.planted_engines:build"], "called as (rank, step), which it does not take"),
]


@pytest.mark.parametrize(("flags", "said"), MISTAKES)
def test_a_mistake_exits_2_with_one_line(flags, said, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("minifsdp.verify.comparison.launch", _only_checks)
    assert main([*NET, *flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("python -m minifsdp.verify: ") and said in printed.err


def _only_checks(work, args, world_size, device, timeout_seconds):
    from minifsdp.verify.launch import check

    check(world_size, device)
    raise AssertionError("nothing was wrong")


def test_a_rank_that_dies_is_named_with_engine_step_and_phase(capsys):
    assert main([*NET, "--engine", "tests.unruly_engines:dies_on_rank_1"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "rank 1 ended with exit code 3 at: engine tests.unruly_engines:dies_on_rank_1" in said
    assert "step 0, backward" in said


def test_a_rank_that_hangs_is_named_with_where_it_stands(capsys):
    flags = ["--engine", "tests.unruly_engines:hangs_on_rank_1", "--timeout", "6"]
    assert main([*NET, *flags]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "no progress for 6 s" in said and "step 0, backward" in said
    assert "rank 1 in" in said and "unruly_engines.py" in said


@pytest.mark.slow
def test_a_rank_that_raises_is_named_with_what_it_raised(capsys):
    assert main([*NET, "--engine", "tests.unruly_engines:raises_on_rank_1"]) == 2
    said = capsys.readouterr().err
    assert "rank 1: engine tests.unruly_engines:raises_on_rank_1, step 0: KeyError" in said
    assert "Traceback" in said


def test_functions_that_ranks_cannot_import_are_refused():
    with pytest.raises(ValueError, match="must be at the top level of a module"):
        compare(lambda: planted.build(), planted.batch)


def _work_with_an_end(folder: Path, note) -> None:
    atexit.register((folder / "ended").touch)


def test_a_launched_rank_ends_without_tearing_down_what_gloos_threads_use(tmp_path):
    here, there = multiprocessing.Pipe(duplex=False)
    payload = pickle.dumps((_work_with_an_end, (tmp_path,)))
    given = (0, 1, "cpu", 60.0, str(tmp_path), payload, there)
    rank = multiprocessing.get_context("spawn").Process(target=_serve, args=given)
    rank.start()
    rank.join(60)
    assert rank.exitcode == 0 and here.recv() == ("done", None)
    assert not (tmp_path / "ended").exists()

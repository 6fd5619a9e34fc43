"""The step benchmark: a small run end to end, what its figures mean, how its table reads."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.step.__main__ import arguments
from benchmarks.step.built import Step
from benchmarks.step.counts import Counts
from benchmarks.step.figures import compare_losses, count_figures, memory_figures, time_figures
from benchmarks.step.memory import Memory, count_refills, shared_mapping_bytes
from benchmarks.step.table import read_reports, summary, table
from benchmarks.step.timing import Timed
from benchmarks.step.works import WORKS

ROOT = Path(__file__).parents[1]
ENGINES = ["minifsdp-direct", "fsdp2", "none"]
REPORT_KEYS = {
    *("machine", "torch", "python", "device", "backend", "world_size", "work", "seed", "rounds"),
    *("warmup", "offload", "load_before", "engines", "skipped"),
}
ROW_KEYS = {
    *("settings", "tried", "step_seconds", "forward_seconds", "backward_seconds"),
    *("optimizer_seconds", "ratio_to_upstream", "ratio_to_none", "cpu_seconds"),
    *("exposed_seconds", "rounds_seconds", "loss_last", "loss_differs_from"),
    *("loss_first_difference", "aten_ops", "python_calls", "messages", "message_bytes"),
    *("message_bytes_from", "c10d_ops", "sent_bytes", "sent_bytes_from"),
    *("peak_above_shards_bytes", "peak_ratio_to_upstream", "peak_bytes", "shard_bytes"),
    *("shared_bytes", "allocations", "refills"),
}


def test_a_run_on_two_ranks_reports_every_figure_of_every_engine(tmp_path):
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.step", "--work", "tiny", "--rounds", "1"]
    command += ["--warmup", "1", "--engines", ",".join([*ENGINES, "minifsdp-shared"])]
    done = subprocess.run(
        [*command, "--json", str(file)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (report,) = read_reports([file])
    assert set(report) == REPORT_KEYS
    rows = report["engines"]
    assert set(rows) | set(report["skipped"]) == {*ENGINES, "minifsdp-shared"}
    assert [(name, ROW_KEYS ^ set(row)) for name, row in rows.items() if set(row) != ROW_KEYS] == []
    assert rows["minifsdp-direct"]["loss_first_difference"] is None
    assert rows["minifsdp-direct"]["loss_last"] == rows["fsdp2"]["loss_last"]
    assert rows["none"]["loss_first_difference"] == 1
    assert rows["fsdp2"]["ratio_to_upstream"] == 1.0
    assert (
        rows["fsdp2"]["messages"] == 8
    )  # two blocks and the root: 3 + 2 all-gathers, 3 reductions
    assert rows["minifsdp-direct"]["message_bytes"] == rows["fsdp2"]["message_bytes"]
    assert rows["none"]["messages"] == 0
    assert rows["none"]["exposed_seconds"] == 0
    # With no communication what remains is the gradients and a few activations.
    gradient_bytes = 4 * report["work"]["parameters"]
    assert gradient_bytes <= rows["none"]["peak_above_shards_bytes"] < 1.5 * gradient_bytes
    assert str(ROOT) not in file.read_text()
    assert table([report]) in done.stdout


# ---- Figures, from steps made up ----------------------------------------------------------------


def _timed(seconds: list[list[float]], losses: list[list[float]] | None = None) -> Timed:
    """An engine that took `seconds[rank][step]`, half of it forward."""
    steps = [
        [
            Step(s / 2, s / 4, s / 4, s, cpu=s, loss=losses[rank][i] if losses else 0.0)
            for i, s in enumerate(ranks)
        ]
        for rank, ranks in enumerate(seconds)
    ]
    return Timed({}, [], steps, None)


def test_ratios_are_paired_by_round_and_count_the_slowest_rank():
    timed = {
        "minifsdp-direct": _timed([[9, 1, 2, 8], [9, 2, 1, 2]]),
        "fsdp2": _timed([[9, 4, 4, 8], [9, 1, 1, 1]]),
        "fsdp1": _timed([[1, 9, 9, 9], [1, 9, 9, 9]]),
        "none": _timed([[1, 1, 1, 1], [1, 1, 1, 1]]),
    }
    rows = time_figures(timed, warmup=1)
    assert rows["minifsdp-direct"]["rounds_seconds"] == [2, 2, 8]
    assert rows["minifsdp-direct"]["ratio_to_upstream"] == 0.5  # of 2/4, 2/4, 8/8
    assert rows["minifsdp-direct"]["ratio_to_none"] == 2
    assert rows["minifsdp-direct"]["cpu_seconds"] == 3  # both ranks: of 3, 3, 10
    assert rows["fsdp2"]["exposed_seconds"] == 0.75 * 3
    assert rows["fsdp1"]["ratio_to_upstream"] == 2.25


def test_a_loss_that_differs_in_one_bit_fails_and_names_engine_step_and_rank():
    timed = {
        "minifsdp-direct": _timed([[1, 1], [1, 1]], [[0.5, 0.25], [0.5, 0.25 + 2**-50]]),
        "fsdp2": _timed([[1, 1], [1, 1]], [[0.5, 0.25], [0.5, 0.25]]),
    }
    with pytest.raises(RuntimeError, match=r"engine minifsdp-direct: the loss of step 1 on rank 1"):
        compare_losses(timed)
    timed["ddp"] = timed.pop("minifsdp-direct")
    assert compare_losses(timed)["ddp"] == {"reference": "fsdp2", "step": 1}


def test_another_engine_may_differ_but_not_before_a_parameter_has_changed():
    timed = {
        "fsdp1": _timed([[1, 1]], [[0.5, 0.25]]),
        "fsdp2": _timed([[1, 1]], [[0.75, 0.25]]),
    }
    with pytest.raises(RuntimeError, match="engine fsdp1: the loss of step 0 on rank 0"):
        compare_losses(timed)


def test_sent_bytes_are_those_of_all_ranks():
    counts = [Counts(1, 1, {"allreduce": 2}, 0, 0, 0, sent) for sent in (10, 20)]
    row = count_figures("ddp", Timed({}, [], [], counts), gradient_bytes=99)
    assert (row["sent_bytes"], row["messages"]) == (30, 2)
    assert (row["message_bytes"], row["message_bytes_from"]) == (99, "formula")


def test_memory_is_that_of_the_rank_that_holds_most_against_the_leaner_upstream():
    def memory(peak: int) -> Memory:
        return Memory(peak, 100, 0, 1, 1)

    measured = {
        "minifsdp-direct": [memory(150), memory(160)],
        "fsdp1": [memory(220), memory(210)],
        "fsdp2": [memory(300), memory(300)],
    }
    rows = memory_figures(measured)
    assert rows["minifsdp-direct"]["peak_above_shards_bytes"] == 60
    assert rows["minifsdp-direct"]["peak_ratio_to_upstream"] == 0.5


def test_shard_bytes_pad_rows_to_the_first_rank_and_hold_two_moments():
    work = WORKS["tiny"]
    whole = 3 * 4 * work.config.num_parameters
    assert work.shard_bytes(2, sharded=False) == whole
    assert work.shard_bytes(2, sharded=True) == whole // 2  # all rows are even
    # On 3 ranks 64 rows are 22 a rank, 176 are 59, 256 are 86.
    block = 4 * 22 * 64 + 2 * 59 * 64 + 22 * 176 + 2 * 22
    assert work.shard_bytes(3, sharded=True) == 3 * 4 * (2 * block + 2 * 86 * 64 + 22)


def test_memory_that_the_process_maps_shared_is_counted():
    before = shared_mapping_bytes()
    with mmap.mmap(-1, 1 << 20):
        assert shared_mapping_bytes() - before == 1 << 20
    assert shared_mapping_bytes() == before


def test_storages_that_grow_are_counted_and_shrinking_ones_are_not():
    import torch

    storage = torch.ones(4).untyped_storage()
    with count_refills() as refills:
        storage.resize_(0)
        storage.resize_(16)
    storage.resize_(0)
    storage.resize_(16)
    assert refills == [16]


# ---- Table and arguments ------------------------------------------------------------------------


def _report(seed: int, ratio: float) -> dict:
    return {
        **dict.fromkeys(REPORT_KEYS, 1),
        "machine": {"cpu": "a CPU", "cores": 2, "gpu": None},
        "work": WORKS["tiny"].describe(),
        "seed": seed,
        "engines": {"fsdp2": {"ratio_to_upstream": ratio, "step_seconds": 0.002}},
        "skipped": {"deepspeed": "deepspeed is not installed"},
    }


def test_the_table_shows_each_run_and_their_median(tmp_path):
    paths = [tmp_path / f"{seed}.json" for seed in range(3)]
    for seed, (path, ratio) in enumerate(zip(paths, (0.5, 0.25, 0.75), strict=True)):
        path.write_text(json.dumps(_report(seed, ratio)))
    lines = table(read_reports(paths)).splitlines()
    assert "seeds 0, 1, 2" in lines[0]
    assert "| engine | wall / better FSDP | step ms |" in lines
    assert "| fsdp2 | 0.50 0.25 0.75 → **0.50** | 2.0 |" in lines
    assert lines[-1] == "- skipped: deepspeed: deepspeed is not installed"


def test_a_file_that_is_no_report_is_named(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"other\.json: not a report of benchmarks\.step"):
        read_reports([path])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--work", "huge"], "--work: nothing is called 'huge'; choose from short"),
        (["--engines", "fsdp2,fsdp3"], "--engines: nothing is called 'fsdp3'"),
        (["--engines", "none,none"], "names one twice"),
        (["--rounds", "0"], "--rounds must be at least 1, not 0"),
        (["--json", "no/such/folder/x.json"], "its folder does not exist; make it first"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        arguments(argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_readmes_figures_are_those_of_the_kept_reports():
    reports = read_reports(sorted((ROOT / "benchmarks" / "results").glob("*-w?-s?.json")))
    for printed in summary(reports).split("\n\n"):
        assert printed in (ROOT / "README.md").read_text()

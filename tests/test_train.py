"""Whole runs of train.py, small: what they leave, that engines agree, that runs go on bit for bit.

Most are made in the pool of ranks that all tests share, without a process of their own to start.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import warm_python
from safetensors.torch import load_file

from llama import Llama, LlamaConfig, Tokenizer
from llama.finetune.data import Batches, Example
from llama.finetune.metrics import Metrics, read_metrics
from llama.finetune.tasks import TOKENIZER_PATH
from llama.weights import load_hf

TRAIN = Path(__file__).parents[1] / "train.py"
MODEL = ["--dim", "32", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--ffn", "64"]
# Rows of a few dialogs each.
STEPS = ["--batch-size", "8", "--steps", "6", "--lr", "0.01", "--seq-len", "64"]
SUMMARY_KEYS = {
    "steps",
    "train_loss_first",
    "train_loss_last",
    "eval_loss",
    "eval_exact_match",
    "tokens_per_second",
    "seconds",
    "world_size",
    "engine",
    "parameters",
    "peak_bytes",
}


class Run(NamedTuple):
    """The folder of a run of train.py, and what the run said if it was a process of its own."""

    out: Path
    stdout: str = ""
    stderr: str = ""

    @property
    def losses(self) -> list[float]:
        lines = read_metrics(self.out / "metrics.jsonl")
        return [line["loss"] for line in lines if "loss" in line]

    @property
    def summary(self) -> dict:
        return json.loads((self.out / "summary.json").read_text())

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.out / "export" / "model-00001-of-00001.safetensors")


def launch(out: Path, ranks: int, *flags: str, code: int = 0) -> Run:
    """In processes of its own; several are told what torchrun tells them."""
    command = [str(TRAIN), "--device", "cpu", "--out", str(out), *flags]
    about = {"ranks": ranks if ranks > 1 else 0, "timeout_seconds": 120}
    done = warm_python.shared().run(command, out.parent, errors_apart=True, **about)
    assert done.code == code, done.errors
    return Run(out, done.output, done.errors)


def launch_by_torchrun(out: Path, ranks: int, *flags: str) -> Run:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    flags = "--device", "cpu", "--out", str(out), *flags
    command = [sys.executable, *launcher, str(TRAIN), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return Run(out, done.stdout, done.stderr)


def load_train() -> ModuleType:
    """train.py as a module."""
    spec = importlib.util.spec_from_file_location("train", TRAIN)
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    return train


def train_in_pool(out: Path, flags: list[str]) -> None:
    """Run on this rank of a process group that is there already."""
    train = load_train()
    sys.argv[1:] = ["--device", "cpu", "--hang-timeout", "0", "--out", str(out), *flags]
    train.do(time.perf_counter())


def write_dialogs(folder: Path) -> list[str]:
    """Flags for ten dialogs of unequal length, so that ranks have unequal numbers of targets."""
    path = folder / "dialogs.jsonl"
    dialogs = [
        [
            {"role": "user", "content": "count " * (i % 3 + 1)},
            {"role": "assistant", "content": "abcdefghijklmnopqrstuvwxyz"[: i * i % 23 + 1]},
        ]
        for i in range(10)
    ]
    path.write_text("".join(json.dumps({"messages": dialog}) + "\n" for dialog in dialogs))
    return ["--data", str(path), "--eval-data", str(path), "--tokenizer", str(TOKENIZER_PATH)]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_dialogs(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def trained(
    tmp_path_factory: pytest.TempPathFactory, data: list[str], run_ranks: Callable[..., list]
) -> Callable[..., Run]:
    """`trained(engine, ranks, *flags)`: six steps on the dialogs, run once for equal arguments."""
    runs: dict[tuple, Run] = {}

    def run(engine: str, ranks: int, *flags: str) -> Run:
        key = (engine, ranks, flags)
        if key not in runs:
            out = tmp_path_factory.mktemp("runs") / "run"
            everything = ["--engine", engine, *data, *MODEL, *STEPS, *flags]
            run_ranks(ranks, train_in_pool, out, everything)
            runs[key] = Run(out)
        return runs[key]

    return run


def test_the_default_job_runs_on_two_ranks_and_leaves_its_folder(tmp_path: Path) -> None:
    run = launch_by_torchrun(tmp_path / "run", 2, *MODEL, "--steps", "3", "--batch-size", "8")
    summary = run.summary
    assert summary.keys() >= SUMMARY_KEYS
    assert (summary["steps"], summary["world_size"], summary["engine"]) == (3, 2, "minifsdp")
    assert 0 <= summary["eval_exact_match"] <= 1
    assert len(summary["eval_exact_match_by_kind"]) >= 4
    assert summary["train_loss_first"] == run.losses[0]
    assert summary["train_loss_last"] == run.losses[-1] < run.losses[0]
    exported = run.out / "export"
    names = {path.name for path in exported.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.model"} <= names
    assert "model.safetensors.index.json" in names
    assert run.stdout.endswith(f"MiB)\nexport: {exported}\n")
    config = LlamaConfig.from_hf(exported)
    assert summary["parameters"] == config.num_parameters
    load_hf(Llama(config), exported)
    assert Tokenizer(exported / "tokenizer.model").vocab_size == config.vocab_size
    assert run.stdout.count("[/INST]") >= 4  # samples
    assert run.stderr.count("3/3") == 1  # one bar, by one rank
    # Gradients and moments of one rank's half, and its share of the weights, at the very least.
    assert 4 * 4 * config.num_parameters / 2 < summary["peak_bytes"] < 50e6


def test_one_process_needs_no_torchrun_and_shards_all_the_same(trained: Callable[..., Run]) -> None:
    sharded, plain = trained("minifsdp", 1), trained("none", 1)
    assert sharded.losses == plain.losses
    for name, tensor in plain.weights.items():
        assert torch.equal(sharded.weights[name], tensor), name


def test_minifsdp_gives_the_losses_and_weights_of_fsdp2(trained: Callable[..., Run]) -> None:
    ours, theirs = trained("minifsdp", 2), trained("fsdp2", 2)
    assert ours.losses == theirs.losses
    for name, tensor in theirs.weights.items():
        assert torch.equal(ours.weights[name], tensor), name


@pytest.mark.parametrize(
    ("engine", "ranks", "flags"),
    [
        ("none", 1, ""),
        ("none", 1, "--micro-batch 2"),
        ("ddp", 2, "--micro-batch 2 --no-sync"),
        ("fsdp1", 2, "--activation-checkpointing"),
        ("minifsdp", 2, "--micro-batch 1 --cpu-offload --activation-checkpointing"),
        ("minifsdp", 2, "--micro-batch 2 --no-sync --no-reshard-after-forward"),
    ],
)
def test_the_loss_is_a_mean_over_all_targets_however_the_batch_is_cut(
    engine: str, ranks: int, flags: str, trained: Callable[..., Run]
) -> None:
    reference, other = trained("minifsdp", 2), trained(engine, ranks, *flags.split())
    assert other.losses == pytest.approx(reference.losses, rel=1e-5)
    assert other.summary["eval_loss"] == pytest.approx(reference.summary["eval_loss"], rel=1e-5)
    for name, tensor in reference.weights.items():
        torch.testing.assert_close(other.weights[name], tensor, rtol=0, atol=2e-4, msg=name)


def test_bfloat16_computes_otherwise_but_keeps_float32_weights(trained: Callable[..., Run]) -> None:
    exact, rounded = trained("minifsdp", 2), trained("minifsdp", 2, "--bf16")
    assert rounded.losses != exact.losses
    assert rounded.losses == pytest.approx(exact.losses, rel=0.05)
    weight = rounded.weights["model.embed_tokens.weight"]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())


@pytest.mark.parametrize("engine", ["minifsdp", "ddp", "fsdp1"])
def test_a_resumed_run_goes_on_bit_for_bit(
    engine: str, trained: Callable[..., Run], run_ranks: Callable[..., list], tmp_path: Path
) -> None:
    behind = ["--async-checkpoint"] if engine == "minifsdp" else []
    whole, halted = trained(engine, 2), trained(engine, 2, "--stop-at", "3", *behind)
    assert not (halted.out / "summary.json").exists()
    assert halted.losses == whole.losses[:3]
    resumed = Run(tmp_path / "run")
    shutil.copytree(halted.out, resumed.out)
    run_ranks(2, train_in_pool, resumed.out, ["--resume"])  # its flags are in the folder
    assert resumed.losses == whole.losses
    for name, tensor in whole.weights.items():
        assert torch.equal(resumed.weights[name], tensor), name
    assert resumed.summary["train_loss_first"] == whole.losses[0]


def test_a_run_of_two_ranks_is_resumed_by_one_process_on_another_engine(
    trained: Callable[..., Run], tmp_path: Path
) -> None:
    whole = trained("minifsdp", 2, "--save-every", "2", "--eval-every", "2")
    kept = sorted(path.name for path in (whole.out / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000004", "step-00000006"]
    out = tmp_path / "run"
    shutil.copytree(whole.out, out)
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    resumed = launch(out, 1, "--resume", "--engine", "none", "--bf16", code=2)
    assert "--bf16 cannot be honoured by --engine none" in resumed.stderr
    resumed = launch(out, 1, "--resume", "--engine", "none")
    assert resumed.losses[:4] == whole.losses[:4]
    assert resumed.losses[4:] == pytest.approx(whole.losses[4:], rel=1e-5)
    assert [line["step"] for line in evaluations(resumed)] == [0, 2, 4, 6]
    assert resumed.summary["engine"] == "none"


def test_a_checkpoint_of_another_shape_is_refused_and_the_run_left_alone(
    trained: Callable[..., Run], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(trained("none", 1, "--stop-at", "3").out, out)
    recorded = json.loads((out / "config.json").read_text())
    recorded["arguments"]["ffn"] = 96
    (out / "config.json").write_text(json.dumps(recorded))
    before = (out / "metrics.jsonl").read_text()
    refused = launch(out, 1, "--resume", code=2)
    assert "feed_forward.w1.weight" in refused.stderr and "(96, 32) here" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert (out / "metrics.jsonl").read_text() == before


def test_fine_tuning_starts_from_the_weights_of_an_export(
    trained: Callable[..., Run], data: list[str], run_ranks: Callable[..., list], tmp_path: Path
) -> None:
    first, again = trained("minifsdp", 2), Run(tmp_path / "run")
    flags = [*data[:4], "--model", str(first.out / "export"), "--steps", "1", "--lr", "0"]
    run_ranks(1, train_in_pool, again.out, [*flags, "--export-dtype", "bfloat16"])
    before, after = (line["eval_loss"] for line in evaluations(again))
    assert before == pytest.approx(first.summary["eval_loss"], rel=1e-5)
    assert after == before
    for name, tensor in first.weights.items():
        assert torch.equal(again.weights[name], tensor.bfloat16()), name


def evaluations(run: Run) -> list[dict]:
    return [line for line in read_metrics(run.out / "metrics.jsonl") if "eval_loss" in line]


def test_metrics_of_a_resumed_run_hold_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    for step in (1, 2, 3):
        metrics.write(step, loss=0.5)
        metrics.write(step, eval_loss=0.5)
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    Metrics(path, step=2).write(2, eval_loss=0.25)
    assert read_metrics(path) == [
        {"step": 1, "loss": 0.5},
        {"step": 1, "eval_loss": 0.5},
        {"step": 2, "loss": 0.5},
        {"step": 2, "eval_loss": 0.25},
    ]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_finished_run_is_left_alone_and_only_what_it_lacks_is_made(
    trained: Callable[..., Run], run_ranks: Callable[..., list], tmp_path: Path
) -> None:
    whole, run = trained("minifsdp", 2), Run(tmp_path / "run")
    shutil.copytree(whole.out, run.out)
    before = files_of(run.out)
    refused = launch(run.out, 1, "--resume", code=2)
    assert f"{run.out} is finished (6 of 6 steps): give a larger --steps" in refused.stderr
    assert files_of(run.out) == before
    shutil.rmtree(run.out / "export")
    run_ranks(1, train_in_pool, run.out, ["--resume"])
    assert files_of(run.out) == before
    (run.out / "summary.json").unlink()
    run_ranks(1, train_in_pool, run.out, ["--resume"])
    unmeasured = dict.fromkeys(("tokens_per_second", "seconds", "peak_bytes"))
    kept = {key: whole.summary[key] for key in ("train_loss_first", "world_size", "engine")}
    assert run.summary.items() >= (unmeasured | kept).items()
    assert (run.out / "config.json").read_bytes() == before["config.json"]


def test_a_finished_run_trains_on_and_may_have_lost_its_metrics(
    trained: Callable[..., Run], run_ranks: Callable[..., list], tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    shutil.copytree(trained("none", 1).out, run.out)
    (run.out / "metrics.jsonl").unlink()
    run_ranks(1, train_in_pool, run.out, ["--resume", "--steps", "8", "--save-every", "1"])
    assert len(run.losses) == 2
    assert (run.summary["steps"], run.summary["train_loss_first"]) == (8, None)
    assert run.summary["train_loss_last"] == run.losses[-1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(
    ranks: int, trained: Callable[..., Run], tmp_path: Path
) -> None:
    whole, run = trained("minifsdp", 2, "--save-every", "2"), Run(tmp_path / "run")
    shutil.copytree(whole.out, run.out)
    checkpoints = [run.out / "checkpoints" / f"step-0000000{step}" for step in (6, 4)]
    weights = [next(path.glob("*.distcp")) for path in checkpoints]
    flip_a_byte(weights[0])
    weights[1].unlink()
    (run.out / "summary.json").unlink()
    resumed = launch(run.out, ranks, "--resume")
    for path, reason in zip(checkpoints, ("the bytes of", weights[1].name), strict=True):
        line = f"train.py: checkpoint {path} is damaged ({reason}"
        assert resumed.stderr.count(line) == 1
    assert resumed.stderr.count("): going on from the one before it") == 2
    if ranks == 2:
        assert run.losses == whole.losses
        for name, tensor in whole.weights.items():
            assert torch.equal(run.weights[name], tensor), name
    assert run.losses[:2] == whole.losses[:2]
    assert run.summary["train_loss_first"] == whole.losses[0]


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(
    trained: Callable[..., Run], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(trained("none", 1, "--stop-at", "3").out, out)
    checkpoint = out / "checkpoints" / "step-00000003"
    flip_a_byte(checkpoint / "values.json")
    refused = launch(out, 1, "--resume", code=2)
    assert f"train.py: error: checkpoint {checkpoint} is damaged" in refused.stderr
    assert f'File "{TRAIN}"' not in refused.stderr


def test_other_data_than_the_run_began_with_is_refused(
    trained: Callable[..., Run], data: list[str], tmp_path: Path
) -> None:
    out, path = tmp_path / "run", tmp_path / "dialogs.jsonl"
    shutil.copytree(trained("none", 1, "--stop-at", "3").out, out)
    path.write_text("".join(Path(data[1]).read_text().splitlines(keepends=True)[:9]))
    recorded = json.loads((out / "config.json").read_text())
    recorded["arguments"]["data"] = [str(path)]
    (out / "config.json").write_text(json.dumps(recorded))
    refused = launch(out, 1, "--resume", code=2)
    assert "is of another run (data: examples was 10 and is now 9)" in refused.stderr


@pytest.mark.parametrize(("first", "then"), [(2, 3), (4, 2), (1, 4)])
def test_a_run_goes_on_on_another_number_of_ranks_in_the_same_order(
    first: int, then: int, data: list[str], run_ranks: Callable[..., list], tmp_path: Path
) -> None:
    flags = [*data, *MODEL, *STEPS, "--batch-size", "12"]
    whole, run = Run(tmp_path / "whole"), Run(tmp_path / "run")
    run_ranks(first, train_in_pool, whole.out, flags)
    run_ranks(first, train_in_pool, run.out, [*flags, "--stop-at", "3"])
    run_ranks(then, train_in_pool, run.out, ["--resume"])
    assert run.losses[:3] == whole.losses[:3]
    assert run.losses[3:] == pytest.approx(whole.losses[3:], rel=1e-5)
    tokens = [[line["tokens"] for line in steps(r)] for r in (run, whole)]
    assert tokens[0] == tokens[1]


def steps(run: Run) -> list[dict]:
    return [line for line in read_metrics(run.out / "metrics.jsonl") if "loss" in line]


def test_every_number_of_ranks_shares_out_the_same_rows_in_the_same_order() -> None:
    examples = [Example([i, i + 1, i + 2], [0, 1, 1]) for i in range(17)]
    for step in range(4):
        orders = []
        for size in (1, 2, 3, 4):
            parts = [Batches(examples, 12, 0, 0, rank, size).batch(step) for rank in range(size)]
            rows = torch.stack([part.tokens for part in parts], dim=1).flatten(0, 1)
            orders.append(rows[:, 0].tolist())
        assert orders[0] == orders[1] == orders[2] == orders[3]


def test_only_the_last_checkpoints_are_kept_if_so_asked(
    run_ranks: Callable[..., list], data: list[str], tmp_path: Path
) -> None:
    flags = [*data, *MODEL, *STEPS, "--checkpoint-every", "1", "--keep-last", "3"]
    run_ranks(1, train_in_pool, tmp_path / "run", flags)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000005", "step-00000006"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_not_finite_ends_all_ranks_with_one_message(
    ranks: int, data: list[str], tmp_path: Path
) -> None:
    flags = [*data, *MODEL, *STEPS, "--lr", "1e30", "--clip", "0"]
    run = launch(tmp_path / "run", ranks, *flags, code=1)
    assert run.stderr.count("is left out: loss ") == 2
    assert run.stderr.count("train.py: error: step 4: loss ") == 1
    assert f'File "{TRAIN}"' not in run.stderr

"""What fine-tuning with train.py offers beyond its loop, in small runs."""

import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from safetensors.torch import load_file
from test_train import MODEL, STEPS, TRAIN, Run, launch, load_train, train_in_pool, write_dialogs
from torch.distributed.checkpoint import FileSystemReader

from llama.finetune.metrics import read_metrics
from llama.finetune.tasks import TOKENIZER_PATH
from minifsdp import checkpoint

FEW = ["--batch-size", "4", "--lr", "0.01", "--seq-len", "64"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_dialogs(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def base(
    data: list[str], run_ranks: Callable[..., list], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """A small trained model."""
    run = Run(tmp_path_factory.mktemp("base") / "run")
    run_ranks(1, train_in_pool, run.out, [*data, *MODEL, *STEPS])
    return run


def steps_of(run: Run) -> list[dict]:
    return [line for line in read_metrics(run.out / "metrics.jsonl") if "loss" in line]


def evaluations_of(run: Run) -> list[dict]:
    return [line for line in read_metrics(run.out / "metrics.jsonl") if "eval_loss" in line]


# ---- Data -----------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["--packing", "--no-packing"])
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(2, ["--micro-batch", "1"]), (2, ["--micro-batch", "1", "--no-sync"]), (4, [])],
)
def test_a_step_s_loss_is_one_process_s_however_it_is_packed_shared_and_accumulated(
    ranks: int,
    flags: list[str],
    packing: str,
    data: list[str],
    run_ranks: Callable[..., list],
    tmp_path: Path,
) -> None:
    alone, shared = Run(tmp_path / "alone"), Run(tmp_path / "shared")
    everything = [*data, *MODEL, *FEW, "--steps", "3", packing]
    run_ranks(1, train_in_pool, alone.out, everything)
    run_ranks(ranks, train_in_pool, shared.out, [*everything, *flags])
    assert shared.losses == pytest.approx(alone.losses, rel=1e-6)
    tokens = [[line["tokens"] for line in steps_of(run)] for run in (alone, shared)]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("packing", ["--packing", "--no-packing"])
def test_an_epoch_has_every_document_once_though_the_last_step_is_short(
    packing: str, data: list[str], run_ranks: Callable[..., list], tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    run_ranks(2, train_in_pool, run.out, [*data, *MODEL, *FEW, "--epochs", "2", packing])
    train = load_train()
    flags = [*data, *MODEL, *FEW, "--out", str(tmp_path / "other")]
    args = train.read_flags(flags, 1, train.steps_saved)
    job = train.prepare(args, 0, 1, train.steps_saved)
    positions = sum(max(1, len(example.ids) - 1) for example in job.inputs.examples)
    assert sum(line["tokens"] for line in steps_of(run)) == 2 * positions


def test_lines_that_cannot_be_used_are_skipped_and_counted_if_so_asked(
    data: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(Path(data[1]).read_text() + '{"messages": []}\nnonsense\n')
    flags = ["--data", str(path), "--tokenizer", str(TOKENIZER_PATH), *MODEL, *FEW, "--steps", "1"]
    refused = launch(tmp_path / "run", 1, *flags, code=2)
    assert f"{path}:11: " in refused.stderr and "refused after it: 1" in refused.stderr
    run = launch(tmp_path / "run", 1, *flags, "--on-bad-line", "skip")
    assert run.summary["lines_refused"] == 2
    assert f"{path}:12: malformed JSON" in run.stderr


def test_samples_are_shown_with_what_is_learnt_and_nothing_is_built(
    data: list[str], tmp_path: Path
) -> None:
    run = launch(tmp_path / "run", 2, *data, "--preset", "70b", "--show-sample", "2")
    assert run.stdout.count("learnt | ") >= 2 and run.stdout.count("given  | ") >= 2
    assert not run.out.exists()


# ---- The run --------------------------------------------------------------------------------


def test_an_unfit_step_is_left_out_said_and_counted(
    data: list[str], run_ranks: Callable[..., list], tmp_path: Path, base: Run
) -> None:
    """A warm-up so steep that the loss soon spikes; what is left out changes no weight."""
    flags = [*data, *MODEL, *FEW, "--steps", "30", "--lr", "1.0", "--warmup", "0.9", "--spike"]
    run = launch(tmp_path / "run", 2, *flags, "1.1", "--skip-bad-steps", "30", "--clip", "0")
    skipped = [line for line in steps_of(run) if "skipped" in line]
    assert skipped and all("is a spike" in line["skipped"] for line in skipped)
    assert run.stderr.count("is left out") == len(skipped) == run.summary["steps_skipped"]


def test_the_best_weights_are_kept_and_exported(
    data: list[str], run_ranks: Callable[..., list], tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    flags = [*data, *MODEL, *FEW, "--steps", "4", "--eval-every", "1", "--save-every", "1"]
    given = [9.0, 5.0, 1.0, math.nan, 2.0]  # at step 0, 1, ...
    run_ranks(2, train_with_evaluations, run.out, [*flags, "--export-best"], given)
    best = 2
    (kept,) = (run.out / "best").iterdir()
    assert checkpoint.step_of(kept) == best
    weight = "tok_embeddings.weight"
    rows = {weight: torch.empty_like(run.weights["model.embed_tokens.weight"])}
    state = load_weights(run.out / "checkpoints" / kept.name, rows)
    assert torch.equal(run.weights["model.embed_tokens.weight"], state[weight])


def load_weights(folder: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Some of the weights in a checkpoint, whole."""
    import torch.distributed.checkpoint as dcp

    state = {"model": like}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state["model"]


def test_resume_auto_begins_goes_on_and_is_content_with_a_finished_run(
    data: list[str], run_ranks: Callable[..., list], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    whole, run = Run(tmp_path / "whole"), Run(tmp_path / "run")
    flags = [*data, *MODEL, *FEW, "--steps", "4"]
    run_ranks(1, train_in_pool, whole.out, flags)
    run_ranks(1, train_in_pool, run.out, [*flags, "--stop-at", "2", "--resume", "auto"])
    run_ranks(1, train_in_pool, run.out, [*flags, "--resume", "auto"])
    assert run.losses == whole.losses
    again = launch(run.out, 1, *flags, "--resume=auto")
    assert f"{run.out} is finished" in again.stdout


def test_a_checkpoint_comes_when_the_minutes_have_gone_by(
    data: list[str], run_ranks: Callable[..., list], tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    flags = [*data, *MODEL, *FEW, "--steps", "5", "--save-minutes", "1e-9"]
    run_ranks(2, train_in_pool, run.out, flags)
    assert len(list((run.out / "checkpoints").iterdir())) == 5


def test_replicas_that_shard_among_themselves_train_as_one_process_does(
    data: list[str], run_ranks: Callable[..., list], tmp_path: Path
) -> None:
    alone, replicas, theirs = (Run(tmp_path / name) for name in ("alone", "replicas", "theirs"))
    flags = [*data, *MODEL, *FEW, "--steps", "3"]
    run_ranks(1, train_in_pool, alone.out, flags)
    run_ranks(4, train_in_pool, replicas.out, [*flags, "--hsdp", "2"])
    run_ranks(4, train_in_pool, theirs.out, [*flags, "--hsdp", "2", "--engine", "fsdp2"])
    assert replicas.losses == theirs.losses
    assert replicas.losses == pytest.approx(alone.losses, rel=1e-6)
    for name, tensor in alone.weights.items():
        torch.testing.assert_close(replicas.weights[name], tensor, rtol=0, atol=2e-4, msg=name)


def test_flags_come_from_a_file_and_the_command_line_wins(
    data: list[str], run_ranks: Callable[..., list], tmp_path: Path
) -> None:
    run, config = Run(tmp_path / "run"), tmp_path / "run.toml"
    config.write_text("[optimisation]\nsteps = 5\nbatch-size = 4\n[memory]\nbf16 = true\n")
    run_ranks(1, train_in_pool, run.out, [*data, *MODEL, "--config", str(config), "--steps", "2"])
    recorded = json.loads((run.out / "config.json").read_text())["arguments"]
    assert (recorded["steps"], recorded["batch_size"], recorded["bf16"]) == (2, 4, True)


def test_a_run_leaves_a_report_with_perplexity_utilisation_and_answers(
    data: list[str], run_ranks: Callable[..., list], tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    flags = ["--steps", "3", "--eval-every", "1", "--sample", "count", "--peak-tflops", "0.1"]
    run_ranks(2, train_in_pool, run.out, [*data, *MODEL, *FEW, *flags])
    for line in evaluations_of(run):
        assert line["eval_perplexity"] == pytest.approx(math.exp(line["eval_loss"]))
    said = [line for line in read_metrics(run.out / "metrics.jsonl") if "answer" in line]
    assert [(line["step"], line["prompt"]) for line in said] == [(s, "count") for s in range(4)]
    assert run.summary["mfu_formula"].startswith("MFU = (6 x ")
    assert all(0 < line["mfu"] < 1 for line in steps_of(run))
    page = (run.out / "report.html").read_text()
    assert "count" in page and "<svg" in page and "http://" not in page.replace("www.w3.org", "")


# ---- Instead of training --------------------------------------------------------------------


def test_a_model_is_evaluated_alone_from_its_folder_its_run_or_its_checkpoint(
    base: Run, data: list[str]
) -> None:
    expected = f"eval_loss: {base.summary['eval_loss']:.4f}"[:-1]  # but for rounding
    folder = ["--model", str(base.out / "export"), *data[2:4]]
    before = sorted(base.out.rglob("*"))
    for flags in (folder, [], ["--resume"]):
        run = launch(base.out, 2, "--eval-only", *flags)
        assert expected in run.stdout
        assert "eval_perplexity: " in run.stdout
    assert sorted(base.out.rglob("*")) == before


def test_sharded_ranks_answer_prompts_and_chat_lines(base: Run, capfd) -> None:
    asked = launch(base.out, 2, "--chat", "--sample", "count count", "count", "count count count")
    assert len(asked.stdout.splitlines()) == 3
    assert (
        asked.stdout
        == launch(
            base.out, 1, "--chat", "--sample", "count count", "count", "count count count"
        ).stdout
    )


def chat_in_pool(out: Path, flags: list[str], lines: str) -> str:
    """What `train.py --chat` writes on this rank, rank 0 being given `lines`."""
    sys.stdin, written = io.StringIO(lines), io.StringIO()
    stdout, sys.stdout = sys.stdout, written
    try:
        train_in_pool(out, flags)
    finally:
        sys.stdin, sys.stdout = sys.__stdin__, stdout
    return written.getvalue()


def test_a_chat_on_two_ranks_says_what_one_process_says(
    base: Run, run_ranks: Callable[..., list]
) -> None:
    lines = "count\ncount count\n"
    flags = ["--chat", "--max-new-tokens", "8"]
    (alone,) = run_ranks(1, chat_in_pool, base.out, flags, lines)
    shared = run_ranks(2, chat_in_pool, base.out, flags, lines)
    assert shared == [alone, ""]
    assert len(alone.splitlines()) == 2


# ---- LoRA -----------------------------------------------------------------------------------


def test_adapters_are_trained_resumed_kept_alone_and_merged(
    base: Run, data: list[str], run_ranks: Callable[..., list], tmp_path: Path
) -> None:
    lora = ["--model", str(base.out / "export"), "--lora-rank", "4", "--lora-dropout", "0.1"]
    flags = [*data, *lora, *FEW, "--steps", "4", "--activation-checkpointing"]
    whole, run = Run(tmp_path / "whole"), Run(tmp_path / "run")
    run_ranks(2, train_in_pool, whole.out, flags)
    run_ranks(2, train_in_pool, run.out, [*flags, "--stop-at", "2"])
    (saved,) = (run.out / "checkpoints").iterdir()
    kept = FileSystemReader(saved).read_metadata().state_dict_metadata.keys()
    assert kept and all("lora_" in name for name in kept if not name.startswith("rng"))
    run_ranks(2, train_in_pool, run.out, ["--resume"])
    assert run.losses == whole.losses
    adapters = [load_file(r.out / "adapter" / "adapter_model.safetensors") for r in (whole, run)]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    config = json.loads((run.out / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base.out / "export")
    name = "model.layers.0.self_attn.q_proj"
    delta = run.weights[f"{name}.weight"] - base.weights[f"{name}.weight"]
    a, b = (adapters[1][f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    torch.testing.assert_close(delta, 2 * b @ a, rtol=0, atol=1e-6)
    frozen = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(run.weights[frozen], base.weights[frozen])
    assert run.summary["eval_loss"] < evaluations_of(run)[0]["eval_loss"]


# ---- What stops in the middle ---------------------------------------------------------------


def die_in_pool(out: Path, flags: list[str], step: int, phase: str) -> None:
    """Run until the watchdog is told of that phase, and raise there."""
    train = load_train()

    class Stopped(Exception):
        pass

    class Watchdog(train.Watchdog):
        def at(self, at_step, at_phase, patience_seconds=None):
            if (at_step, at_phase) == (step, phase):
                raise Stopped

    train.Watchdog = Watchdog
    sys.argv[1:] = ["--device", "cpu", "--hang-timeout", "0", "--out", str(out), *flags]
    with pytest.raises(Stopped):
        train.do(0.0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_best_weights_are_found_though_the_run_ended_before_it_evaluated_them(
    ranks: int, data: list[str], run_ranks: Callable[..., list], tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    flags = [*data, *MODEL, *FEW, "--steps", "4", "--eval-every", "2", "--save-every", "2"]
    run_ranks(ranks, die_in_pool, run.out, [*flags, "--export-best"], 4, "evaluating")
    assert (run.out / "report.html").exists()
    run_ranks(ranks, train_in_pool, run.out, ["--resume"])
    losses = {line["step"]: line["eval_loss"] for line in evaluations_of(run) if line["step"]}
    (kept,) = (run.out / "best").iterdir()
    assert checkpoint.step_of(kept) == min(losses, key=losses.get)
    assert run.weights


def test_the_last_weights_go_out_where_no_evaluation_was_finite(
    data: list[str], run_ranks: Callable[..., list], tmp_path: Path, monkeypatch
) -> None:
    run = Run(tmp_path / "run")
    flags = [*data, *MODEL, *FEW, "--steps", "2", "--export-best"]
    run_ranks(1, train_with_evaluations, run.out, flags, [math.nan] * 2)
    assert run.weights and not (run.out / "best").exists()


def train_with_evaluations(out: Path, flags: list[str], losses: list[float]) -> None:
    """Train on this rank of the pool, with evaluations that are made up."""
    train, given = load_train(), iter(losses)
    train.eval_loss = lambda model, job: next(given)
    sys.argv[1:] = ["--device", "cpu", "--hang-timeout", "0", "--out", str(out), *flags]
    train.do(0.0)


STUCK = """
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("train", {path!r})
train = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train)
original, calls = train.{function}, []

def stuck(*args, **kwargs):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == {call}:
        time.sleep(1000)
    return original(*args, **kwargs)

train.{function} = stuck
train.main()
"""


@pytest.mark.parametrize(
    ("engine", "function", "call", "where"),
    [
        ("ddp", "summed_loss", 3, "step 3, forward"),
        ("minifsdp", "clip", 2, "step 2, clipping"),
        ("fsdp2", "eval_loss", 2, "step 4, evaluating"),
    ],
)
def test_a_rank_that_is_stuck_is_named_with_step_phase_and_stack_and_all_end(
    engine: str, function: str, call: int, where: str, data: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(STUCK.format(path=str(TRAIN), function=function, call=call))
    flags = [*data, *MODEL, *FEW, "--steps", "4", "--hang-timeout", "3", "--engine", engine]
    command = [str(script), "--device", "cpu", "--out", str(tmp_path / "run"), *flags]
    ended = warm_python.shared().run(command, tmp_path, ranks=2, timeout_seconds=90)
    assert ended.code not in (0, 124)
    assert f"watchdog: rank 1 has not arrived: for 3 s at {where}" in ended.output.replace(
        "for 4 s", "for 3 s"
    )
    assert "time.sleep(1000)" in ended.output


# ---- Planning -------------------------------------------------------------------------------


def plan(capsys: pytest.CaptureFixture, *flags: str) -> tuple[int | str, str]:
    """How train.py ended, here and not in a process of its own, and what it wrote."""
    sys.argv[1:] = ["--device", "cpu", *flags]
    with pytest.raises(SystemExit) as ending:
        load_train().main()
    return ending.value.code, "".join(capsys.readouterr())


def test_a_run_is_planned_without_data_and_told_what_would_make_it_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    shape = ["--dim", "64", "--layers", "2", "--heads", "4", "--ffn", "128", "--seq-len", "64"]
    flags = ["--plan", "--world-size", "4", *shape, "--batch-size", "16", "--steps", "10"]
    written = ["--json", "plan.json", "--page", "plan.html"]
    code, told = plan(capsys, *flags, "--gpu", "A100-80", "--price", "2", *written)
    assert (code, "fits: at most" in told, "10 steps: " in told) == (0, True, True)
    report = json.loads(Path("plan.json").read_text())
    blocks = 4  # embedding, two blocks, head; the root has but a norm
    assert report["messages"]["reduce_scatter"]["count"] == blocks + 1
    assert "<svg" in Path("plan.html").read_text()
    large = ["--dim", "256", "--ffn", "1024", "--max-seq-len", "1000", "--seq-len", "1000"]
    large += ["--batch-size", "8", "--layers", "1"]
    code, told = plan(capsys, *flags, *large, "--gpu", "1.6")
    assert code == 1
    assert "DOES NOT FIT" in told and "--activation-checkpointing" in told
    assert "8 GPUs" in told and "--batch-size" not in told  # the same batch
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--nodes", "3"], "error: nodes 3 (--nodes) cannot share 4 ranks evenly"),
        (["--nodes", "no"], "error: argument --nodes: must be a whole number"),
        (["--price", "2"], "give steps (--steps) too"),
        (["--engine", "fsdp2"], "--plan is of --engine minifsdp alone: drop --engine fsdp2"),
        (["--resume"], "--plan is of a run from its first step: drop --resume"),
        (["--config", "70b-16x80gb"], "or, of another model, give --preset, such as 70b, or --mod"),
        (["--config", "70b-lora-8x80gb"], "give --preset, such as 70b, or --model"),
        (["--page", "nowhere/plan.html"], "--page nowhere/plan.html"),
    ],
)
def test_what_cannot_be_planned_ends_with_2_and_is_told_in_a_line(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, flags: list[str], told: str
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    code, written = plan(capsys, "--plan", "--world-size", "4", "--gpu", "24", *flags)
    assert code == 2
    assert told in written and written.count("\n") == 1


def test_a_crash_of_a_plan_is_not_taken_for_a_run_that_does_not_fit(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any, **__: Any) -> None:
        raise KeyError("planted")

    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setattr("minifsdp.plan.plan", crash)
    code, written = plan(capsys, "--plan", "--world-size", "4", "--gpu", "24")
    assert code == 2 and "Traceback" in written and "planted" in written


def test_a_plan_reads_no_data_and_says_so(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    flags = ["--world-size", "2", "--gpu", "24", "--preset", "tiny", "--layers", "1"]
    code, written = plan(capsys, "--plan", *flags, "--data", "nowhere.jsonl", "--batch-size", "4")
    assert code == 0
    assert "assumed: 1 x 2 rows of 256 tokens" in written and "nothing of --data" in written
    assert "(timed as an A100-80)" in written


def test_a_file_of_flags_may_ask_for_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process without a group of ranks: a plan has a world of its own."""
    monkeypatch.setattr("sys.argv", ["train.py"])
    config = tmp_path / "run.toml"
    config.write_text("plan = true\ngpu = 80\n")
    told = "train.py: error: --plan needs --world-size, how many ranks, and --gpu, a name or GB\n"
    assert plan(capsys, "--config", str(config)) == (2, told)

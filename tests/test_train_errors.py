"""Bad input to train.py: refused by name, with the remedy, before anything is built."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_train import TRAIN, launch, load_train

from llama.finetune.flags import build_parser
from llama.finetune.job import Job, prepare, read_flags
from llama.finetune.tasks import TOKENIZER_PATH
from minifsdp import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process
GOOD = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}\n'


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("llama.finetune.inputs.TASK_EXAMPLES", 1000)  # what they are is no matter
    (tmp_path / "good.jsonl").write_text(GOOD * 2)
    (tmp_path / "roles.jsonl").write_text(GOOD + GOOD.replace("assistant", "robot"))
    (tmp_path / "broken.jsonl").write_text(GOOD + GOOD + '{"messages": [\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.model").write_text("no model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "summary.json").write_text("{}")
    (tmp_path / "full" / "config.json").write_text('{"arguments": {}, "model": {}}')
    (tmp_path / "full" / "export").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "llama"}')
    for name in ("halted", "done"):
        (tmp_path / name).mkdir()
        about = {"arguments": vars(build_parser().parse_args(["--steps", "6"])), "model": {}}
        (tmp_path / name / "config.json").write_text(json.dumps(about))
    pretend_checkpoint(tmp_path / "done", 3)
    (tmp_path / "done" / "metrics.jsonl").write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("")
    return tmp_path


def pretend_checkpoint(out: Path, step: int) -> None:
    checkpoint.save(out / "checkpoints", step, {"step": step})


def checked(flags: str | list[str], world_size: int = 1) -> Job:
    flags = flags.split() if isinstance(flags, str) else flags
    steps_saved = load_train().steps_saved
    args = read_flags(["--device", "cpu", *flags], world_size, steps_saved)
    return prepare(args, 0, world_size, steps_saved)


def files_in(folder: Path) -> list[Path]:
    """All but what is kept of tokenised files."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and ".tokens" not in p.parts)


DATA = f"--tokenizer {TOKENIZER_PATH} --data"
REFUSED = {
    "malformed JSON": (f"{DATA} good.jsonl broken.jsonl", r"broken\.jsonl:3: "),
    "unknown role": (f"{DATA} roles.jsonl", r"roles\.jsonl:2: .*robot"),
    "empty file": (f"{DATA} empty.jsonl", r"empty\.jsonl"),
    "empty evaluation file": (f"{DATA} good.jsonl --eval-data empty.jsonl", r"empty\.jsonl"),
    "missing data": (f"{DATA} absent.jsonl", r"absent\.jsonl"),
    "missing tokenizer": ("--tokenizer absent.model", r"absent\.model"),
    "no tokenizer model": ("--tokenizer blank.model", r"blank\.model"),
    "data without tokenizer": ("--data good.jsonl", "--tokenizer"),
    "missing model": ("--model absent", r"absent"),
    "vocabulary too small": ("--vocab 100", r"366 pieces.*vocabulary of 100.*--vocab"),
    "sequence too long": ("--seq-len 300", r"--seq-len 300 .* 256 tokens"),
    "example too long": (f"{DATA} good.jsonl --seq-len 4", r"good\.jsonl:1: .*--seq-len"),
    "sample too long": ("--max-seq-len 8 --seq-len 8 --sample whoever", r"--sample .* 8 tokens"),
    "sample with a tag": ("--sample [INST]", r"--sample .*\[INST\]"),
    "micro-batch": ("--batch-size 8 --micro-batch 3", r"--batch-size 8 .*--micro-batch 3"),
    "heads": ("--dim 100 --heads 3", r"100.*3"),
    "unknown flag": ("--frobnicate", "--frobnicate"),
    "abbreviated flag": ("--step 5", "--step"),
    "no number": ("--steps ten", "--steps"),
    "no step": ("--steps 0", "--steps"),
    "negative rate": ("--lr=-1", "--lr"),
    "rate at the end": ("--lr 0.1 --min-lr 0.2", "--min-lr"),
    "all warm-up": ("--warmup 1", "--warmup"),
    "unknown engine": ("--engine zero", "zero"),
    "steps and epochs": (f"{DATA} good.jsonl --steps 2 --epochs 2", "--steps and --epochs"),
    "epochs of tasks": ("--epochs 2", "--epochs goes with --data"),
    "evaluation alone": ("--eval-data good.jsonl", "--eval-data goes with --data"),
    "shape beside a model": ("--model full --dim 8", "drop --dim"),
    "folder in use": ("--out full", r"full exists.*--resume.*--overwrite"),
    "folder of something else": ("--out foreign --overwrite", "foreign holds something else"),
    "folder of a model": ("--out other --overwrite", "other holds something else"),
    "model to be replaced": ("--model other --out other --overwrite", "other is --model other"),
    "run inside the model": ("--model other --out other/run", "other/run is --model other, or in"),
    "export of the run": ("--model full/export --out full --overwrite", "full/export, which this"),
    "missing model beside a run": ("--model absent --out full", "--model absent: no such folder"),
    "run as a model": ("--model full", "--model full is a run folder: its model is full/export$"),
    "run without its export": ("--model halted", "halted/export, once it has finished"),
    "tokenizer that is a folder": ("--tokenizer foreign", "--tokenizer foreign is a folder"),
    "seed too large": (
        f"--seed {2**64}",
        r"--seed: must be .* from -2\*\*63 to 2\*\*64 - 1, not 18",
    ),
    "blank sample": (["--sample", ""], "--sample '': .*blank"),
    "evaluating nothing": (f"{DATA} good.jsonl --eval-every 2", "--eval-every needs --eval-data"),
    "run that has no checkpoint": (
        "--out halted --resume",
        "halted was stopped before its first checkpoint: .*--overwrite.*--save-every STEPS",
    ),
    "fewer steps than done": ("--out done --resume --steps 2", "done 3 steps, more than the 2"),
    "stop before what is done": ("--out done --resume --stop-at 3", "--stop-at 3: done has done 3"),
    "damaged metrics": ("--out done --resume", r"done/metrics\.jsonl:2: damaged"),
    "folder that is a file": ("--out good.jsonl", "is a file"),
    "input to be deleted": (f"{DATA} full/x.jsonl --out full --overwrite", r"full/x\.jsonl"),
    "resume and overwrite": ("--resume --overwrite", "--resume .*--overwrite"),
    "resume nothing": ("--out new --resume", r"new/config\.json is missing"),
    "resume something damaged": ("--out other --resume", r"other/config\.json"),
    "offload without shards": ("--engine ddp --cpu-offload", "--cpu-offload .*--engine ddp"),
    "bf16 without shards": ("--engine none --bf16", "--bf16 .*--engine none.*minifsdp"),
    "resharding without shards": ("--engine ddp --reshard-after-forward", "--reshard-after-for"),
    "syncing alone": ("--engine none --no-sync", "--no-sync .*--engine none"),
    "trace of another engine": ("--engine fsdp2 --trace 2", "--trace .*--engine fsdp2.*minifsdp"),
    "trace of nothing": ("--trace 0", "--trace: must be a number of steps, .*5-8, not 0"),
    "trace backwards": ("--trace 5-4", "--trace: must be .* not 5-4"),
    "trace of no training": ("--show-sample 1 --trace 2", "--show-sample .* nothing to --trace"),
    "longer trace than the run": (
        "--steps 6 --trace 5",
        "--trace 5: .* steps 1 to 6, the first 2 to warm up: trace at most 4, or raise --steps",
    ),
    "trace of more than warm-up": ("--steps 2 --trace 1", "--trace 1: .* raise --steps"),
    "trace after the run": ("--steps 9 --stop-at 6 --trace 6-7", "--trace 6-7: .* steps 1 to 6: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_by_name_and_leaves_nothing(case: str, in_tmp: Path) -> None:
    flags, message = REFUSED[case]
    before = files_in(in_tmp)
    with pytest.raises((ValueError, OSError), match=message):
        checked(flags)
    assert files_in(in_tmp) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--batch-size 9", r"--batch-size 9 .* 2: use .*10"),
        ("--engine none", "--engine none is for one process"),
    ],
)
def test_what_two_ranks_cannot_share_is_refused(flags: str, message: str, in_tmp: Path) -> None:
    with pytest.raises(ValueError, match=message):
        checked(flags, world_size=2)


def test_an_empty_folder_may_be_used_and_a_run_folder_overwritten(in_tmp: Path) -> None:
    (in_tmp / "new").mkdir()
    assert checked("--out new").out == Path("new")
    assert checked("--out full --overwrite").out == Path("full")


def test_a_resumed_run_keeps_its_flags_but_for_those_given_anew(in_tmp: Path) -> None:
    job = checked("--out new --batch-size 8 --steps 40 --lr 0.01 --tie-embeddings")
    Path("new").mkdir()
    Path("new/config.json").write_text(json.dumps({"arguments": vars(job.args), "model": {}}))
    pretend_checkpoint(Path("new"), 3)
    again = checked("--out new --resume --steps 50")
    assert vars(again.args) == vars(job.args) | {"resume": "last", "steps": 50}
    assert again.config == job.config
    with pytest.raises(ValueError, match="--seed 1 differs from 0"):
        checked("--out new --resume --seed 1")


@pytest.mark.parametrize(
    ("first", "then", "steps"),
    [("--epochs 2", "--steps 9", 9), ("--steps 9", "--epochs 8", 16), ("--epochs 2", "", 4)],
)
def test_a_resumed_run_may_change_how_its_length_is_given(
    first: str, then: str, steps: int, in_tmp: Path
) -> None:
    job = checked(f"{DATA} good.jsonl --no-packing --batch-size 1 --out new {first}")
    Path("new").mkdir()
    Path("new/config.json").write_text(json.dumps({"arguments": vars(job.args), "model": {}}))
    pretend_checkpoint(Path("new"), 3)
    assert checked(f"--out new --resume {then}").steps == steps


def begun(folder: str, launch: str | None) -> None:
    content = json.loads(Path(folder, "config.json").read_text())
    Path(folder, "config.json").write_text(json.dumps(content | {"launch": launch}))


def test_what_torchrun_starts_once_more_goes_on_by_itself(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (in_tmp / "done" / "metrics.jsonl").unlink()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launch")
    for folder, resumed in (("done", True), ("halted", False)):
        begun(folder, "launch")
        for flags in ("", "--overwrite", "--resume", "--trace 9"):  # few steps may be left
            args = checked(f"--out {folder} --steps 6 {flags}").args
            assert (bool(args.resume), args.overwrite) == (resumed, not resumed)


@pytest.mark.parametrize(("restarts", "launch"), [("1", "another"), ("1", None), ("0", "launch")])
def test_a_run_that_another_launch_began_is_left_alone(
    restarts: str, launch: str | None, in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a second try after the first was refused."""
    begun("done", launch)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launch")
    with pytest.raises(ValueError, match=r"done exists.*--resume.*--overwrite"):
        checked("--out done --steps 6")


def test_a_run_that_the_disk_cannot_hold_is_refused_with_the_figures(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "--dim 32 --layers 1 --heads 2 --ffn 8 --out new --steps 999 --save-every 1"
    parameters = checked(flags).config.num_parameters
    needed = parameters * (3 * 12 + 4)  # two checkpoints and the next, and the export
    free = SimpleNamespace(free=needed)
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    checked(f"{flags} --keep-last 2")
    figures = rf"needs {parameters * (999 * 12 + 4):,} bytes .* {needed:,} are free"
    with pytest.raises(ValueError, match=rf"new {figures}.*--keep-last"):
        checked(flags)


def test_query_heads_alone_set_the_key_heads_too(in_tmp: Path) -> None:
    assert checked("--heads 2").config.n_kv_heads == 2
    assert checked("--heads 4 --kv-heads 1").config.n_kv_heads == 1


def test_checkpoints_come_often_enough_to_go_on_from(in_tmp: Path) -> None:
    assert checked("--steps 5000").save_every == 500
    assert checked("--steps 200").save_every == 100
    assert checked("--steps 200 --save-every 3").save_every == 3
    assert checked("--steps 200 --checkpoint-every 3").save_every == 3
    assert checked("--steps 200").keep_last == 2
    assert checked("--steps 200 --save-every 3").keep_last is None
    assert checked("--steps 200 --save-every 3 --keep-last 5").keep_last == 5


def test_every_flag_has_help_of_one_line() -> None:
    for action in build_parser()._actions:
        assert action.help, action.dest
        assert len(action.help) <= 80, action.dest


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_refusal_is_one_line_and_ends_every_rank(ranks: int, tmp_path: Path) -> None:
    """Rank 0 alone speaks, nobody hangs, no traceback, no run folder."""
    (tmp_path / "roles.jsonl").write_text(GOOD + GOOD.replace("assistant", "robot"))
    data = ["--data", str(tmp_path / "roles.jsonl"), "--tokenizer", str(TOKENIZER_PATH)]
    refused = launch(tmp_path / "run", ranks, *data, code=2)
    assert refused.stderr.count("train.py: error: ") == 1
    assert "roles.jsonl:2: " in refused.stderr
    assert f'File "{TRAIN}"' not in refused.stderr
    assert files_in(tmp_path) == [tmp_path / "roles.jsonl"]

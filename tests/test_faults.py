"""Real processes come to harm, and training goes on from the last complete checkpoint.

Ranks are killed (SIGKILL) while they train and while they save, disks run full, schedulers ask to
end. What follows must be what follows without: the same losses and the same weights, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from test_train import MODEL, Run, train_in_pool, write_dialogs

from llama.finetune.metrics import read_metrics
from minifsdp import checkpoint
from minifsdp.checkpoint import folder

FAULTY = Path(__file__).with_name("faulty_train.py")
TRAIN = Path(__file__).parents[1] / "train.py"
FEW = ["--batch-size", "8", "--steps", "14", "--save-every", "1", "--keep-last", "2"]
# What a rank may be killed in, and the only rank that it happens to, if there is one.
PHASES = {
    "training": None,
    "writing": None,
    "written": None,
    "before the rename": 0,
    "after the rename": 0,
    "deleting an older one": 0,
    "torn": 0,
    "flipped": 0,
    "random": None,
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*write_dialogs(tmp_path_factory.mktemp("data")), *MODEL, *FEW]


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, flags: list[str], run_ranks: Callable[..., list]
) -> Run:
    run = Run(tmp_path_factory.mktemp("undisturbed") / "run")
    run_ranks(2, train_in_pool, run.out, flags)
    return run


def environment(**more: str) -> dict[str, str]:
    """That of a shell in which nothing runs."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TRAIN.parent)} | more


def torchrun(script: Path, restarts: int, *flags: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node=2", f"--max-restarts={restarts}", str(script), *flags]


def run_with_kills(out: Path, flags: list[str], faults: list[dict[str, Any]]) -> list[str]:
    """Train while ranks are killed, torchrun starting them again; the phases they were in."""
    log = out.with_suffix(".log")
    command = torchrun(FAULTY, len(faults), "--device", "cpu", "--out", str(out), *flags)
    variables = environment(FAULTS=json.dumps(faults), FAULT_LOG=str(log))
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=variables)
    assert done.returncode == 0, done.stderr[-5000:]
    return [line.split(",")[0] for line in log.read_text().splitlines()]


def weights_hash(run: Run) -> str:
    exported = run.out / "export" / "model-00001-of-00001.safetensors"
    return hashlib.sha256(exported.read_bytes()).hexdigest()


def assert_as_undisturbed(run: Run, undisturbed: Run) -> None:
    assert weights_hash(run) == weights_hash(undisturbed)
    assert run.losses == undisturbed.losses
    names = sorted(path.name for path in (run.out / "checkpoints").iterdir())
    assert names == ["step-00000013", "step-00000014"]
    assert checkpoint.latest(run.out / "checkpoints", verify=True).name == names[-1]


def test_training_that_is_killed_three_times_ends_with_the_same_weights(
    flags: list[str], undisturbed: Run, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    faults = [
        {"rank": 1, "phase": "training", "step": 3, "delay": 0.005},
        {"rank": 1, "phase": "writing", "step": 6},
        {"rank": 0, "phase": "flipped", "step": 9},
    ]
    phases = run_with_kills(run.out, flags, faults)
    assert phases[1:] == ["writing", "after the rename (flipped)"]
    assert_as_undisturbed(run, undisturbed)


@pytest.mark.slow
def test_twenty_kills_at_all_moments_change_nothing(
    flags: list[str],
    undisturbed: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    draw, counts = random.Random(0), Counter()
    phases = [*PHASES, "random", "random"] * 2
    phases = draw.sample(phases, 20)
    for number in range(5):
        run = Run(tmp_path / f"run-{number}")
        faults = []
        for attempt, phase in enumerate(phases[4 * number : 4 * number + 4]):
            rank = draw.randrange(2) if PHASES[phase] is None else PHASES[phase]
            step = 3 * attempt + draw.choice([3, 4])
            delay = draw.uniform(0, 0.008 if phase == "training" else 0.1)
            faults.append({"rank": rank, "phase": phase, "step": step, "delay": delay})
        behind = ["--async-checkpoint"] if number % 2 else []
        met = run_with_kills(run.out, [*flags, *behind], faults)
        assert len(met) == 4
        counts.update((phase, "behind" if behind else "at once") for phase in met)
        assert_as_undisturbed(run, undisturbed)
    with capsys.disabled():
        print()
        for (phase, how), count in sorted(counts.items()):
            print(f"killed while {phase} (checkpoints written {how}): {count}")


# ---- Asked to end ---------------------------------------------------------------------------


def steps_done(out: Path) -> int:
    metrics = out / "metrics.jsonl"
    return max((line["step"] for line in read_metrics(metrics)), default=0)


def children(pid: int) -> list[int]:
    paths = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in paths.read_text().split()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_asked_to_end_saves_and_exits_with_0(
    ranks: int, flags: list[str], tmp_path: Path
) -> None:
    """By one rank's SIGTERM; then it goes on as if nothing had been."""
    out = tmp_path / "run"
    mine = [
        "--device",
        "cpu",
        "--out",
        str(out),
        *flags,
        "--steps",
        "20000",
        "--save-every",
        "9999",
    ]
    launcher = [sys.executable, str(TRAIN), *mine] if ranks == 1 else torchrun(TRAIN, 0, *mine)
    process = subprocess.Popen(launcher, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        deadline = time.monotonic() + 60
        while steps_done(out) < 5:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(process.pid if ranks == 1 else children(process.pid)[-1], signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    last = checkpoint.latest(out / "checkpoints", verify=True)
    assert checkpoint.step_of(last) == steps_done(out) < 20000
    assert not (out / "export").exists()


# ---- Full disks -----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def state(value: float) -> dict[str, Any]:
    """Some 1.2 MB, most of it of one tensor."""
    return {"small": torch.full((10,), value), "large": torch.full((300_000,), value), "step": 0}


def save_past_the_end(directory: Path, asynchronous: bool) -> list[str]:
    """Save twice where there is room for once, with a look at the free space that sees plenty."""
    checkpoint.save(directory, 1, state(1.0))
    measure, messages = folder.shutil.disk_usage, []
    folder.shutil.disk_usage = lambda path: measure("/")
    try:
        with pytest.raises(checkpoint.SaveError) as error:
            checkpoint.save(directory, 2, state(2.0), asynchronous)
            checkpoint.wait()
        messages.append(str(error.value))
    finally:
        folder.shutil.disk_usage = measure
    with pytest.raises(checkpoint.SaveError) as error:
        checkpoint.save(directory, 2, state(2.0), asynchronous)
    return [*messages, str(error.value)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_runs_full_leaves_the_last_good_checkpoint_alone(
    asynchronous: bool, small_disk: Path, run_ranks: Callable[..., list]
) -> None:
    for in_the_midst, beforehand in run_ranks(2, save_past_the_end, small_disk, asynchronous):
        assert "cannot write checkpoint" in in_the_midst
        assert "No space left on device" in in_the_midst
        assert "cannot prepare checkpoint" in beforehand
        assert "it needs 1,2" in beforehand and "are free in" in beforehand
    assert [path.name for path in small_disk.iterdir()] == ["step-00000001"]
    loaded = state(0.0)
    checkpoint.load(small_disk, loaded)
    assert torch.equal(loaded["large"], torch.ones(300_000))


def test_a_run_whose_disk_runs_full_says_so_and_can_go_on(
    small_disk: Path, flags: list[str], undisturbed: Run
) -> None:
    run = Run(small_disk / "run")
    mine = ["--device", "cpu", "--out", str(run.out), *flags, "--keep-last", "1"]
    fault = [{"rank": 0, "phase": "disk full", "step": 5}]
    variables = {"FAULTS": json.dumps(fault), "FAULT_LOG": os.devnull}
    python, folder = warm_python.shared(), small_disk.parent
    done = python.run([str(FAULTY), *mine], folder, environment=variables)
    assert done.code == 1
    assert done.output.count("train.py: error: cannot prepare checkpoint") == 1
    assert "bytes and 0 are free in" in done.output
    assert "Traceback" not in done.output
    assert [path.name for path in (run.out / "checkpoints").iterdir()] == ["step-00000004"]
    (run.out / "filler").unlink()
    assert python.run([str(TRAIN), "--out", str(run.out), "--resume"], folder).code == 0
    assert run.losses == pytest.approx(undisturbed.losses, rel=1e-5)

"""One run on two hosts of two ranks each, launched as docs/train-70b.md says: what one host gives,
two give as well, also after a rank, or a whole host, was lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from hosts import (
    ROOT,
    Host,
    descendants,
    environment,
    in_namespaces,
    on_loopback,
    steps_done,
    wait_until,
)
from test_train import MODEL, Run, train_in_pool, write_dialogs

from benchmarks.slow_network import Skipped

SCRIPT = ROOT / "docs" / "slurm" / "train-70b.sbatch"
FEW = ["--batch-size", "8", "--steps", "40", "--lr", "0.01", "--seq-len", "64"]
FEW += ["--save-every", "5", "--hang-timeout", "60"]
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
Two = Callable[..., AbstractContextManager[list[Host]]]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*write_dialogs(tmp_path_factory.mktemp("data")), *MODEL, *FEW]


@pytest.fixture(scope="module")
def on_one_host(
    tmp_path_factory: pytest.TempPathFactory, flags: list[str], run_ranks: Callable[..., list]
) -> Callable[..., Run]:
    """The undisturbed run of four ranks on this host, with flags more; once for equal ones."""
    runs: dict[tuple[str, ...], Run] = {}

    def run(*more: str) -> Run:
        if more not in runs:
            runs[more] = Run(tmp_path_factory.mktemp("one-host") / "run")
            run_ranks(4, train_in_pool, runs[more].out, [*flags, *more, "--hang-timeout", "0"])
        return runs[more]

    return run


@pytest.fixture(autouse=True)
def own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the guide has it; a test may take it away."""
    monkeypatch.setenv(OWN_STORE, "1")


@pytest.fixture(params=["loopback", pytest.param("namespaces", marks=pytest.mark.slow)])
def two(request: pytest.FixtureRequest) -> Two:
    return on_loopback if request.param == "loopback" else namespaces_or_skip


@contextlib.contextmanager
def namespaces_or_skip(*about: Any) -> Iterator[list[Host]]:
    """`in_namespaces`, or a reason where the system refuses it."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(in_namespaces(*about))
        except Skipped as why:
            pytest.skip(f"no network namespaces: {why}")
        yield hosts


def assert_ended_as(run: Run, undisturbed: Run, hosts: list[Host]) -> None:
    """All ended with 0 and one export, whose weights and losses are those of the other run."""
    codes = [host.end(90) for host in hosts]
    logs = [host.log.read_text() for host in hosts]
    assert codes == [0, 0], "\n".join(log[-3000:] for log in logs)
    assert sum(log.count("\nexport: ") for log in logs) == 1
    assert weights_hash(run) == weights_hash(undisturbed)
    assert run.losses == undisturbed.losses


def weights_hash(run: Run) -> str:
    (exported,) = (run.out / "export").glob("*.safetensors")
    return hashlib.sha256(exported.read_bytes()).hexdigest()


def peers_in_shared_memory(host: Host) -> bool:
    """Whether a rank of this host has opened mailboxes of others."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in host.ranks.values()]
    return any("/dev/shm/#" in text for text in maps)  # they have no names


@pytest.mark.parametrize("sharing", [pytest.param("all ranks", marks=pytest.mark.slow), "a host"])
def test_two_hosts_train_as_one_host_does(
    sharing: str, two: Two, flags: list[str], on_one_host: Callable[..., Run], tmp_path: Path
) -> None:
    """Bit for bit; hosts that are no more than processes of this one share memory, others do not
    but for ranks of the same host that shard among themselves."""
    more = ["--hsdp", "2"] if sharing == "a host" else []
    more += ["--steps", "12"]
    run = Run(tmp_path / "run")
    with two(tmp_path, ["--out", str(run.out), *flags, *more]) as hosts:
        wait_until(lambda: steps_done(run.out) >= 1, hosts)
        apart = two is namespaces_or_skip and sharing == "all ranks"
        assert peers_in_shared_memory(hosts[0]) == (not apart)
        assert_ended_as(run, on_one_host(*more), hosts)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["one store", "a store for each start"])
def test_a_rank_that_is_killed_starts_both_hosts_again(
    store: str,
    two: Two,
    flags: list[str],
    on_one_host: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the last checkpoint, with --max-restarts alone. torchrun counts restarts on the host
    of the killed rank; the ranks of the other are started again uncounted (pytorch#135712)."""
    if store == "one store":
        monkeypatch.delenv(OWN_STORE)
    run = Run(tmp_path / "run")
    with two(tmp_path, ["--out", str(run.out), *flags], 3) as hosts:
        wait_until(lambda: steps_done(run.out) >= 7, hosts)
        others = list(hosts[0].ranks.values())
        for pid in others:  # or they may fail by themselves before their torchrun ends them
            os.kill(pid, signal.SIGSTOP)
        os.kill(hosts[1].ranks[3], signal.SIGKILL)
        wait_until(lambda: "closing signal SIGTERM" in hosts[0].log.read_text(), hosts)
        for pid in others:
            os.kill(pid, signal.SIGCONT)
        assert_ended_as(run, on_one_host(), hosts)
    # One start failed, by the kill; the next was neither refused nor did its ranks miss each other.
    assert hosts[1].log.read_text().count("failed (exitcode: ") == 1
    assert hosts[0].log.read_text().count("failed (exitcode: ") == 0


@contextlib.contextmanager
def _half_done(two: Two, flags: list[str], folder: Path) -> Iterator[tuple[Run, list[Host]]]:
    """A run that goes on by itself wherever it was stopped, after a few of its steps."""
    run = Run(folder / "run")
    with two(folder, ["--out", str(run.out), "--resume", "auto", *flags], 3) as hosts:
        wait_until(lambda: steps_done(run.out) >= 7, hosts)
        yield run, hosts


@pytest.mark.slow
def test_a_host_that_is_lost_comes_back_and_the_run_goes_on(
    two: Two, flags: list[str], on_one_host: Callable[..., Run], tmp_path: Path
) -> None:
    """The other one waits for it. It is lost with its torchrun, and started as the first time."""
    with _half_done(two, flags, tmp_path) as (run, hosts):
        hosts[1].kill()
        wait_until(lambda: not hosts[0].ranks, hosts[:1])
        hosts[1].start()
        assert_ended_as(run, on_one_host(), hosts)


@pytest.mark.slow
def test_a_run_that_lost_all_its_hosts_goes_on_when_they_are_started_again(
    two: Two, flags: list[str], on_one_host: Callable[..., Run], tmp_path: Path
) -> None:
    """The one where they meet among them."""
    with _half_done(two, flags, tmp_path) as (run, hosts):
        for host in hosts:
            host.kill()
        for host in hosts:
            host.start()
        assert_ended_as(run, on_one_host(), hosts)


# ---- Slurm ----------------------------------------------------------------------------------

SRUN = """#!/bin/sh
# Starts the command on as many nodes as there are, all of them here.
while [ "${1#--}" != "$1" ]; do shift; done
for node in 0 1; do
  SLURM_NODEID=$node "$@" >> "$FAKE/node-$node.log" 2>&1 &
  tasks="$tasks $!"
done
echo $tasks > "$FAKE/tasks"
for task in $tasks; do wait $task || worst=$?; done
exit $worst
"""
SCONTROL = """#!/bin/sh
case $1 in
  show) echo localhost; echo another ;;
  requeue) echo "$2" >> "$FAKE/requeued" ;;
esac
"""
SCANCEL = """#!/bin/sh
# --signal=TERM 7.0: to every task of the first step
[ "$*" = "--signal=TERM 7.0" ] && kill -TERM $(cat "$FAKE/tasks")
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts the script as Slurm starts a job of two nodes."""
    if not Path(sys.executable).with_name("torchrun").exists():
        pytest.skip("torchrun is not beside this Python")
    programs, jobs = tmp_path / "programs", []
    programs.mkdir()
    for name, content in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
        (programs / name).write_text(content)
        (programs / name).chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    about = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[0-1]"}
    about |= {"SLURM_GPUS_PER_NODE": "a100:2", "SLURM_CPUS_ON_NODE": "2"}
    variables = environment(PATH=path, FAKE=str(tmp_path), **about)

    def submit(*arguments: str) -> subprocess.Popen:
        command = ["bash", str(SCRIPT), *arguments]
        log = (tmp_path / "job.log").open("a")
        jobs.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log))
        return jobs[-1]

    yield submit
    for job in jobs:
        for pid in (job.pid, *descendants(job.pid)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        job.wait()


@pytest.mark.slow
def test_the_slurm_script_saves_before_its_time_is_over_and_goes_on_in_the_queue(
    slurm: Callable[..., subprocess.Popen],
    flags: list[str],
    on_one_host: Callable[..., Run],
    tmp_path: Path,
) -> None:
    run, requeued = Run(tmp_path / "run"), tmp_path / "requeued"
    mine = [str(run.out), "--device", "cpu", *flags, "--save-every", "1000"]
    job = slurm(*mine)
    deadline = time.monotonic() + 60
    while steps_done(run.out) < 7:
        assert job.poll() is None and time.monotonic() < deadline, logs(tmp_path)
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == 1, logs(tmp_path)  # torchrun's, of which SIGTERM makes 1
    assert requeued.read_text() == "7\n"
    (saved,) = (run.out / "checkpoints").iterdir()
    assert 7 <= int(saved.name.removeprefix("step-")) < 40
    assert not (run.out / "export").exists()
    assert slurm(*mine).wait(90) == 0, logs(tmp_path)
    assert requeued.read_text() == "7\n"
    assert run.losses == on_one_host().losses
    assert weights_hash(run) == weights_hash(on_one_host())


@pytest.mark.slow  # torchrun starts what is refused three times more
def test_the_slurm_script_does_not_queue_again_what_saved_nothing(
    slurm: Callable[..., subprocess.Popen], flags: list[str], tmp_path: Path
) -> None:
    assert slurm(str(tmp_path / "run"), "--device", "cpu", *flags, "--warmup", "2").wait(120) == 1
    assert "train.py: error: --warmup 2.0 is a share of the steps" in logs(tmp_path)
    assert not (tmp_path / "requeued").exists()


def logs(folder: Path) -> str:
    return "\n".join(log.read_text()[-3000:] for log in folder.glob("*.log"))


def test_the_slurm_script_is_one_that_bash_reads_and_wants_a_run_folder() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    done = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode and "usage: sbatch docs/slurm/train-70b.sbatch RUN_FOLDER" in done.stderr

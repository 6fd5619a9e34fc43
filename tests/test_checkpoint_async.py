"""Checkpoints written behind the training: a copy of the state, one at a time, errors kept."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import minifsdp
from minifsdp import checkpoint
from minifsdp.checkpoint import saving

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process


class Gate:
    """Holds writers back until it is opened, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.writing = self.most = 0
        write = saving._write

        def gated(job: object) -> None:
            self.writing += 1
            self.most = max(self.most, self.writing)
            assert self.opened.wait(30)
            write(job)
            self.writing -= 1

        monkeypatch.setattr(saving, "_write", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()
    checkpoint.wait()


def test_what_is_written_is_the_state_at_the_save(tmp_path: Path, gate: Gate) -> None:
    state = {"weight": torch.ones(3), "groups": [{"lr": 0.5}]}
    path = checkpoint.save(tmp_path, 1, state, asynchronous=True)
    state["weight"].zero_()
    state["groups"][0]["lr"] = 0.0
    assert checkpoint.latest(tmp_path) is None
    gate.opened.set()
    checkpoint.wait()
    assert checkpoint.latest(tmp_path) == path
    checkpoint.load(path, state)
    assert state["weight"].tolist() == [1, 1, 1] and state["groups"] == [{"lr": 0.5}]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_there_is_never_a_second_one(asynchronous: bool, tmp_path: Path, gate: Gate) -> None:
    checkpoint.save(tmp_path, 1, {"weight": torch.ones(3)}, asynchronous=True)
    opener = threading.Timer(0.2, gate.opened.set)
    opener.start()
    checkpoint.save(tmp_path, 2, {"weight": torch.ones(3)}, asynchronous=asynchronous)
    assert (tmp_path / "step-00000001").is_dir()  # it was waited for
    checkpoint.wait()
    assert gate.most == 1
    assert checkpoint.step_of(checkpoint.latest(tmp_path)) == 2


@pytest.mark.parametrize("at", ["next save", "wait"])
def test_an_error_of_the_thread_surfaces_once(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **about: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(saving, "write_manifest", fail)
    checkpoint.save(tmp_path, 1, {"weight": torch.ones(3)}, asynchronous=True)
    with pytest.raises(checkpoint.SaveError, match=r"step-00000001: rank 0: the disk is gone"):
        if at == "wait":
            checkpoint.wait()
        else:
            checkpoint.save(tmp_path, 2, {"weight": torch.ones(3)}, asynchronous=True)
    assert list(tmp_path.iterdir()) == []
    checkpoint.wait()


def save_behind(directory: Path) -> None:
    """Two saves behind steps that go on, with messages of both under way at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    for module in (*model, model):
        minifsdp.fully_shard(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = []
    for step in range(6):
        model(torch.ones(2, 5) * (dist.get_rank() + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            saved.append([p.full_tensor().clone() for p in model.parameters()])
            state = {"model": get_model_state_dict(model)}
            checkpoint.save(directory, step, state, asynchronous=True)
        checkpoint.rng_states()  # a message of checkpoints, while one may be written
    checkpoint.wait()
    loaded = []
    for step in (0, 3):
        state = {"model": get_model_state_dict(model)}
        checkpoint.load(directory / f"step-{step:08d}", state)
        loaded.append([p.full_tensor().clone() for p in model.parameters()])
    for before, after in zip(saved, loaded, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_ranks_save_while_they_train_on(tmp_path: Path, run_ranks: Callable[..., list]) -> None:
    run_ranks(2, save_behind, tmp_path)


def fail_on_rank_1(directory: Path) -> list[str]:
    model = minifsdp.fully_shard(nn.Linear(5, 7))
    state = {"model": get_model_state_dict(model)}
    checkpoint.save(directory, 1, state)
    original = saving.digest

    def fail(path: Path) -> None:
        raise OSError("rank 1's disk is gone")

    if dist.get_rank() == 1:
        saving.digest = fail
    messages = []
    try:
        for asynchronous in (False, True):
            with pytest.raises(checkpoint.SaveError) as error:
                checkpoint.save(directory, 2, state, asynchronous)
                checkpoint.wait()
            messages.append(str(error.value))
    finally:
        saving.digest = original
    return messages


def test_an_error_on_one_rank_is_raised_by_all_and_leaves_the_earlier_one(
    tmp_path: Path, run_ranks: Callable[..., list]
) -> None:
    for messages in run_ranks(2, fail_on_rank_1, tmp_path):
        for message in messages:
            assert message.endswith("step-00000002: rank 1: rank 1's disk is gone")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


SCRIPT = """
import sys, time, torch
from minifsdp import checkpoint
from minifsdp.checkpoint import saving
write = saving._write
def slowly(job):
    time.sleep(0.5)
    {then}
saving._write = slowly
checkpoint.save(sys.argv[1], 1, {{"weight": torch.ones(3)}}, asynchronous=True)
"""


@pytest.mark.parametrize(("then", "says"), [("write(job)", ""), ("raise OSError('gone')", "gone")])
def test_a_process_that_ends_waits_for_the_thread_and_shows_its_error(
    then: str, says: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT.format(then=then), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert says in done.stderr
    assert (checkpoint.latest(tmp_path) is None) == bool(says)

"""Corners of checkpoints that breaking them line by line has shown to need a test of their own."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from minifsdp import checkpoint
from minifsdp.checkpoint import folder, manifest, saving
from minifsdp.checkpoint.metadata import read_metadata
from minifsdp.checkpoint.ranks import Ranks
from minifsdp.checkpoint.values import absent, join, split, update

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process


def state(value: float = 0.0) -> dict:
    return {"weight": torch.full((3,), value), "step": 0}


def lengthen(path: Path) -> None:
    """Damage a checkpoint's tensors."""
    with next(path.glob("__0_*")).open("ab") as file:
        file.write(b"more")


# Folders


def test_a_replaced_checkpoint_comes_after_the_one_that_replaced_it(tmp_path):
    for name in (".replaced-step-00000005", "step-00000005", "step-00000004"):
        (tmp_path / name).mkdir()
    newest = [path.name for path in folder.newest_first(tmp_path)]
    assert newest == ["step-00000005", ".replaced-step-00000005", "step-00000004"]


def test_what_a_dead_run_was_writing_or_deleting_goes_and_of_a_link_the_link_only(tmp_path):
    kept, run = tmp_path / "kept", tmp_path / "run"
    (kept / "inside").mkdir(parents=True)
    run.mkdir()
    for name in (".partial-step-00000001", ".deleted-step-00000002"):
        (run / name).mkdir()
    (run / ".partial-step-00000003").symlink_to(kept)
    folder.prepare(run / "step-00000004", 0)
    assert [path.name for path in run.iterdir()] == [".partial-step-00000004"]
    assert (kept / "inside").is_dir()


def test_damaged_checkpoints_do_not_count_among_those_that_are_kept(tmp_path):
    checkpoint.save(tmp_path, 1, state())
    lengthen(checkpoint.save(tmp_path, 2, state()))
    checkpoint.save(tmp_path, 3, state(), keep_last=2)
    assert sorted(folder.step_of(path) for path in tmp_path.iterdir()) == [1, 2, 3]


def test_a_torn_checkpoint_is_passed_over_and_if_none_is_whole_that_is_told(tmp_path):
    checkpoint.save(tmp_path, 1, state(1.0))
    torn = checkpoint.save(tmp_path, 2, state(2.0))
    lengthen(torn)
    loaded = state()
    assert folder.step_of(checkpoint.load(tmp_path, loaded)) == 1
    assert torch.equal(loaded["weight"], torch.ones(3))
    lengthen(tmp_path / "step-00000001")
    told: list[Exception] = []
    with pytest.raises(checkpoint.DamagedError, match="step-00000001"):
        checkpoint.load(tmp_path, state(), on_damaged=told.append)
    assert len(told) == 1 and "step-00000002" in str(told[0])


def test_all_is_on_the_disk_before_the_rename_and_the_rename_after_it(tmp_path, monkeypatch):
    log: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        log.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        log.append(f"rename {Path(source).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    checkpoint.save(tmp_path, 7, state())
    last = ["sync manifest.json", "sync .partial-step-00000007"]
    last += ["rename .partial-step-00000007", f"sync {tmp_path.name}"]
    assert log[-4:] == last and "sync values.json" in log


# What is believed


def test_a_manifest_is_written_only_of_files_that_this_process_sees(tmp_path):
    (tmp_path / "short").write_bytes(b"12")
    for name, size in (("absent", 0), ("short", 3)):
        with pytest.raises(FileNotFoundError, match="one file system"):
            manifest.write_manifest(tmp_path, {name: manifest.Digest(size, "")})


@pytest.mark.parametrize("change", ["another format", "elsewhere", "longer"])
def test_a_manifest_of_something_else_is_not_believed(tmp_path, change):
    path = checkpoint.save(tmp_path, 1, state())
    content = json.loads((path / "manifest.json").read_text())
    if change == "another format":
        content["format"] = "somebody's checkpoint"
    elif change == "elsewhere":
        outside = tmp_path / "outside"
        outside.write_bytes(b"")
        content["files"]["../outside"] = manifest.digest(outside)._asdict()
    else:
        lengthen(path)
    (path / "manifest.json").write_text(json.dumps(content))
    assert not folder.is_intact(path)
    with pytest.raises(checkpoint.DamagedError):
        checkpoint.load(path, state())


def test_metadata_cannot_call_functions_of_torch_nor_change_what_a_class_has(tmp_path):
    before = Metadata.__doc__
    calls = b"ctorch\nset_num_threads\n(I3\ntR."
    module, name = Metadata.__module__, Metadata.__name__
    changes = f"c{module}\n{name}\n(N(dS'__doc__'\nS'planted'\nstb.".encode()
    threads = torch.get_num_threads()
    for planted in (calls, changes):
        (tmp_path / ".metadata").write_bytes(planted)
        with pytest.raises(ValueError, match="unreadable"):
            read_metadata(tmp_path, set())
    assert torch.get_num_threads() == threads and Metadata.__doc__ == before
    assert pickle.loads(b"ctorch\nget_num_threads\n.") is torch.get_num_threads  # it could


# Values


def test_names_keys_and_objects_of_a_nested_state_are_kept_apart():
    with pytest.raises(ValueError, match=r"two tensors .* 'a\.b'"):
        split({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)})
    tricky = {"options": {"$tensor": "not one", "plain": 1}, "counts": {3: "three"}}
    tensors, tree = split(tricky)
    assert join(json.loads(json.dumps(tree)), tensors) == tricky
    wanted = {"a": {"b": {"c": 1, "d": 2}}, "e": 3}
    assert absent(wanted, {"a": {"b": {"c": 1}}}) == ["a.b.d", "e"]
    inner = {"c": 1}
    update({"a": inner}, {"a": {"c": 2, "d": 3}})
    assert inner == {"c": 2, "d": 3}


# Ranks


def test_the_cause_of_a_failed_write_is_told_and_not_what_came_of_it(monkeypatch):
    def fail(*_: object) -> None:
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0") from None

    monkeypatch.setattr(FileSystemWriter, "write_data", fail)
    with pytest.raises(OSError, match="No space left"):
        saving._Writer("/nowhere").write_data(None, None)


def _an_unexpected_error() -> None:
    ranks = Ranks()
    assert Ranks().group is ranks.group  # made once
    assert Ranks(behind=True).group is not ranks.group

    def act() -> str:
        if ranks.rank == 1:
            raise AttributeError("no such thing")
        return "done"

    with pytest.raises(RuntimeError, match="AttributeError: no such thing"):
        ranks.each(act)
    assert ranks.first(lambda: ranks.rank + 10) == 10


def _saved_behind(folder: str) -> None:
    groups, start = [], saving._start
    saving._start = lambda one: groups.append(one.ranks.group) or start(one)
    try:
        checkpoint.save(folder, 1, state(), asynchronous=True)
        checkpoint.wait()
    finally:
        saving._start = start
    assert groups == [Ranks(behind=True).group] != [Ranks().group]


def test_what_is_saved_behind_the_training_has_a_group_of_its_own(run_ranks, tmp_path):
    run_ranks(2, _saved_behind, str(tmp_path))


def test_an_error_of_any_class_on_one_rank_is_raised_by_all(run_ranks):
    run_ranks(2, _an_unexpected_error)


def _draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), np.random.rand()


def _drawn_after_restoring() -> tuple[list, list, list]:
    """Numbers that were to come, those after restoring, and those from another world size."""
    seed = 100 + dist.get_rank()
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    states = checkpoint.rng_states()
    expected = _draw()
    checkpoint.restore_rng(states)
    again = _draw()
    checkpoint.restore_rng([*states, states[0]])
    return expected, again, _draw()


def test_each_rank_draws_its_own_numbers_after_restoring(run_ranks):
    first, second = run_ranks(2, _drawn_after_restoring)
    for expected, again, _ in (first, second):
        assert again == expected
    for here, there in zip(first, second, strict=True):
        assert all(a != b for a, b in zip(here, there, strict=True))

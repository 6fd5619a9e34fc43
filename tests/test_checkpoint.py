"""minifsdp.checkpoint: complete or invisible, refused by name, and free of the world size."""

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import minifsdp
from minifsdp import checkpoint
from minifsdp.checkpoint import folder, saving
from minifsdp.checkpoint.values import split

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process


def state_with(value: float, rows: int = 3) -> dict:
    return {"model": {"w.weight": torch.full((rows, 2), value)}, "step": int(value)}


def test_a_saved_state_is_loaded_in_place(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 7, state_with(7.0))
    state = state_with(0.0)
    kept = state["model"]["w.weight"]
    assert checkpoint.load(tmp_path, state) == path == tmp_path / "step-00000007"
    assert torch.equal(kept, torch.full((3, 2), 7.0))
    assert state["step"] == 7
    assert checkpoint.step_of(path) == 7


def test_latest_is_the_highest_step_and_only_a_complete_one(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "absent") is None
    assert checkpoint.latest(tmp_path) is None
    checkpoint.save(tmp_path, 9, state_with(9.0))
    newest = checkpoint.save(tmp_path, 10, state_with(10.0))
    (tmp_path / "step-00000011").mkdir()  # no manifest: not a checkpoint
    (tmp_path / "step-last").mkdir()
    assert checkpoint.latest(tmp_path) == newest


def die(*args: object, **about: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("moment", ["digest", "write_manifest", "publish"])
def test_a_save_that_dies_half_way_stays_invisible(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = checkpoint.save(tmp_path, 1, state_with(1.0))
    monkeypatch.setattr(saving, moment, die)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, state_with(2.0))
    assert checkpoint.latest(tmp_path) == first
    monkeypatch.undo()
    checkpoint.save(tmp_path, 2, state_with(2.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_one_that_is_being_replaced_serves_until_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, 1, state_with(1.0))
    rename, renames = folder.os.rename, []

    def rename_once(source: Path, target: Path) -> None:
        if renames:
            raise KeyboardInterrupt
        renames.append(target.name)
        rename(source, target)

    monkeypatch.setattr(folder, "os", SimpleNamespace(rename=rename_once))
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 1, state_with(2.0))
    monkeypatch.undo()
    assert renames == [".replaced-step-00000001"]
    state = state_with(0.0)
    path = checkpoint.load(tmp_path, state)
    assert (state["step"], checkpoint.step_of(path)) == (1, 1)
    checkpoint.save(tmp_path, 1, state_with(3.0))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, state_with(1.0))
    checkpoint.save(tmp_path, 1, state_with(2.0))
    state = state_with(0.0)
    checkpoint.load(tmp_path, state)
    assert state["step"] == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_older_checkpoints_go_once_a_newer_one_is_complete(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, state_with(1.0), keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    checkpoint.save(tmp_path, 4, state_with(1.0))
    assert len(list(tmp_path.iterdir())) == 3
    checkpoint.save(tmp_path, 5, state_with(1.0), keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


FILES = ["manifest.json", "values.json", ".metadata", "__0_0.distcp"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "cut short", "a flipped byte"])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_serves(
    damage: str, name: str, tmp_path: Path
) -> None:
    before = checkpoint.save(tmp_path, 1, state_with(1.0))
    path = checkpoint.save(tmp_path, 2, state_with(2.0))
    content = (path / name).read_bytes()
    (path / name).unlink()
    if damage == "cut short":
        (path / name).write_bytes(content[:50])
    elif damage == "a flipped byte":
        middle = content.index(b"sha256") if name == "manifest.json" else len(content) // 2
        flipped = bytes([content[middle] ^ 1])
        (path / name).write_bytes(content[:middle] + flipped + content[middle + 1 :])
    state = state_with(0.0)
    pattern = rf"checkpoint {path} is damaged \(.*{name}.*delete that folder"
    with pytest.raises(checkpoint.DamagedError, match=pattern):
        checkpoint.load(path, state)
    assert state["step"] == 0 and not state["model"]["w.weight"].any()
    assert checkpoint.latest(tmp_path, verify=True) == before
    seen_without_reading = damage != "a flipped byte" or name == "manifest.json"
    assert (checkpoint.latest(tmp_path) == before) == seen_without_reading
    told: list[checkpoint.DamagedError] = []
    assert checkpoint.load(tmp_path, state, on_damaged=told.append) == before
    assert [error.path for error in told] == [path]
    assert state["step"] == 1


def test_a_format_of_later_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, state_with(1.0))
    manifest = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(manifest.replace('"version": 1', '"version": 2'))
    with pytest.raises(ValueError, match="format version 2, this program reads 1"):
        checkpoint.load(tmp_path, state_with(0.0))
    with pytest.raises(ValueError, match="format version 2"):
        checkpoint.load(tmp_path, state_with(0.0), on_damaged=print)


def test_the_manifest_names_every_file_with_its_size_and_hash(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 5, state_with(1.0))
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["version"], manifest["step"], manifest["world_size"]) == (1, 5, 1)
    for name, about in manifest["files"].items():
        content = (path / name).read_bytes()
        assert about == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert {*manifest["files"], "manifest.json"} == {file.name for file in path.iterdir()}


def test_another_shape_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, state_with(1.0))
    state = state_with(0.0, rows=4)
    with pytest.raises(ValueError, match=r"model\.w\.weight: \(3, 2\) there, \(4, 2\) here"):
        checkpoint.load(tmp_path, state)
    assert state["step"] == 0


@pytest.mark.parametrize("saved_more", [True, False])
def test_a_tensor_on_one_side_only_is_refused(tmp_path: Path, saved_more: bool) -> None:
    larger, smaller = state_with(1.0), state_with(1.0)
    larger["model"]["extra"] = torch.ones(1)
    saved, here = (larger, smaller) if saved_more else (smaller, larger)
    checkpoint.save(tmp_path, 1, saved)
    with pytest.raises(ValueError, match=r"model\.extra: .*absent"):
        checkpoint.load(tmp_path, here)


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, state_with(1.0))
    state = {"model": {"w.weight": torch.zeros(3, 2, dtype=torch.bfloat16)}, "step": 0}
    with pytest.raises(ValueError, match=r"w\.weight: float32 there, bfloat16 here"):
        checkpoint.load(tmp_path, state)


def test_a_value_that_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, state_with(1.0))
    with pytest.raises(ValueError, match=r"no value for rng: "):
        checkpoint.load(tmp_path, state_with(0.0) | {"rng": {"seed": 1}})


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    values = {
        "tuple": (0.9, 0.95),
        "keys": {0: {"a": 1}, "$tensor": [True, None]},
        "floats": [0.1 + 0.2, 1e-300, float("inf"), -float("inf")],
        "text": "\u2581\n\ud800",
        "empty": [{}, [], ()],
        "tensors in a list": [{"a": torch.arange(3)}],
        "large": 2**70,
    }
    checkpoint.save(tmp_path, 1, values)
    state = {"tensors in a list": [{"a": torch.zeros(3, dtype=torch.int64)}]}
    checkpoint.load(tmp_path, state)
    assert state.pop("tensors in a list")[0]["a"].tolist() == [0, 1, 2]
    del values["tensors in a list"]
    assert state == values
    assert type(state["tuple"]) is tuple


@pytest.mark.parametrize("value", [object(), b"bytes", {1.5: 2}, {1, 2}])
def test_what_json_cannot_hold_is_refused_by_name(value: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'run\.odd' of the state is of class"):
        checkpoint.save(tmp_path, 1, {"run": {"odd": value}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("step", "keep_last"), [(-1, None), (1, 0)])
def test_a_save_that_makes_no_sense_is_refused(step: int, keep_last: int | None) -> None:
    with pytest.raises(ValueError, match=r"negative|keeps nothing"):
        checkpoint.save("nowhere", step, state_with(1.0), keep_last=keep_last)


def test_a_full_disk_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = checkpoint.save(tmp_path, 1, state_with(1.0))
    free = SimpleNamespace(free=1234)
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: free)
    with pytest.raises(checkpoint.SaveError, match=r"needs [\d,]+ bytes and 1,234 are free in"):
        checkpoint.save(tmp_path, 2, state_with(1.0))
    assert list(tmp_path.iterdir()) == [first]


def test_the_space_that_is_asked_for_is_what_a_checkpoint_takes(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.zeros(i * 1000) for i in range(40)}
    path = checkpoint.save(tmp_path, 1, tensors)
    taken = sum(file.stat().st_size for file in path.iterdir())
    asked = saving._needed_bytes(tensors, 1)
    assert taken <= asked <= taken * 1.1


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [torch.rand(1).item(), random.random(), np.random.rand(), np.random.randn()]

    draw()
    checkpoint.save(tmp_path, 1, {"rng": checkpoint.rng_states()})
    expected = draw()
    state = {"rng": checkpoint.rng_states()}
    checkpoint.load(tmp_path, state)
    checkpoint.restore_rng(state["rng"])
    assert draw() == expected
    checkpoint.restore_rng(state["rng"] * 2)  # of two ranks, say
    seeded = draw()
    checkpoint.restore_rng(state["rng"] * 2)
    assert draw() == seeded != expected


def test_no_checkpoint_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        checkpoint.load(tmp_path, state_with(0.0))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(checkpoint.SaveError, match=r"cannot prepare checkpoint .*step-00000001"):
        checkpoint.save(tmp_path / "file", 1, state_with(1.0))


def seeded_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))


def save_sharded(directory: Path, engine: str) -> None:
    sharding = minifsdp if engine == "minifsdp" else torch.distributed.fsdp
    model = seeded_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model, model):
        sharding.fully_shard(module, mesh=mesh)
    checkpoint.save(directory, 3, {"model": get_model_state_dict(model)})


@pytest.mark.parametrize("engine", ["minifsdp", "fsdp2"])
def test_what_two_ranks_save_one_process_loads(
    tmp_path: Path, engine: str, run_ranks: Callable[..., list]
) -> None:
    run_ranks(2, save_sharded, tmp_path, engine)
    model = seeded_model()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {"model": model.state_dict()}
    for tensor in state["model"].values():
        tensor.zero_()
    checkpoint.load(tmp_path, state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def opened(directory: Path, seed: int) -> dict:
    """A sharded model and optimizer that have taken a step from weights of `seed`."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1), nn.Linear(1, 3))
    for module in (*model, model):
        minifsdp.fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    optimizer_state = get_optimizer_state_dict(model, optimizer)
    return {"model": get_model_state_dict(model), "optimizer": optimizer_state}


def whole(state: dict) -> dict[str, np.ndarray]:
    tensors, _ = split(state)
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    return {name: tensor.detach().numpy() for name, tensor in full.items()}


def save_opened(directory: Path) -> tuple[dict, list]:
    state = opened(directory, 0)
    checkpoint.save(directory, 1, state)
    return whole(state), state["optimizer"]["param_groups"]


def load_opened(directory: Path) -> tuple[dict, list]:
    state = opened(directory, 1)
    checkpoint.load(directory, state)
    return whole(state), state["optimizer"]["param_groups"]


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 3), (4, 2), (1, 4)])
def test_the_state_is_exact_on_another_number_of_ranks(
    saved_by: int, loaded_by: int, tmp_path: Path, run_ranks: Callable[..., list]
) -> None:
    saved, groups = run_ranks(saved_by, save_opened, tmp_path)[0]
    assert len(saved) == 6 * 4  # parameters, two moments and a count of steps each
    for loaded, loaded_groups in run_ranks(loaded_by, load_opened, tmp_path):
        assert loaded_groups == groups
        assert loaded.keys() == saved.keys()
        for name, values in saved.items():
            assert np.array_equal(loaded[name], values), name

"""minifsdp.checkpoint: complete or invisible, refused by name, and free of the world size."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import minifsdp
from minifsdp import checkpoint

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
    (tmp_path / "step-00000011").mkdir()  # no metadata: not a checkpoint
    (tmp_path / "step-last").mkdir()
    assert checkpoint.latest(tmp_path) == newest


def test_a_save_that_dies_half_way_stays_invisible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = checkpoint.save(tmp_path, 1, state_with(1.0))
    complete_save = checkpoint.dcp.save

    def die(state: dict, checkpoint_id: Path, **kwargs: object) -> None:
        complete_save(state, checkpoint_id=checkpoint_id, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.dcp, "save", die)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, state_with(2.0))
    assert checkpoint.latest(tmp_path) == first
    monkeypatch.undo()
    checkpoint.save(tmp_path, 2, state_with(2.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, state_with(1.0))
    checkpoint.save(tmp_path, 1, state_with(2.0))
    state = state_with(0.0)
    checkpoint.load(tmp_path, state)
    assert state["step"] == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_older_checkpoints_go_once_a_newer_one_is_complete(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, state_with(1.0), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    checkpoint.save(tmp_path, 4, state_with(1.0))
    assert len(list(tmp_path.iterdir())) == 3
    checkpoint.save(tmp_path, 5, state_with(1.0), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


@pytest.mark.parametrize("damage", [".metadata", "__0_0.distcp"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, damage: str) -> None:
    path = checkpoint.save(tmp_path, 1, state_with(1.0))
    (path / damage).write_bytes((path / damage).read_bytes()[:50])
    with pytest.raises(ValueError, match=rf"checkpoint {path} is damaged .*delete that folder"):
        checkpoint.load(tmp_path, state_with(0.0))


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


def test_no_checkpoint_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        checkpoint.load(tmp_path, state_with(0.0))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"cannot prepare checkpoint .*step-00000001"):
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

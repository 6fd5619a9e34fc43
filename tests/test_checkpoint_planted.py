"""No file of a checkpoint is executed: a payload planted in each kind of file does not run."""

import hashlib
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata

from minifsdp import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = str(proof)

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.proof,)


def state() -> dict:
    return {"weight": torch.zeros(3), "step": 0}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return checkpoint.save(tmp_path, 1, {"weight": torch.ones(3), "step": 1})


def rewrite(path: Path, name: str, content: bytes) -> None:
    """Replace a file, as one who knows about the manifest would."""
    (path / name).write_bytes(content)
    if name != "manifest.json":
        manifest = json.loads((path / "manifest.json").read_text())
        about = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest["files"][name] = about
        (path / "manifest.json").write_text(json.dumps(manifest))


def metadata_of(path: Path) -> object:
    return pickle.loads((path / ".metadata").read_bytes())


def plant_metadata(path: Path, payload: Payload) -> None:
    rewrite(path, ".metadata", pickle.dumps(payload))


def plant_within_metadata(path: Path, payload: Payload) -> None:
    metadata = metadata_of(path)
    metadata.planner_data["weight"] = payload
    rewrite(path, ".metadata", pickle.dumps(metadata))


def plant_tensor(path: Path, payload: Payload) -> None:
    buffer, metadata = io.BytesIO(), metadata_of(path)
    torch.save(payload, buffer)
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, len(buffer.getvalue())
    rewrite(path, "__0_0.distcp", buffer.getvalue())
    rewrite(path, ".metadata", pickle.dumps(metadata))


def plant_bytes(path: Path, payload: Payload) -> None:
    """As torch's checkpoints hold what is not a tensor: unpickled by torch without a check."""
    metadata = metadata_of(path)
    metadata.state_dict_metadata["weight"] = BytesStorageMetadata()
    plant_tensor(path, payload)
    rewrite(path, ".metadata", pickle.dumps(metadata))


def plant_values(path: Path, payload: Payload) -> None:
    rewrite(path, "values.json", pickle.dumps(payload))


def plant_manifest(path: Path, payload: Payload) -> None:
    rewrite(path, "manifest.json", pickle.dumps(payload))


def plant_elsewhere(path: Path, payload: Payload) -> None:
    """Rows in a file outside the checkpoint."""
    metadata = metadata_of(path)
    outside = path.parent / "outside"
    outside.write_bytes((path / "__0_0.distcp").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../outside"
    rewrite(path, ".metadata", pickle.dumps(metadata))


def plant_decoder(path: Path, payload: Payload) -> None:
    """Rows that ask for a decoder."""
    metadata = metadata_of(path)
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["stream.zstd"]
    rewrite(path, ".metadata", pickle.dumps(metadata))


PLANTS = {
    plant_metadata: r"\.metadata is unreadable: it names posix\.mkdir",
    plant_within_metadata: r"\.metadata is unreadable: it names posix\.mkdir",
    plant_tensor: "Weights only load failed|UnpicklingError",
    plant_bytes: r"\.metadata is unreadable: it names .*BytesStorageMetadata",
    plant_values: r"values\.json is unreadable",
    plant_manifest: r"manifest\.json is unreadable",
    plant_elsewhere: r"\.metadata does not describe tensors in files of this folder",
    plant_decoder: r"\.metadata does not describe",
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_payload_is_refused_and_does_not_run(
    plant: Callable[[Path, Payload], None], saved: Path, tmp_path: Path
) -> None:
    proof = tmp_path / "the payload ran"
    plant(saved, Payload(proof))
    with pytest.raises(checkpoint.DamagedError, match=PLANTS[plant]):
        checkpoint.load(saved, state())
    assert not proof.exists()


def test_the_payload_would_run_if_it_were_unpickled(saved: Path, tmp_path: Path) -> None:
    proof = tmp_path / "the payload ran"
    plant_metadata(saved, Payload(proof))
    pickle.loads((saved / ".metadata").read_bytes())
    assert proof.exists()


def test_what_is_written_holds_nothing_but_tensors_in_pickles(saved: Path) -> None:
    assert b"step" not in (saved / ".metadata").read_bytes().replace(b"step-0", b"")
    assert json.loads((saved / "values.json").read_text())["step"] == 1


def test_a_pickle_that_changes_a_class_is_refused_and_undone(saved: Path) -> None:
    state_to_set = pickle.dumps((None, {"planted": 1}), protocol=2)[2:-1]  # without frame and stop
    named = b"\x80\x02ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n"
    rewrite(saved, ".metadata", named + state_to_set + b"b.")
    with pytest.raises(ValueError, match="changes a class"):
        checkpoint.load(saved, state())
    assert not hasattr(ChunkStorageMetadata, "planted")
    checkpoint.save(saved.parent, 2, state())


def test_a_manifest_that_leaves_a_file_out_is_refused(saved: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    del manifest["files"][".metadata"]
    (saved / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.latest(saved.parent) is None


def test_a_manifest_with_an_endless_size_is_passed_over(saved: Path) -> None:
    text = (saved / "manifest.json").read_text()
    (saved / "manifest.json").write_text(text.replace('"bytes": ', '"bytes": 1e999, "_": ', 1))
    assert checkpoint.latest(saved.parent) is None


def test_leftovers_that_are_no_folders_stop_no_save(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    run = tmp_path / "run"
    run.mkdir()
    (run / ".deleted-step-00000001").symlink_to(elsewhere)
    (run / ".partial-x").write_text("")
    for step in range(2, 5):
        checkpoint.save(run, step, state(), keep_last=1)
    assert checkpoint.latest(run).name == "step-00000004"
    assert (elsewhere / "kept").exists()


@pytest.mark.parametrize("name", ["__class__", "numel"])
def test_nothing_but_a_memory_format_is_looked_up_by_name(saved: Path, name: str) -> None:
    class Lookup:
        def __reduce__(self) -> tuple:
            return getattr, (torch.Size, name)

    rewrite(saved, ".metadata", pickle.dumps(Lookup()))
    with pytest.raises(ValueError, match="which is no memory format"):
        checkpoint.load(saved, state())

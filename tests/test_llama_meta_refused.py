"""Meta's folders that do not fit, are damaged, or hold code: refused, naming what and why."""

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from test_llama_meta import FOUR, write_as_meta
from test_llama_weights import filled

from llama import Llama, LlamaConfig
from llama.weights import load_meta, save_meta


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_a_missing_file_is_named(tmp_path, missing):
    save_meta(filled(FOUR), tmp_path / "meta", shards=4)
    (tmp_path / "meta" / f"consolidated.0{missing}.pth").unlink()
    with pytest.raises(FileNotFoundError, match=rf"consolidated\.0{missing}\.pth: no such file"):
        load_meta(Llama(FOUR), tmp_path / "meta")


def drop(name):
    return lambda files: [tensors.pop(name) for tensors in files]


def put(name, tensor):
    return lambda files: [tensors.update({name: tensor}) for tensors in files]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("norm.weight"), r"lacks norm\.weight"),
        (put("layers.0.attention.wq.bias", torch.ones(4)), r"wq\.bias: this Llama has no biases"),
        (
            put("output.weight", torch.ones(21, 32)),
            r"output\.weight has shape \(42, 32\), the model's parameter \(40, 32\)",
        ),
        (
            put("norm.weight", torch.ones(32, dtype=torch.int8)),
            r"norm\.weight holds torch\.int8, the model's parameter torch\.float32",
        ),
        (
            lambda files: files[1].update({"norm.weight": torch.zeros(32)}),
            r"consolidated\.01\.pth: norm\.weight differs from that in consolidated\.00\.pth",
        ),
        (
            lambda files: files[1].update({"output.weight": torch.zeros(20, 32).half()}),
            r"01\.pth: output\.weight is \(20, 32\) torch\.float16, in consolidated\.00\.pth",
        ),
        (
            lambda files: files[1].pop("norm.weight"),
            r"01\.pth: norm\.weight in it or in consolidated\.00\.pth only",
        ),
        (put("step", 7), r"00\.pth: 'step' is not a tensor"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, message):
    write_as_meta(filled(FOUR), tmp_path, 2, change)
    with pytest.raises(ValueError, match=message):
        load_meta(Llama(FOUR), tmp_path)


def test_a_model_with_other_heads_is_refused(tmp_path):
    save_meta(filled(FOUR), tmp_path / "meta")
    other = LlamaConfig(**{**vars(FOUR), "n_heads": 16, "n_kv_heads": 8})
    with pytest.raises(ValueError, match=r"params\.json: its model has 8 heads and 4 key and"):
        load_meta(Llama(other), tmp_path / "meta")


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("container", ["torch", "old torch", "pickle"])
def test_a_planted_payload_is_refused_by_the_files_name_and_never_run(tmp_path, container):
    write_as_meta(filled(FOUR), tmp_path, 2)
    content = {"norm.weight": torch.ones(32), "note": Payload(tmp_path / "ran")}
    path = tmp_path / "consolidated.01.pth"
    if container == "pickle":
        path.write_bytes(pickle.dumps({"note": Payload(tmp_path / "ran")}))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=container == "torch")
    with pytest.raises(ValueError, match=r"consolidated\.01\.pth: refused, and nothing in it was"):
        load_meta(Llama(FOUR), tmp_path)
    assert not (tmp_path / "ran").exists()
    if container == "torch":  # it would have run
        torch.load(path, weights_only=False)
        assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("kept", [0, 100, -100])
def test_a_truncated_file_is_refused_by_name(tmp_path, kept):
    save_meta(filled(FOUR), tmp_path / "meta", shards=2)
    path = tmp_path / "meta" / "consolidated.01.pth"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"consolidated\.01\.pth: refused"):
        load_meta(Llama(FOUR), tmp_path / "meta")


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (3, r"3 files cannot share 8 \(n_heads\) evenly"),
        (8, r"8 files cannot share 4 \(n_kv_heads\) evenly"),
        (0, "shards must be a positive integer, not 0"),
    ],
)
def test_shards_that_heads_cannot_be_dealt_to_are_refused(tmp_path, shards, message):
    with pytest.raises(ValueError, match=message):
        save_meta(filled(FOUR), tmp_path / "meta", shards=shards)
    assert list(tmp_path.iterdir()) == []


def test_scaled_rotary_embeddings_are_refused(tmp_path):
    save_meta(filled(FOUR), tmp_path / "meta")
    params = tmp_path / "meta" / "params.json"
    params.write_text(json.dumps(json.loads(params.read_text()) | {"use_scaled_rope": True}))
    with pytest.raises(ValueError, match=r"params\.json: use_scaled_rope"):
        LlamaConfig.from_meta(tmp_path / "meta")


def rezip(path, compression, change):
    """Write a .pth anew, each record through `change`."""
    with zipfile.ZipFile(path) as old:
        records = [(info.filename, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, data in records:
            new.writestr(name, change(name, data))


def test_a_compressed_file_is_not_read_as_if_it_were_not(tmp_path):
    save_meta(filled(FOUR), tmp_path / "meta")
    path = tmp_path / "meta" / "consolidated.00.pth"
    rezip(path, zipfile.ZIP_DEFLATED, lambda name, data: data)
    with pytest.raises(ValueError, match=r"consolidated\.00\.pth: is compressed"):
        load_meta(Llama(FOUR), tmp_path / "meta")


def test_a_record_shorter_than_its_tensor_is_not_filled_from_the_next(tmp_path):
    save_meta(filled(FOUR), tmp_path / "meta")
    path = tmp_path / "meta" / "consolidated.00.pth"
    rezip(path, zipfile.ZIP_STORED, lambda n, data: data[:-4] if n.endswith("/data/0") else data)
    with pytest.raises(ValueError, match=r"consolidated\.00\.pth: (damaged|refused)"):
        load_meta(Llama(FOUR), tmp_path / "meta")

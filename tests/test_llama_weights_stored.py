"""What a folder is told to hold without its weights being loaded: its type, its fingerprint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_llama_weights import CONFIG, filled

from llama import LlamaConfig
from llama.weights import fingerprint, save_hf, stored_dtype

WEIGHTS = "model-00001-of-00001.safetensors"
# Matrices are larger than all samples of one.
WIDE = LlamaConfig(dim=128, n_layers=1, n_heads=2, n_kv_heads=2, ffn_hidden=256, vocab_size=256)


def edit(folder: Path, change) -> None:
    """Change the tensors of an export of one file."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


@pytest.fixture
def folder(tmp_path) -> Path:
    save_hf(filled(WIDE), tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_stored_type_is_the_files_own(tmp_path, dtype):
    save_hf(filled(CONFIG), tmp_path / "base", dtype=dtype)
    assert stored_dtype(tmp_path / "base") == dtype


@pytest.mark.parametrize(
    ("of_norms", "dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),  # which alone holds both
        (torch.int8, torch.bfloat16),  # refused when it is loaded, by its name
    ],
)
def test_of_several_types_it_is_the_narrowest_that_holds_all(tmp_path, of_norms, dtype):
    save_hf(filled(CONFIG), tmp_path / "base", dtype=torch.bfloat16)

    def change(tensors: dict) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(of_norms)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(1)  # no weights

    edit(tmp_path / "base", change)
    assert stored_dtype(tmp_path / "base") == dtype


def test_folders_without_floats_or_without_files_are_refused(tmp_path, folder):
    tensors = load_file(folder / WEIGHTS)
    (tmp_path / "bytes").mkdir()
    whole = {name: torch.zeros(t.shape, dtype=torch.int8) for name, t in tensors.items()}
    save_file(whole, tmp_path / "bytes" / "model.safetensors")
    with pytest.raises(ValueError, match=r"bytes: no tensors of 16-, 32- or 64-bit floats"):
        stored_dtype(tmp_path / "bytes")
    for tell in (stored_dtype, fingerprint):
        with pytest.raises(FileNotFoundError, match="none: no such folder"):
            tell(tmp_path / "none")


def test_the_fingerprint_is_of_the_tensors_not_of_place_time_or_files(tmp_path, folder):
    expected = fingerprint(folder)
    assert len(bytes.fromhex(expected)) == 32
    shutil.copytree(folder, tmp_path / "elsewhere", copy_function=shutil.copyfile)
    assert fingerprint(tmp_path / "elsewhere") == expected
    save_hf(filled(WIDE), tmp_path / "divided", max_shard_bytes=100_000)
    assert len(list((tmp_path / "divided").glob("*.safetensors"))) > 3
    assert fingerprint(tmp_path / "divided") == expected


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"]
)
def test_a_tensor_that_was_trained_scaled_or_cast_has_another_fingerprint(folder, name):
    seen = {fingerprint(folder)}
    generator = torch.Generator().manual_seed(0)
    for change in (
        lambda t: t + 1e-6 * torch.randn(t.shape, generator=generator),
        lambda t: t * 1.001,
        lambda t: t.bfloat16(),
    ):
        edit(folder, lambda tensors: tensors.update({name: change(tensors[name])}))  # noqa: B023
        seen.add(fingerprint(folder))
    assert len(seen) == 4


def test_exchanged_tensors_and_other_names_have_another_fingerprint(folder):
    one, other = (f"model.layers.0.self_attn.{n}_proj.weight" for n in "qk")
    seen = {fingerprint(folder)}
    edit(folder, lambda t: t.update({one: t[other].clone(), other: t[one].clone()}))
    seen.add(fingerprint(folder))
    edit(folder, lambda t: t.update(again=t[one].clone()))
    seen.add(fingerprint(folder))
    assert len(seen) == 3


def test_of_a_small_tensor_every_byte_counts(tmp_path):
    save_hf(filled(CONFIG), tmp_path / "base", dtype=torch.float64)
    name = "lm_head.weight"  # 40 x 16 of 8 bytes: more than one sample, less than all
    seen = {fingerprint(tmp_path / "base")}

    def change(tensors: dict) -> None:
        tensors[name].view(-1)[16 * (len(seen) - 1)] += 1

    for _ in range(40):
        edit(tmp_path / "base", change)
        seen.add(fingerprint(tmp_path / "base"))
    assert len(seen) == 41


def test_no_more_than_four_samples_of_a_tensor_are_read(folder, monkeypatch):
    sizes, original = [], os.pread

    def watched(*args) -> bytes:
        sizes.append(len(original(*args)))
        return original(*args)

    monkeypatch.setattr(os, "pread", watched)
    fingerprint(folder)
    tensors = load_file(folder / WEIGHTS)
    assert sum(t.nbytes for t in tensors.values()) > 700_000
    assert sum(sizes) == sum(min(t.nbytes, 4 * 4096) for t in tensors.values())

"""Hugging Face folders: what is written and read, by one process and by ranks together."""

import importlib
import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_llama_tokenizer import train
from torch.distributed.tensor import DTensor

from llama import Llama, LlamaConfig
from llama.weights import hf_name, load_hf, save_hf

CONFIG = LlamaConfig(
    dim=16, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden=24, vocab_size=40, max_seq_len=32
)
# On three ranks a norm of 4 is 2, 2, 0 rows, 2 key rows are 1, 1, 0, 7 of the vocabulary 3, 3, 1.
UNEVEN = LlamaConfig(
    dim=4, n_layers=2, n_heads=2, n_kv_heads=1, ffn_hidden=6, vocab_size=7, max_seq_len=16
)
TIED = LlamaConfig(**{**vars(UNEVEN), "tie_embeddings": True})


def filled(config: LlamaConfig, seed: int = 0) -> Llama:
    model = Llama(config)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 6000, 1])
def test_saved_weights_load_to_the_same_bits(tmp_path, tie_embeddings, max_shard_bytes):
    model = filled(LlamaConfig(**{**vars(CONFIG), "tie_embeddings": tie_embeddings}))
    save_hf(model, tmp_path / "export", max_shard_bytes=max_shard_bytes)
    loaded = filled(LlamaConfig.from_hf(tmp_path / "export"), seed=1)
    load_hf(loaded, tmp_path / "export")
    assert_same(loaded, model)
    assert loaded.config == model.config


def test_files_are_named_sized_and_indexed_as_hugging_face_does(tmp_path):
    model = filled(CONFIG)
    save_hf(model, tmp_path / "export", dtype=torch.bfloat16, max_shard_bytes=3000)
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "export").glob("*.safetensors"))
    assert files == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, 1 + len(files))
    ]
    assert len(files) > 2
    assert index["metadata"]["total_size"] == 2 * CONFIG.num_parameters
    assert set(index["weight_map"]) == {hf_name(name) for name, _ in model.named_parameters()}
    for file in files:
        tensors = load_file(tmp_path / "export" / file)
        assert sum(t.nbytes for t in tensors.values()) <= 3000
        assert {index["weight_map"][name] for name in tensors} == {file}
        assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    described = json.loads((tmp_path / "export" / "config.json").read_text())
    assert described["architectures"] == ["LlamaForCausalLM"]
    assert described["torch_dtype"] == "bfloat16"


def test_one_file_has_an_index_too_and_all_files_the_permissions_of_others(tmp_path):
    umask = os.umask(0o027)
    try:
        save_hf(filled(TIED), tmp_path / "export")
    finally:
        os.umask(umask)
    files = list((tmp_path / "export").iterdir())
    assert "model-00001-of-00001.safetensors" in {path.name for path in files}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * TIED.num_parameters
    assert set(index["weight_map"].values()) == {"model-00001-of-00001.safetensors"}


def test_the_tokenizer_goes_with_the_weights(tmp_path):
    path = train(tmp_path / "any_name.model", bos_id=4, eos_id=5)
    save_hf(filled(CONFIG), tmp_path / "export", tokenizer_path=path)
    assert (tmp_path / "export" / "tokenizer.model").read_bytes() == path.read_bytes()
    for name in ("config.json", "generation_config.json"):
        described = json.loads((tmp_path / "export" / name).read_text())
        assert (described["bos_token_id"], described["eos_token_id"]) == (4, 5)
    reading = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
    assert (reading["bos_token"], reading["add_bos_token"]) == ("<s>", True)


def test_names_are_those_of_hugging_face():
    assert hf_name("layers.13.feed_forward.w3.weight") == "model.layers.13.mlp.up_proj.weight"
    assert hf_name("layers.0.attention.wo.weight") == "model.layers.0.self_attn.o_proj.weight"
    assert hf_name("norm.weight") == "model.norm.weight"
    assert hf_name("output.weight") == "lm_head.weight"
    with pytest.raises(ValueError, match=r"layers\.0\.adapter\.weight has no place"):
        hf_name("layers.0.adapter.weight")


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_type_loads_into_any_other(tmp_path, stored):
    model = filled(CONFIG)
    save_hf(model, tmp_path / "export", dtype=stored)
    for own in (torch.float32, torch.bfloat16):
        loaded = Llama(CONFIG).to(own)
        load_hf(loaded, tmp_path / "export")
        for a, b in zip(loaded.parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b.to(stored).to(own))


def test_old_rotary_tables_and_a_repeated_tied_head_are_passed_over(tmp_path):
    model = filled(TIED)
    save_hf(model, tmp_path / "export")

    def change(tensors: dict) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(1)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit(tmp_path / "export", change)
    loaded = Llama(TIED)
    load_hf(loaded, tmp_path / "export")
    assert_same(loaded, model)


def test_names_that_wrappers_put_in_are_left_out(tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = filled(CONFIG)
    for i, block in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(block)
    save_hf(model, tmp_path / "export")
    loaded = Llama(CONFIG)
    load_hf(loaded, tmp_path / "export")
    assert_same(loaded, filled(CONFIG))
    load_hf(model, tmp_path / "export")


def edit(folder: Path, change) -> None:
    """Change the tensors of an export of one file, which becomes one without an index."""
    (folder / "model.safetensors.index.json").unlink()
    only = folder / "model-00001-of-00001.safetensors"
    tensors = load_file(only)
    only.unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("config", [CONFIG, TIED])
def test_a_model_built_on_meta_gets_memory_as_it_loads(tmp_path, config):
    save_hf(filled(config), tmp_path / "export")
    with torch.device("meta"):
        model = Llama(config).bfloat16()
    model.norm.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"tok_embeddings\.weight.*to_empty"):
        save_hf(model, tmp_path / "other")
    load_hf(model, tmp_path / "export")
    assert_same(model, filled(config).bfloat16())
    assert not model.norm.weight.requires_grad
    assert (model.output.weight is model.tok_embeddings.weight) == config.tie_embeddings


def test_loading_after_to_empty_ties_the_head_again(tmp_path):
    save_hf(filled(TIED), tmp_path / "export")
    with torch.device("meta"):
        model = Llama(TIED)
    model.to_empty(device="cpu")
    load_hf(model, tmp_path / "export")
    assert model.output.weight is model.tok_embeddings.weight
    assert_same(model, filled(TIED))


def shard(config: LlamaConfig, engine) -> Llama:
    """A model on meta, every block and the rest a unit."""
    with torch.device("meta"):
        model = Llama(config)
    for block in model.layers:
        engine.fully_shard(block)
    engine.fully_shard(model)
    return model


def bytes_read(action) -> int:
    """Bytes of weights that `action` read from files."""
    counts, original = [], os.preadv

    def watched(*args):
        counts.append(original(*args))
        return counts[-1]

    os.preadv = watched
    try:
        action()
    finally:
        os.preadv = original
    return sum(counts)


def load_own_rows(root: str, engine_name: str) -> None:
    engine = importlib.import_module(engine_name)
    rank = torch.distributed.get_rank()
    for config, name in ((UNEVEN, "plain"), (TIED, "tied")):
        model, plain = shard(config, engine), filled(config)
        model.to_empty(device="cpu")

        model.init_weights(torch.Generator().manual_seed(0))
        assert_shards(model, plain)

        model.init_weights(torch.Generator().manual_seed(1))
        read = bytes_read(lambda: load_hf(model, Path(root, name)))  # noqa: B023
        assert_shards(model, plain)
        assert read == 4 * sum(p.to_local().numel() for p in model.parameters())

        # A forward leaves the root's parameters unsharded: what is loaded into those gets lost.
        tokens = torch.tensor([[1, 2, 3]])
        model.init_weights(torch.Generator().manual_seed(1))
        model(tokens)
        load_hf(model, Path(root, name))
        model.reshard()
        assert torch.equal(model(tokens), plain(tokens))
        save_hf(model, Path(root, f"{name}-{engine_name}"), max_shard_bytes=150)
        with pytest.raises(ValueError if rank == 0 else RuntimeError, match="exists; remove it"):
            save_hf(model, Path(root, f"{name}-{engine_name}"))


def load_into_meta(root: str, engine_name: str) -> None:
    for config, name in ((UNEVEN, "plain"), (TIED, "tied")):
        model, plain = shard(config, importlib.import_module(engine_name)), filled(config)
        load_hf(model, Path(root, name))
        assert not any(p.to_local().is_meta for p in model.parameters())
        tokens = torch.tensor([[1, 2, 3]])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        for of, by in ((model, optimizer), (plain, reference)):
            of(tokens).square().mean().backward()
            by.step()
        assert torch.allclose(model(tokens), plain(tokens), rtol=1e-5, atol=1e-6)


def assert_shards(model: Llama, plain: Llama) -> None:
    for (key, shard), full in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(shard, DTensor)
        assert torch.equal(shard.full_tensor(), full), key


@pytest.mark.parametrize("engine", ["minifsdp", "torch.distributed.fsdp"])
def test_three_ranks_read_their_own_rows_and_write_what_one_process_writes(
    tmp_path, run_ranks, engine
):
    save_hf(filled(UNEVEN), tmp_path / "plain", max_shard_bytes=150)
    save_hf(filled(TIED), tmp_path / "tied", max_shard_bytes=150)
    run_ranks(3, load_own_rows, str(tmp_path), engine)
    for name in ("plain", "tied"):
        expected = {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()}
        again = tmp_path / f"{name}-{engine}"
        assert {p.name: p.read_bytes() for p in again.iterdir()} == expected
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("engine", ["minifsdp", "torch.distributed.fsdp"])
def test_a_sharded_model_on_meta_loads_its_rows_and_trains(tmp_path, run_ranks, engine):
    save_hf(filled(UNEVEN), tmp_path / "plain")
    save_hf(filled(TIED), tmp_path / "tied")
    run_ranks(3, load_into_meta, str(tmp_path), engine)


def save_on_two_axes(root: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from minifsdp import fully_shard

    model = filled(UNEVEN)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "rows")))
    save_hf(model, Path(root, "replicated"), max_shard_bytes=150)


def test_replicas_write_each_row_once_between_them(tmp_path, run_ranks):
    save_hf(filled(UNEVEN), tmp_path / "plain", max_shard_bytes=150)
    run_ranks(4, save_on_two_axes, str(tmp_path))
    for path in (tmp_path / "plain").iterdir():
        assert (tmp_path / "replicated" / path.name).read_bytes() == path.read_bytes()

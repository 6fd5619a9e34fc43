"""Hugging Face folders: what is written, what is read, and what is refused."""

import json
import os
import stat
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_llama_tokenizer import train
from torch.distributed.fsdp import fully_shard
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks model\.norm\.weight"),
        (lambda t: t.update(extra=torch.ones(1)), r"has, unknown to the model, extra"),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(41, 16)}),
            r"lm_head\.weight has shape \(41, 16\), the model's parameter \(40, 16\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(16, dtype=torch.int8)}),
            r"model\.norm\.weight holds torch\.int8",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, message):
    save_hf(filled(CONFIG), tmp_path / "export")
    edit(tmp_path / "export", change)
    with pytest.raises(ValueError, match=message):
        load_hf(Llama(CONFIG), tmp_path / "export")


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="export: no such folder"):
        load_hf(Llama(CONFIG), tmp_path / "export")
    save_hf(filled(CONFIG), tmp_path / "export", max_shard_bytes=8000)
    first = next((tmp_path / "export").glob("model-00001-*"))
    content = first.read_bytes()
    first.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"model-00001-of-\d+\.safetensors: damaged"):
        load_hf(Llama(CONFIG), tmp_path / "export")
    first.unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00001-of-\d+\.safetensors: no such file"):
        load_hf(Llama(CONFIG), tmp_path / "export")
    (tmp_path / "export" / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match=r"index\.json: not a safetensors index"):
        load_hf(Llama(CONFIG), tmp_path / "export")


def test_parameters_on_meta_are_refused_both_ways(tmp_path):
    save_hf(filled(CONFIG), tmp_path / "export")
    with torch.device("meta"):
        model = Llama(CONFIG)
    with pytest.raises(ValueError, match=r"tok_embeddings\.weight.*to_empty"):
        load_hf(model, tmp_path / "export")
    with pytest.raises(ValueError, match="to_empty"):
        save_hf(model, tmp_path / "other")


def test_loading_after_to_empty_ties_the_head_again(tmp_path):
    save_hf(filled(TIED), tmp_path / "export")
    with torch.device("meta"):
        model = Llama(TIED)
    model.to_empty(device="cpu")
    load_hf(model, tmp_path / "export")
    assert model.output.weight is model.tok_embeddings.weight
    assert_same(model, filled(TIED))


def test_an_existing_export_is_never_overwritten(tmp_path):
    (tmp_path / "empty").mkdir()
    save_hf(filled(CONFIG), tmp_path / "empty")
    only = tmp_path / "empty" / "model-00001-of-00001.safetensors"
    before = only.read_bytes()
    with pytest.raises(ValueError, match="empty: exists; remove it or choose another"):
        save_hf(filled(CONFIG, seed=1), tmp_path / "empty")
    assert only.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["empty"]


def test_a_save_that_fails_leaves_nothing_behind(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.model"):
        save_hf(filled(CONFIG), tmp_path / "export", tokenizer_path=tmp_path / "none.model")
    assert list(tmp_path.iterdir()) == []


def sharded_worker(rank: int, folder: str) -> None:
    root = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    for config, name in ((UNEVEN, "plain"), (TIED, "tied")):
        with torch.device("meta"):
            model = Llama(config)
        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
        model.to_empty(device="cpu")
        plain = filled(config)

        model.init_weights(torch.Generator().manual_seed(0))
        for (key, shard), full in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert isinstance(shard, DTensor)
            assert torch.equal(shard.full_tensor(), full), key

        model.init_weights(torch.Generator().manual_seed(1))
        numels = rows_read(lambda: load_hf(model, root / name))  # noqa: B023
        for (key, shard), full in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(shard.full_tensor(), full), key
        assert numels == sum(p.to_local().numel() for p in model.parameters())

        # A forward leaves the root's parameters unsharded: what is loaded into those gets lost.
        tokens = torch.tensor([[1, 2, 3]])
        model.init_weights(torch.Generator().manual_seed(1))
        model(tokens)
        load_hf(model, root / name)
        model.reshard()
        assert torch.equal(model(tokens), plain(tokens))
        save_hf(model, root / f"{name}-again", max_shard_bytes=150)
        with pytest.raises(ValueError if rank == 0 else RuntimeError, match="exists; remove it"):
            save_hf(model, root / f"{name}-again")
    Path(folder, f"passed{rank}").touch()
    dist.destroy_process_group()


def rows_read(action) -> int:
    """Numbers that `action` read from safetensors slices."""
    import llama.weights

    numels = []

    class Watched:
        def __init__(self, *args, **kwargs):
            self.file = safe_open(*args, **kwargs)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            self.file.__exit__(*error)

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            return WatchedSlice(self.file.get_slice(name))

    class WatchedSlice:
        def __init__(self, stored):
            self.stored = stored
            self.get_shape = stored.get_shape

        def __getitem__(self, rows):
            values = self.stored[rows]
            numels.append(values.numel())
            return values

    original, llama.weights.safe_open = llama.weights.safe_open, Watched
    try:
        action()
    finally:
        llama.weights.safe_open = original
    return sum(numels)


def test_three_ranks_read_their_own_rows_and_write_what_one_process_writes(tmp_path):
    save_hf(filled(UNEVEN), tmp_path / "plain", max_shard_bytes=150)
    save_hf(filled(TIED), tmp_path / "tied", max_shard_bytes=150)
    mp.spawn(sharded_worker, args=(str(tmp_path),), nprocs=3)
    assert all((tmp_path / f"passed{rank}").exists() for rank in range(3))
    for name in ("plain", "tied"):
        expected = {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()}
        written = {p.name: p.read_bytes() for p in (tmp_path / f"{name}-again").iterdir()}
        assert written == expected
    assert not list(tmp_path.glob(".*"))

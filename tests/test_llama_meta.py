"""Meta's folders: their rotary convention, any number of files, and ranks."""

import importlib
import json
import os
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from golden_llama import CASES, golden_model, golden_tokens
from hypothesis import given
from hypothesis import strategies as st
from test_llama_tokenizer import train
from test_llama_weights import CONFIG, TIED, UNEVEN, assert_same, assert_shards, filled, shard

from llama import Llama, LlamaConfig
from llama.weights import load_meta, save_meta
from llama.weights.archive import Archive

FOUR = LlamaConfig(
    dim=32, n_layers=2, n_heads=8, n_kv_heads=4, ffn_hidden=24, vocab_size=40, max_seq_len=4096
)
# How meta-llama's model parallel layers cut matrices: by output rows, or by input columns.
BY_COLUMNS = ("tok_embeddings.weight", "wo.weight", "w2.weight")


def joined(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder of Meta's, whole, as torch.load alone reads it."""
    files = [torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pth"))]
    whole = {}
    for name in files[0]:
        pieces = [tensors[name] for tensors in files]
        dim = 1 if name.endswith(BY_COLUMNS) else 0
        whole[name] = pieces[0] if pieces[0].dim() == 1 else torch.cat(pieces, dim)
    return whole


def meta_logits(w: dict[str, torch.Tensor], params: dict, tokens: torch.Tensor) -> torch.Tensor:
    """Llama 2 in Meta's convention, in which neighbours are one complex number that is turned."""
    heads, kv_heads, eps = params["n_heads"], params["n_kv_heads"], params["norm_eps"]
    batch, seq = tokens.shape
    head_dim = params["dim"] // heads
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(seq).float(), 1.0 / params.get("rope_theta", 1e4) ** pairs)
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[:, None]

    def norm(x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w[f"{name}.weight"]

    def rotate(x):
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn
        return torch.view_as_real(turned).flatten(-2)

    x = w["tok_embeddings.weight"][tokens]
    for i in range(params["n_layers"]):
        own = f"layers.{i}."
        normed = norm(x, own + "attention_norm")
        q, k, v = (
            (normed @ w[f"{own}attention.{name}.weight"].T).view(batch, seq, count, head_dim)
            for name, count in (("wq", heads), ("wk", kv_heads), ("wv", kv_heads))
        )
        k, v = (t.repeat_interleave(heads // kv_heads, dim=2) for t in (rotate(k), v))
        scores = torch.einsum("bqhe,bkhe->bhqk", rotate(q), k) / head_dim**0.5
        hidden = torch.ones(seq, seq, dtype=torch.bool).triu(1)
        mixed = torch.einsum("bhqk,bkhe->bqhe", scores.masked_fill(hidden, -1e30).softmax(-1), v)
        x = x + mixed.flatten(2) @ w[own + "attention.wo.weight"].T
        normed = norm(x, own + "ffn_norm")
        w1, w2, w3 = (w[f"{own}feed_forward.{name}.weight"].T for name in ("w1", "w2", "w3"))
        x = x + (F.silu(normed @ w1) * (normed @ w3)) @ w2
    return norm(x, "norm") @ w["output.weight"].T


@pytest.mark.parametrize("case", CASES)
def test_what_is_saved_computes_the_golden_logits_in_metas_own_convention(tmp_path, case):
    model = golden_model(case)
    shards = {"mha": 4, "gqa": 2, "gqa_theta1e6_tied": 1}[case]
    save_meta(model, tmp_path / "meta", shards=shards)
    params = json.loads((tmp_path / "meta" / "params.json").read_text())
    tokens = golden_tokens(model.config.vocab_size)
    logits = meta_logits(joined(tmp_path / "meta"), params, tokens)
    expected = CASES[case]
    assert logits[0, 23].tolist() == pytest.approx(expected["logits_row0_pos23"], abs=1e-7)
    assert logits.abs().sum().item() == pytest.approx(expected["logit_abs_sum"], rel=1e-9)


def write_as_meta(model: Llama, folder: Path, shards: int, change=None) -> None:
    """A folder of Meta's written with torch.save, by the table of the two conventions."""
    config, files = model.config, [{} for _ in range(shards)]
    for name, p in model.named_parameters():
        whole = p.detach()
        if name.endswith(("wq.weight", "wk.weight")):
            heads = config.n_heads if "wq" in name else config.n_kv_heads
            halves = whole.view(heads, 2, config.head_dim // 2, config.dim)
            whole = halves.transpose(1, 2).reshape(whole.shape)
        dim = 1 if name.endswith(BY_COLUMNS) else 0
        pieces = [whole] * shards if whole.dim() == 1 else whole.chunk(shards, dim)
        for tensors, piece in zip(files, pieces, strict=True):
            tensors[name] = piece.clone()
    if change is not None:
        change(files)
    folder.mkdir(exist_ok=True)
    for k, tensors in enumerate(files):
        torch.save(tensors, folder / f"consolidated.{k:02d}.pth")


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("with_rope_freqs", [False, True])
def test_files_of_any_number_load(tmp_path, shards, with_rope_freqs):
    def add(files):
        for tensors in files if with_rope_freqs else ():
            tensors["rope.freqs"] = torch.ones(2)

    model = filled(FOUR)
    write_as_meta(model, tmp_path, shards, add)
    loaded = filled(FOUR, seed=1)
    load_meta(loaded, tmp_path)
    assert_same(loaded, model)
    with torch.device("meta"):
        built = Llama(FOUR)
    load_meta(built, tmp_path)
    assert_same(built, model)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_saved_files_are_torchs_with_right_checksums(tmp_path, shards):
    model = filled(FOUR)
    save_meta(model, tmp_path / "saved", shards=shards, dtype=torch.bfloat16)
    write_as_meta(model.bfloat16(), tmp_path / "reference", shards)
    for path in (tmp_path / "reference").glob("*.pth"):
        with zipfile.ZipFile(tmp_path / "saved" / path.name) as archive:
            assert archive.testzip() is None
        for options in ({"mmap": True}, {"weights_only": False}):
            ours = torch.load(tmp_path / "saved" / path.name, **options)
            theirs = torch.load(path)
            assert list(ours) == list(theirs)
            for name, tensor in ours.items():
                assert torch.equal(tensor, theirs[name]), name
                assert (tensor.dtype, tensor.stride()) == (torch.bfloat16, theirs[name].stride())
    assert LlamaConfig.from_meta(tmp_path / "saved") == FOUR


def test_a_file_beyond_4_gib_has_8_byte_sizes_and_offsets(tmp_path):
    # Sparse: no byte of the large tensors is ever written.
    large = ((2**16, 2**15), torch.bfloat16)
    tensors = {"a": large, "b": ((3,), torch.float32), "c": large}
    archive = Archive(tmp_path / "x.pth", tensors)
    archive.create()
    fd = os.open(tmp_path / "x.pth", os.O_RDWR)
    os.pwrite(fd, torch.tensor([1.0, 2.0, 3.0]).numpy().tobytes(), archive.offsets["b"])
    sums = {record: 0 for record in archive.tensor_records}
    sums["data/1"] = archive.checksum(fd, "data/1")
    archive.finish(fd, sums)
    os.close(fd)
    loaded = torch.load(tmp_path / "x.pth", mmap=True, weights_only=True)
    assert {name: (tuple(t.shape), t.dtype) for name, t in loaded.items()} == tensors
    assert loaded["b"].tolist() == [1.0, 2.0, 3.0]
    with zipfile.ZipFile(tmp_path / "x.pth") as file:
        assert [i.file_size for i in file.infolist()][-3:] == [2**32, 12, 2**32]
        assert len(file.read("x/data/1")) == 12
    assert (tmp_path / "x.pth").stat().st_size <= archive.largest_bytes


def load_and_save(root: str, engine: str) -> None:
    for config, name, shards in ((UNEVEN, "plain", 1), (TIED, "tied", 1), (FOUR, "four", 4)):
        model = shard(config, importlib.import_module(engine))
        load_meta(model, Path(root, name))
        assert_shards(model, filled(config))
        save_meta(model, Path(root, f"{name}-again"), shards=shards)


@pytest.mark.parametrize("engine", ["minifsdp", "torch.distributed.fsdp"])
def test_three_ranks_load_their_rows_and_write_what_one_process_writes(tmp_path, run_ranks, engine):
    for config, name, shards in ((UNEVEN, "plain", 1), (TIED, "tied", 1), (FOUR, "four", 4)):
        save_meta(filled(config), tmp_path / name, shards=shards)
    run_ranks(3, load_and_save, str(tmp_path), engine)
    for name in ("plain", "tied", "four"):
        expected = {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()}
        written = {p.name: p.read_bytes() for p in (tmp_path / f"{name}-again").iterdir()}
        assert written == expected


def test_a_tied_matrix_is_written_twice_and_must_be_the_same_to_load(tmp_path):
    save_meta(filled(TIED), tmp_path / "meta")
    path = tmp_path / "meta" / "consolidated.00.pth"
    tensors = torch.load(path)
    assert torch.equal(tensors["output.weight"], tensors["tok_embeddings.weight"])
    loaded = Llama(TIED)
    load_meta(loaded, tmp_path / "meta")
    assert_same(loaded, filled(TIED))
    tensors["output.weight"][-1, -1] += 1
    torch.save(tensors, path)
    with pytest.raises(ValueError, match=r"output\.weight differs from tok_embeddings\.weight"):
        load_meta(Llama(TIED), tmp_path / "meta")
    del tensors["output.weight"]
    torch.save(tensors, path)
    load_meta(Llama(TIED), tmp_path / "meta")


@pytest.mark.parametrize(
    ("name", "multiple_of", "ffn_dim_multiplier"),
    [("7b", 256, None), ("13b", 256, None), ("34b", 256, None), ("70b", 4096, 1.3)],
)
def test_params_of_presets_are_metas_own(name, multiple_of, ffn_dim_multiplier):
    params = LlamaConfig.preset(name).to_meta()
    assert params["multiple_of"] == multiple_of
    assert params.get("ffn_dim_multiplier") == ffn_dim_multiplier
    assert params.get("rope_theta") == (1e6 if name == "34b" else None)


@given(half_dim=st.integers(1, 20_000), ffn_hidden=st.integers(1, 200_000))
def test_params_give_any_hidden_size_back(tmp_path_factory, half_dim, ffn_hidden):
    config = LlamaConfig(
        dim=2 * half_dim, n_layers=1, n_heads=1, n_kv_heads=1, ffn_hidden=ffn_hidden
    )
    folder = tmp_path_factory.mktemp("params")
    (folder / "params.json").write_text(json.dumps(config.to_meta()))
    assert LlamaConfig.from_meta(folder) == config


def test_the_tokenizer_goes_with_the_weights(tmp_path):
    path = train(tmp_path / "any_name.model")
    save_meta(filled(CONFIG), tmp_path / "meta", tokenizer_path=path)
    assert (tmp_path / "meta" / "tokenizer.model").read_bytes() == path.read_bytes()

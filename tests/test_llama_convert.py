"""From Hugging Face's format to Meta's and back: the same bits, without a model."""

from pathlib import Path

import pytest
import torch
import warm_python
from safetensors.torch import load_file
from test_llama_tokenizer import train
from test_llama_weights import filled

from llama import Llama, LlamaConfig
from llama.weights import load_hf, load_meta, save_hf, save_meta
from llama.weights.__main__ import main

MHA = LlamaConfig(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=4, ffn_hidden=88, vocab_size=40, max_seq_len=64
)
GQA = LlamaConfig(**{**vars(MHA), "n_heads": 8, "n_kv_heads": 2, "ffn_hidden": 96})
TIED = LlamaConfig(**{**vars(GQA), "tie_embeddings": True, "rope_theta": 1e6, "norm_eps": 1e-6})
CODE = LlamaConfig(**{**vars(GQA), "rope_theta": 1e6, "max_seq_len": 16384})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def command(*args: object) -> int:
    return main(["convert", *map(str, args)])


@pytest.mark.parametrize("config", [MHA, GQA, TIED, CODE], ids=["mha", "gqa", "tied", "code"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_folder_converted_to_meta_and_back_has_the_same_bytes(tmp_path, config, dtype, shards):
    tokenizer = train(tmp_path / "tokenizer.model")
    first, meta, back = tmp_path / "first", tmp_path / "meta", tmp_path / "back"
    save_hf(filled(config), first, dtype=dtype, tokenizer_path=tokenizer)
    assert command("--from", "hf", "--to", "meta", "--shards", shards, first, meta) == 0
    length = ("--max-seq-len", config.max_seq_len)  # Meta does not record it
    assert command("--from", "meta", "--to", "hf", *length, meta, back) == 0
    assert contents(back) == contents(first)
    assert len(list(meta.glob("consolidated.*.pth"))) == shards


@pytest.mark.parametrize("config", [MHA, GQA, TIED], ids=["mha", "gqa", "tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_hf_to_ours_to_meta_to_ours_to_hf_is_exact(tmp_path, config, dtype):
    source = filled(config).to(dtype)
    save_hf(source, tmp_path / "hf")
    ours = Llama(config).to(dtype)
    load_hf(ours, tmp_path / "hf")
    save_meta(ours, tmp_path / "meta", shards=2)
    again = Llama(config).to(dtype)
    load_meta(again, tmp_path / "meta")
    save_hf(again, tmp_path / "hf again")
    assert contents(tmp_path / "hf again") == contents(tmp_path / "hf")


def test_a_model_saves_the_files_that_converting_its_export_gives(tmp_path):
    model = filled(GQA)
    save_hf(model, tmp_path / "hf")
    save_meta(model, tmp_path / "meta", shards=2)
    options = ("--from", "hf", "--to", "meta", "--shards", 2)
    assert command(*options, tmp_path / "hf", tmp_path / "converted") == 0
    assert contents(tmp_path / "converted") == contents(tmp_path / "meta")


def test_a_type_can_be_chosen_within_a_format_too(tmp_path):
    model = filled(GQA)
    save_hf(model, tmp_path / "hf")
    options = ("--from", "hf", "--to", "hf", "--dtype", "bfloat16")
    assert command(*options, tmp_path / "hf", tmp_path / "half") == 0
    tensors = load_file(tmp_path / "half" / "model-00001-of-00001.safetensors")
    assert torch.equal(tensors["lm_head.weight"], model.output.weight.bfloat16())
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}


def test_the_tokenizer_one_folder_up_goes_along(tmp_path):
    save_meta(filled(LlamaConfig(**{**vars(GQA), "vocab_size": 300})), tmp_path / "llama" / "7B")
    tokenizer = train(tmp_path / "llama" / "tokenizer.model")
    options = ("--from", "meta", "--to", "hf")
    assert command(*options, tmp_path / "llama" / "7B", tmp_path / "hf") == 0
    assert (tmp_path / "hf" / "tokenizer.model").read_bytes() == tokenizer.read_bytes()


def test_the_command_says_what_is_wrong_and_leaves_nothing(tmp_path):
    save_hf(filled(GQA), tmp_path / "hf")
    run = ["-m", "llama.weights", "convert", "--from", "hf", "--to", "meta"]
    path = {"PYTHONPATH": str(Path(__file__).parents[1])}

    def answer(*args: object) -> tuple[int, str, str]:
        words = [*run, *map(str, args)]
        done = warm_python.shared().run(words, tmp_path, environment=path, errors_apart=True)
        return done.code, done.output, done.errors

    code, _, said = answer("--shards", 4, tmp_path / "hf", tmp_path / "meta")
    assert code == 2
    assert said == (
        "python -m llama.weights: error: 4 files cannot share 2 (n_kv_heads) evenly: choose a "
        "number that divides it\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    code, said, _ = answer(tmp_path / "hf", tmp_path / "meta")
    assert (code, said) == (0, f"{tmp_path / 'meta'}: {GQA.num_parameters:,} parameters\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--from", "meta", "--to", "hf", "{}/none", "{}/out"], "params.json: no such file"),
        (["--from", "hf", "--to", "meta", "{}/hf", "{}/hf"], "hf: exists; remove it"),
        (["--from", "meta", "--to", "hf", "{}/hf", "{}/out"], "params.json: no such file"),
    ],
)
def test_folders_that_cannot_be_used_are_named(tmp_path, capsys, args, message):
    save_hf(filled(GQA), tmp_path / "hf")
    assert command(*(arg.format(tmp_path) for arg in args)) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]

"""Hugging Face folders that do not fit, or are damaged: refused, naming what and why."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file
from test_llama_weights import CONFIG, edit, filled

from llama import Llama, LlamaConfig
from llama.weights import load_hf, save_hf

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks model\.norm\.weight"),
        (lambda t: t.update(extra=torch.ones(1)), r"has, unknown to the model, extra"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}),
            r"model\.layers\.0\.self_attn\.q_proj\.bias: this Llama has no biases",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(41, 16)}),
            r"lm_head\.weight has shape \(41, 16\), the model's parameter \(40, 16\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(16, dtype=torch.int8)}),
            r"model\.norm\.weight holds torch\.int8, the model's parameter torch\.float32",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(16).to(torch.float8_e4m3fn)}),
            r"model\.norm\.weight holds torch\.float8_e4m3fn",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named_and_nothing_is_changed(tmp_path, change, message):
    save_hf(filled(CONFIG), tmp_path / "export")
    edit(tmp_path / "export", change)
    model = filled(CONFIG, seed=1)
    with pytest.raises(ValueError, match=message):
        load_hf(model, tmp_path / "export")
    for a, b in zip(model.parameters(), filled(CONFIG, seed=1).parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope type is 'linear'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"num_attention_heads": 8, "head_dim": 2}, "its model has 8 heads and 2 key and value"),
    ],
)
def test_a_config_of_another_kind_of_model_is_refused(tmp_path, change, message):
    save_hf(filled(CONFIG), tmp_path / "export")
    path = tmp_path / "export" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        load_hf(Llama(CONFIG), tmp_path / "export")


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="export: no such folder"):
        load_hf(Llama(CONFIG), tmp_path / "export")
    save_hf(filled(CONFIG), tmp_path / "export", max_shard_bytes=8000)
    first = next((tmp_path / "export").glob("model-00001-*"))
    content = first.read_bytes()
    first.write_bytes(content[:-100])
    with pytest.raises(
        ValueError,
        match=rf"model-00001-of-\d+\.safetensors: damaged.* it is "
        rf"{len(content) - 100} bytes long, its header speaks of {len(content)}",
    ):
        load_hf(Llama(CONFIG), tmp_path / "export")
    first.unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00001-of-\d+\.safetensors: no such file"):
        load_hf(Llama(CONFIG), tmp_path / "export")
    (tmp_path / "export" / INDEX).write_text("[]")
    with pytest.raises(ValueError, match=r"index\.json: not a safetensors index"):
        load_hf(Llama(CONFIG), tmp_path / "export")
    outside = {"weight_map": {"model.norm.weight": "../other/model.safetensors"}}
    (tmp_path / "export" / INDEX).write_text(json.dumps(outside))
    with pytest.raises(ValueError, match="outside its folder"):
        load_hf(Llama(CONFIG), tmp_path / "export")


def test_an_index_that_names_the_wrong_file_is_refused(tmp_path):
    save_hf(filled(CONFIG), tmp_path / "export", max_shard_bytes=8000)
    path = tmp_path / "export" / INDEX
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lm_head\.weight not in the file"):
        load_hf(Llama(CONFIG), tmp_path / "export")


def test_pickled_weights_are_not_read(tmp_path):
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin is a pickle"):
        load_hf(Llama(CONFIG), tmp_path)


def rewritten(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0"),
        (b"1234", "bytes long"),
        (b"\xff" * 8 + b"{}", "18446744073709551615 bytes long, the file is 10"),
        (rewritten(b"{", b""), "JSONDecodeError"),
        (rewritten(b"[]", b""), "TypeError"),
        (rewritten(b"\xff\xfe", b""), "UnicodeDecodeError"),
        (rewritten(b"[" * 100_000, b""), "header cannot be read"),
        (rewritten({"a": ONE | {"dtype": "F4"}}, bytes(8)), "type 'F4' is not known"),
        (rewritten({"a": ONE | {"shape": [3]}}, bytes(8)), r"8 bytes are not a tensor F32 of"),
        (rewritten({"a": ONE | {"shape": [-2]}}, bytes(8)), "-2 is no size"),
        (rewritten({"a": ONE | {"shape": "2"}}, bytes(8)), "'2' is no size"),
        (rewritten({"a": {"dtype": "F32"}}, bytes(8)), "KeyError"),
        (rewritten({"a": ONE, "b": ONE}, bytes(8)), "b begins at byte"),
        (rewritten({"a": ONE | {"data_offsets": [4, 12]}}, bytes(12)), "a begins at byte"),
        (rewritten({"a": ONE}, bytes(9)), "its header speaks of"),
    ],
)
def test_a_header_that_lies_is_refused_by_the_files_name(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"model\.safetensors: damaged.*{message}"):
        load_hf(Llama(CONFIG), tmp_path)


def test_a_value_too_large_for_float16_is_refused_not_made_infinite(tmp_path):
    model = filled(CONFIG)
    with torch.no_grad():
        model.norm.weight[3] = 70_000.0
    with pytest.raises(ValueError, match=r"norm\.weight has values beyond float16's"):
        save_hf(model, tmp_path / "half", dtype=torch.float16)
    save_hf(model, tmp_path / "export")
    with pytest.raises(ValueError, match=r"model\.norm\.weight has values beyond float16's"):
        load_hf(Llama(CONFIG).half(), tmp_path / "export")


def test_a_file_by_safetensors_own_writer_loads(tmp_path):
    config = LlamaConfig(dim=4, n_layers=1, n_heads=2, n_kv_heads=1, ffn_hidden=6, vocab_size=7)
    save_hf(filled(config), tmp_path / "export")
    edit(tmp_path / "export", lambda t: t.update({"model.norm.weight": torch.ones(4).half()}))
    model = Llama(config)
    load_hf(model, tmp_path / "export")
    assert torch.equal(
        model.layers[0].attention.wk.weight, filled(config).layers[0].attention.wk.weight
    )
    assert not (tmp_path / "export" / INDEX).exists()
    save_file({"a": torch.ones(1)}, tmp_path / "export" / "unrelated.safetensors")
    load_hf(model, tmp_path / "export")


def test_a_head_of_its_own_is_not_lost_in_a_tied_model(tmp_path):
    save_hf(filled(CONFIG), tmp_path / "hf")
    tied = LlamaConfig(**{**vars(CONFIG), "tie_embeddings": True})
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load_hf(Llama(tied), tmp_path / "hf")

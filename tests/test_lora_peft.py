"""Adapters in the files of Hugging Face's peft: names, shapes, the configuration, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_llama_weights import CONFIG, TIED, filled
from test_lora import TOKENS, with_lora

from llama import Llama
from llama.lora import add_lora, is_adapter, trainable_parameters
from llama.weights import load_hf, load_peft, save_hf, save_peft

ABOVE = "base_model.model.model.layers"


def change_config(folder: Path, **fields) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(folder: Path, change) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.fixture
def saved(tmp_path) -> Path:
    save_peft(with_lora(targets=["wq", "w2"]), tmp_path / "adapters", "some/base")
    return tmp_path / "adapters"


def test_files_are_as_peft_writes_them(saved):
    assert sorted(path.name for path in saved.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    described = json.loads((saved / "adapter_config.json").read_text())
    expected = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "some/base",
        "inference_mode": True,
        "r": 3,
        "lora_alpha": 6,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "down_proj"],
        "bias": "none",
        "use_dora": False,
    }
    assert expected.items() <= described.items()
    tensors = load_file(saved / "adapter_model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {
        f"{ABOVE}.{i}.{layer}.lora_{part}.weight": shape
        for i in range(2)
        for layer, part, shape in (
            ("self_attn.q_proj", "A", (3, 16)),
            ("self_attn.q_proj", "B", (16, 3)),
            ("mlp.down_proj", "A", (3, 24)),
            ("mlp.down_proj", "B", (16, 3)),
        )
    }


def test_values_are_the_adapters_own(saved):
    model = with_lora(targets=["wq", "w2"])
    tensors = load_file(saved / "adapter_model.safetensors")
    layer = model.layers[1].feed_forward.w2
    assert torch.equal(tensors[f"{ABOVE}.1.mlp.down_proj.lora_A.weight"], layer.lora_a.weight)
    assert torch.equal(tensors[f"{ABOVE}.1.mlp.down_proj.lora_B.weight"], layer.lora_b.weight)


@pytest.mark.parametrize("added_before", [False, True])
def test_saved_adapters_load_to_the_same_bits(saved, added_before):
    model, expected = filled(CONFIG), with_lora(targets=["wq", "w2"])
    if added_before:
        add_lora(model, 3, targets=["wq", "w2"], dropout=0.1)
        model.eval()
    load_peft(model, saved)
    assert set(trainable_parameters(model)) == set(trainable_parameters(expected))
    assert torch.equal(model(TOKENS), expected(TOKENS))


def test_a_head_is_called_lm_head_and_may_bring_its_base_along(tmp_path):
    model = with_lora(targets=["output", "wq"], alpha=1.5)
    save_peft(model, tmp_path / "adapters")
    described = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert described["target_modules"] == ["q_proj", "lm_head"]
    assert described["lora_alpha"] == 1.5
    path = tmp_path / "adapters" / "adapter_model.safetensors"
    assert "base_model.model.lm_head.lora_A.weight" in load_file(path)

    def add_base(tensors: dict) -> None:
        tensors["base_model.model.lm_head.base_layer.weight"] = model.output.weight.detach()
        tensors["base_model.model.model.embed_tokens.weight"] = model.tok_embeddings.weight.detach()

    change_tensors(tmp_path / "adapters", add_base)
    other = filled(CONFIG)
    other.output.weight.data.zero_()
    other.tok_embeddings.weight.data.zero_()
    load_peft(other, tmp_path / "adapters")
    assert torch.equal(other(TOKENS), model(TOKENS))


def test_whole_paths_of_layers_are_understood(saved):
    paths = [f"model.layers.{i}.{n}" for i in (0, 1) for n in ("self_attn.q_proj", "mlp.down_proj")]
    change_config(saved, target_modules=paths)
    model = filled(CONFIG)
    load_peft(model, saved)
    assert torch.equal(model(TOKENS), with_lora(targets=["wq", "w2"])(TOKENS))


def test_adapters_in_another_type_are_cast(tmp_path):
    model = with_lora()
    save_peft(model, tmp_path / "adapters", dtype=torch.bfloat16)
    other = filled(CONFIG)
    load_peft(other, tmp_path / "adapters")
    for name, parameter in trainable_parameters(other).items():
        assert torch.equal(parameter, model.get_parameter(name).bfloat16().float())


def test_a_model_on_meta_gets_memory_as_it_loads(tmp_path, saved):
    save_hf(filled(CONFIG), tmp_path / "base")
    with torch.device("meta"):
        model = Llama(CONFIG)
    load_peft(model, saved)
    assert [name for name, p in model.named_parameters() if not p.is_meta] == [
        name for name, _ in model.named_parameters() if is_adapter(name)
    ]
    load_hf(model, tmp_path / "base")
    assert torch.equal(model(TOKENS), with_lora(targets=["wq", "w2"])(TOKENS))


def test_fields_that_change_nothing_are_passed_over(saved):
    change_config(
        saved,
        peft_version="0.21.2",
        megatron_core="megatron.core",
        qalora_group_size=16,
        rank_pattern={},
        modules_to_save=None,
        use_rslora=False,
        init_lora_weights="gaussian",
        revision="main",
        a_field_of_tomorrow=None,
    )
    load_peft(filled(CONFIG), saved)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("use_rslora", True),
        ("bias", "lora_only"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 2}),
        ("layers_to_transform", [1]),
        ("init_lora_weights", "pissa"),
        ("peft_type", "LOHA"),
        ("a_field_of_tomorrow", {"twice": True}),
    ],
)
def test_what_is_more_than_plain_lora_is_refused_by_name(saved, field, value):
    change_config(saved, **{field: value})
    refused(saved, rf"adapter_config\.json: {field} is .*not supported")


def refused(folder: Path, reason: str, model: Llama | None = None) -> None:
    """Loading raises and changes nothing."""
    model = model or filled(CONFIG)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=reason):
        load_peft(model, folder)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"r": "3"}, "r is '3', no number"),
        ({"lora_alpha": None}, "lora_alpha is None, no number"),
        ({"target_modules": 5}, "target_modules is 5, no list"),
        ({"target_modules": ["q_proj", "conv1"]}, "target_modules has conv1, no linear layer"),
        ({"target_modules": ["q_proj"]}, "has, unknown to the model,.*down_proj"),
        ({"target_modules": ["q_proj", "down_proj", "k_proj"]}, "lacks .*k_proj"),
        ({"r": 4}, r"lora_[AB]\.weight has shape .*the rank that adapter_config"),
        ({"r": 0}, "rank must be a positive integer"),
    ],
    ids=str,
)
def test_a_configuration_that_does_not_fit_its_tensors_is_refused(saved, fields, reason):
    change_config(saved, **fields)
    refused(saved, reason)


def test_tensors_that_do_not_fit_are_refused(saved):
    name = f"{ABOVE}.0.self_attn.q_proj.lora_A.weight"
    change_tensors(saved, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    refused(saved, r"q_proj\.lora_A\.weight holds torch\.int8")
    change_tensors(saved, lambda tensors: tensors.pop(name))
    refused(saved, r"lacks .*layers\.0\.self_attn\.q_proj\.lora_A\.weight")
    refused(saved, "", Llama(TIED))


@pytest.mark.parametrize("settings", [{"rank": 2}, {"alpha": 1}, {"targets": "wq"}], ids=str)
def test_other_adapters_than_the_models_are_refused(saved, settings):
    model = with_lora(**{"targets": ["wq", "w2"], **settings})
    refused(
        saved, "it describes rank 3, alpha 6 and layers q_proj, down_proj, but the model", model
    )


def test_folders_without_files_and_models_without_adapters_are_refused(tmp_path, saved):
    with pytest.raises(FileNotFoundError, match=r"none/adapter_config\.json: no such file"):
        load_peft(filled(CONFIG), tmp_path / "none")
    (saved / "adapter_model.safetensors").rename(saved / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.bin is a pickle"):
        load_peft(filled(CONFIG), saved)
    (saved / "adapter_config.json").write_text("[")
    refused(saved, "adapter_config.json: no JSON object")
    with pytest.raises(ValueError, match="no LoRA adapters to save"):
        save_peft(filled(CONFIG), tmp_path / "other")
    with pytest.raises(ValueError, match="exists; remove it"):
        save_peft(with_lora(), saved)

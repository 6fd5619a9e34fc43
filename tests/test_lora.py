"""Adapters of a plain model: what is added, frozen, computed, kept for backward and exported."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_llama_weights import CONFIG, TIED, assert_same, filled
from test_llama_weights_publish import allocated_bytes
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from llama import Llama, LlamaConfig
from llama.lora import (
    LoRALinear,
    adapters,
    add_lora,
    freeze,
    init_lora,
    is_adapter,
    trainable_parameters,
)
from llama.weights import load_hf, load_meta, ranges, save_hf, save_meta, stored_dtype

TOKENS = torch.randint(40, (3, 9), generator=torch.Generator().manual_seed(0))
LAYERS = ["w1", "w2", "w3", "wk", "wo", "wq", "wv"]


def with_lora(dtype: torch.dtype = torch.float32, **settings) -> Llama:
    """A filled model whose adapters change what it computes."""
    model = filled(CONFIG).to(dtype)
    add_lora(model, **{"rank": 3, "targets": "all-linear", **settings})
    init_lora(model, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for layer in adapters(model).values():
            b = layer.lora_b.weight
            b.copy_(torch.empty(b.shape).normal_(0.0, 0.1, generator=generator))
    return model


# ---- What is added


def test_adapters_go_beside_the_targets_and_all_else_is_frozen_under_its_name():
    model, bare = filled(CONFIG), filled(CONFIG)
    add_lora(model, 3, targets=["wq", "w2"])
    names = {name for name, _ in model.named_parameters()}
    added = {
        f"layers.{i}.{layer}.{part}.weight"
        for i in range(2)
        for layer in ("attention.wq", "feed_forward.w2")
        for part in ("lora_a", "lora_b")
    }
    assert names - added == {name for name, _ in bare.named_parameters()}
    assert set(trainable_parameters(model)) == added == {n for n in names if is_adapter(n)}
    assert model.layers[0].feed_forward.w2.lora_a.weight.shape == (3, CONFIG.ffn_hidden)
    assert model.layers[0].feed_forward.w2.lora_b.weight.shape == (CONFIG.dim, 3)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("wq", ["wq"]),
        ("q_proj", ["wq"]),
        (["q_proj", "wq", "down_proj"], ["w2", "wq"]),
        (["k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"], ["w1", "w3", "wk", "wo", "wv"]),
        ("all-linear", LAYERS),
        (("all-linear", "lm_head"), ["output", *LAYERS]),
    ],
)
def test_targets_have_our_names_or_hugging_faces(targets, expected):
    with torch.device("meta"):
        model = Llama(CONFIG)
    add_lora(model, 2, targets=targets)
    layers = adapters(model)
    assert sorted({path.rpartition(".")[2] for path in layers}) == expected
    assert len(layers) == 2 * len(expected) - ("output" in expected)


def test_the_attention_is_adapted_and_alpha_twice_the_rank_unless_said():
    with torch.device("meta"):
        model = Llama(CONFIG)
    add_lora(model, 5)
    assert {path.rpartition(".")[2] for path in adapters(model)} == {"wq", "wk", "wv", "wo"}
    assert {(a.rank, a.alpha, a.scale) for a in adapters(model).values()} == {(5, 10, 2.0)}


def test_new_adapters_change_nothing_even_before_they_are_initialised():
    model = filled(CONFIG)
    before = model(TOKENS)
    add_lora(model, 3, targets="all-linear")
    assert torch.equal(model(TOKENS), before)
    init_lora(model, torch.Generator())
    assert torch.equal(model(TOKENS), before)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"targets": ["wq", "q"]}, r"unknown LoRA targets q: choose among wq \(q_proj\).*lm_head"),
        ({"targets": []}, "no LoRA targets: choose among wq"),
        ({"rank": 0}, "rank must be a positive integer, not 0"),
        ({"rank": None}, "rank must be a positive integer, not None"),
        ({"rank": 2.0}, "rank must be a positive integer, not 2.0"),
        ({"rank": 25, "targets": "w1"}, r"rank 25 is larger than both .*w1, \(24, 16\)"),
        ({"alpha": 0}, "alpha must be a positive number, not 0"),
        ({"alpha": math.nan}, "alpha must be a positive number, not nan"),
        ({"dropout": 1.0}, r"dropout must be at least 0 and below 1, not 1\.0"),
        ({"base_dtype": torch.int8}, r"cannot be stored as torch\.int8"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_anything_is_changed(settings, reason):
    model = filled(CONFIG)
    with pytest.raises(ValueError, match=reason):
        add_lora(model, **{"rank": 2, **settings})
    assert not adapters(model)
    assert all(p.requires_grad for p in model.parameters())


def test_a_second_time_a_tied_head_and_other_modules_are_refused():
    model = filled(CONFIG)
    add_lora(model, 24, targets="w1")  # not larger than the larger dimension
    with pytest.raises(ValueError, match="has LoRA adapters already"):
        add_lora(model, 2)
    with pytest.raises(ValueError, match=r"tied to the embedding.*choose other LoRA targets"):
        add_lora(filled(TIED), 2, targets="lm_head")
    with pytest.raises(ValueError, match=r"takes a Llama.*not Sequential"):
        add_lora(nn.Sequential(filled(CONFIG)), 2)
    with pytest.raises(ValueError, match="no LoRA adapters: call add_lora"):
        init_lora(filled(CONFIG), torch.Generator())


# ---- What is computed


def test_a_layer_computes_the_formula():
    layer = LoRALinear(nn.Linear(5, 7, bias=False).double(), rank=2, alpha=6, dropout=0.0)
    x = torch.randn(4, 5, dtype=torch.float64)
    for parameter in layer.parameters():
        parameter.data.normal_()
    expected = x @ layer.weight.T + 3 * (x @ layer.lora_a.weight.T) @ layer.lora_b.weight.T
    assert torch.allclose(layer(x), expected, rtol=1e-14)


def test_gradients_are_those_of_the_sum_of_both_matrices():
    model, bare = with_lora(torch.float64), filled(CONFIG).double()
    sums = {}
    for path, layer in adapters(model).items():
        sums[path] = nn.Parameter(
            layer.weight + layer.scale * layer.lora_b.weight @ layer.lora_a.weight
        )
        bare.get_submodule(path).weight = sums[path]
    for each in (model, bare):
        each(TOKENS).square().mean().backward()
    for path, layer in adapters(model).items():
        full = sums[path].grad * layer.scale
        assert torch.allclose(layer.lora_b.weight.grad, full @ layer.lora_a.weight.T, rtol=1e-9)
        assert torch.allclose(layer.lora_a.weight.grad, layer.lora_b.weight.T @ full, rtol=1e-9)
        assert layer.weight.grad is None


def test_a_frozen_layer_keeps_no_input_and_computes_no_gradient_of_its_own():
    """Of one layer, backward needs its matrices, one input and A's product with it."""
    layer = LoRALinear(nn.Linear(64, 64, bias=False).requires_grad_(False), 2, 4, dropout=0.0)
    x = torch.randn(128, 64, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = layer(x).sum()
    weights = sum(p.nbytes for p in layer.parameters())
    assert sum(kept.values()) == weights + x.nbytes + 128 * 2 * 4
    loss.backward()
    assert layer.weight.grad is None
    assert x.grad is not None


def test_dropout_is_of_the_adapters_input_while_training():
    model = with_lora(dropout=0.5)
    model.eval()
    assert torch.equal(model(TOKENS), with_lora()(TOKENS))
    model.train()
    assert not torch.equal(model(TOKENS), model(TOKENS))
    layer = LoRALinear(nn.Linear(4, 4, bias=False), 2, 4, dropout=0.5)
    layer.lora_b.weight.data.normal_()
    x = torch.randn(3, 4)
    torch.manual_seed(0)
    result = layer(x)
    torch.manual_seed(0)
    low = F.dropout(x, 0.5) @ layer.lora_a.weight.T
    expected = x @ layer.weight.T + 2 * low @ layer.lora_b.weight.T
    assert torch.allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 40 * 10, 2**20])
def test_an_adapted_head_gives_losses_in_chunks_without_gradients_of_its_matrix(chunk_bytes):
    model = with_lora(targets=["output", "wv"])
    model.output.chunk_bytes = chunk_bytes
    targets = TOKENS.roll(-1, 1)
    targets[1, 3:] = -100
    expected = F.cross_entropy(
        model(TOKENS).transpose(1, 2), targets, ignore_index=-100, reduction="none"
    )
    expected.sum().backward()
    gradients = {name: p.grad for name, p in trainable_parameters(model).items()}
    model.zero_grad(set_to_none=True)
    losses = model(TOKENS, targets=targets)
    assert torch.allclose(losses, expected, atol=1e-6)
    losses.sum().backward()
    for name, parameter in trainable_parameters(model).items():
        assert torch.allclose(parameter.grad, gradients[name], atol=1e-5), name
    assert model.output.weight.grad is None


# ---- Types


def test_a_frozen_base_may_be_stored_in_bfloat16_beside_float32_adapters():
    with torch.device("meta"):
        model = Llama(CONFIG)
    add_lora(model, 3, base_dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        expected = torch.float32 if is_adapter(name) else torch.bfloat16
        assert (parameter.dtype, parameter.is_meta) == (expected, True), name
    model.to_empty(device="cpu")
    model.init_weights(torch.Generator().manual_seed(0))
    init_lora(model, torch.Generator().manual_seed(0))
    logits = model(TOKENS)
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits, filled(CONFIG).bfloat16()(TOKENS))
    logits.float().square().mean().backward()
    assert {p.grad.dtype for p in trainable_parameters(model).values()} == {torch.float32}


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_adapters_are_float32_at_least(base, expected):
    model = Llama(CONFIG).to(base)
    add_lora(model, 3)
    assert {p.dtype for p in trainable_parameters(model).values()} == {expected}


def test_freezing_casts_a_tied_matrix_once_and_spares_adapters():
    model = filled(TIED)
    add_lora(model, 2)
    freeze(model, torch.bfloat16)
    assert model.output.weight is model.tok_embeddings.weight
    assert model.output.weight.dtype == torch.bfloat16
    assert all(p.requires_grad == is_adapter(name) for name, p in model.named_parameters())
    assert {p.dtype for p in trainable_parameters(model).values()} == {torch.float32}


# ---- First values


def test_first_values_depend_on_seed_name_and_shape_alone():
    def values(targets: object, seed: int) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model = Llama(CONFIG)
        add_lora(model, 3, targets=targets)
        load = torch.Generator().manual_seed(seed)
        model.to_empty(device="cpu")
        init_lora(model, load)
        return trainable_parameters(model)

    few, many, other = values("wv", 0), values("all-linear", 0), values("wv", 1)
    assert all(torch.equal(few[name], many[name]) for name in few)
    a = "layers.0.attention.wv.lora_a.weight"
    assert not torch.equal(few[a], other[a])
    assert not torch.equal(few[a], few[a.replace("layers.0", "layers.1")])


def test_a_is_uniform_with_pefts_bound_and_b_zero():
    model = with_lora()
    init_lora(model, torch.Generator().manual_seed(0))
    for name, parameter in trainable_parameters(model).items():
        if name.endswith("lora_b.weight"):
            assert not parameter.any()
            continue
        bound = 1 / math.sqrt(parameter.shape[1])
        assert parameter.abs().max() < bound
        assert parameter.abs().max() > 0.9 * bound
        assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.25)


# ---- Exports

FLOATS = [torch.float16, torch.bfloat16, torch.float32]


def on_files(folder: Path, dtype: torch.dtype) -> Llama:
    """A model with adapters over a base that lies in files, and is stored, as `dtype`."""
    save_hf(filled(CONFIG), folder, dtype=dtype)
    model = with_lora(targets=["wq", "w2", "output"], base_dtype=stored_dtype(folder))
    load_hf(model, folder)
    return model


def exported(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The parameters of an export by our names, in `dtype`; Meta's files or Hugging Face's."""
    model = Llama(CONFIG).to(dtype)
    (load_meta if (folder / "params.json").exists() else load_hf)(model, folder)
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("save", [save_hf, save_meta])
def test_an_export_is_the_base_in_its_files_plus_the_product_rounded_once(
    tmp_path, save, stored, to
):
    model = on_files(tmp_path / "base", stored)
    expected, layers = exported(tmp_path / "base"), adapters(model)
    for path, layer in layers.items():
        product = layer.scale * (layer.lora_b.weight @ layer.lora_a.weight)
        expected[f"{path}.weight"] = (expected[f"{path}.weight"] + product).detach()
    save(model, tmp_path / "export", dtype=to)
    assert len(layers) == 5
    for name, values in exported(tmp_path / "export", to).items():
        assert torch.equal(values, expected[name].to(to)), name


@pytest.mark.parametrize("base_dtype", [torch.float16, None])
def test_without_a_type_a_sum_is_written_as_its_matrix_is_stored(tmp_path, base_dtype):
    save_hf(with_lora(base_dtype=base_dtype), tmp_path / "export")
    assert stored_dtype(tmp_path / "export") == (base_dtype or torch.float32)


def test_an_export_leaves_the_model_as_it_is_and_computes_the_same(tmp_path):
    model = with_lora()
    before, bare = model(TOKENS), filled(CONFIG)(TOKENS)
    assert (before - bare).abs().max() > 1e-3
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    save_hf(model, tmp_path / "export")
    assert torch.equal(model(TOKENS), before)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, kept[name]), name
        assert parameter.requires_grad == is_adapter(name)
    loaded = Llama(CONFIG)
    load_hf(loaded, tmp_path / "export")  # refuses tensors it does not know
    assert (loaded(TOKENS) - before).abs().max() < 1e-5


def test_a_sum_beyond_float16_is_refused_not_made_infinite(tmp_path):
    model = with_lora(targets="wq")
    model.layers[1].attention.wq.lora_b.weight.data.fill_(1e6)
    with pytest.raises(ValueError, match=r"layers\.1\.attention\.wq\.weight has values beyond"):
        save_hf(model, tmp_path / "export", dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []


def test_names_that_wrappers_put_in_do_not_part_a_matrix_from_its_adapter(tmp_path):
    save_hf(with_lora(), tmp_path / "plain")
    model = with_lora()
    for i, block in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(block)
    save_hf(model, tmp_path / "wrapped")
    plain, wrapped = exported(tmp_path / "plain"), exported(tmp_path / "wrapped")
    assert all(torch.equal(plain[name], wrapped[name]) for name in plain)


@pytest.mark.parametrize("save", [save_hf, save_meta])
def test_sums_are_made_in_buffers(tmp_path, monkeypatch, save):
    config = LlamaConfig(dim=128, n_layers=1, n_heads=8, n_kv_heads=4, ffn_hidden=512, vocab_size=8)
    model, buffer = filled(config), 16 * 1024
    add_lora(model, 2, targets="all-linear", base_dtype=torch.bfloat16)
    monkeypatch.setattr(ranges, "CHUNK_BYTES", buffer)
    used = allocated_bytes(lambda: save(model, tmp_path / "export", dtype=torch.float16))
    assert used < 6 * buffer  # the largest matrix is 16 buffers, in float32


@pytest.mark.parametrize("meta", [False, True])
def test_a_base_loads_beside_adapters_and_leaves_them_alone(tmp_path, meta):
    save_hf(filled(CONFIG), tmp_path / "base")
    if meta:
        with torch.device("meta"):
            model = Llama(CONFIG)
        add_lora(model, 3)
        load_hf(model, tmp_path / "base")
        assert all(p.is_meta for p in trainable_parameters(model).values())
        init_lora(model, torch.Generator().manual_seed(1))
        assert all(p.requires_grad for name, p in model.named_parameters() if is_adapter(name))
        assert torch.equal(model(TOKENS), filled(CONFIG)(TOKENS))
    else:
        model = with_lora()
        kept = {name: p.clone() for name, p in trainable_parameters(model).items()}
        model.tok_embeddings.weight.data.zero_()
        load_hf(model, tmp_path / "base")
        for name, parameter in trainable_parameters(model).items():
            assert torch.equal(parameter, kept[name])
    bare = filled(CONFIG)
    for name, parameter in bare.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    assert_same(bare, filled(CONFIG))

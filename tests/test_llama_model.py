"""The model against independent figures, and what sharding engines and compilers need of it."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from golden_llama import CASES, golden_model, golden_tokens

from llama import Llama, LlamaConfig
from llama.model import RMSNorm, RotaryTables
from llama.weights import hf_name

SMALL = LlamaConfig(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden=48, vocab_size=64, max_seq_len=32
)


def small_model(**changes: object) -> Llama:
    model = Llama(LlamaConfig(**{**vars(SMALL), **changes}))
    model.init_weights(torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize("case", CASES)
def test_golden_logits_loss_and_gradient_norms_to_1e_7(case):
    expected = CASES[case]
    model = golden_model(case)
    tokens = golden_tokens(model.config.vocab_size)
    logits = model(tokens)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-7)
    assert logits[0, 23].tolist() == pytest.approx(expected["logits_row0_pos23"], abs=1e-7)
    assert logits[1, 5, :8].tolist() == pytest.approx(expected["logits_row1_pos5_first8"], abs=1e-7)
    assert logits.sum().item() == pytest.approx(expected["logit_sum"], abs=1e-7)
    assert logits.abs().sum().item() == pytest.approx(expected["logit_abs_sum"], abs=1e-7)
    norms = {hf_name(name): p.grad.norm().item() for name, p in model.named_parameters()}
    assert norms == pytest.approx(expected["grad_norms"], abs=1e-7)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("7b", 6_738_415_616),
        ("13b", 13_015_864_320),
        ("34b", 33_743_970_304),
        ("70b", 68_976_648_192),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, parameters):
    config = LlamaConfig.preset(name)
    assert config.num_parameters == parameters
    with torch.device("meta"):
        model = Llama(config)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_a_tied_head_is_the_embedding_and_counts_once():
    model = small_model(tie_embeddings=True)
    assert model.output.weight is model.tok_embeddings.weight
    assert sum(p.numel() for p in model.parameters()) == model.config.num_parameters


def test_a_model_built_on_meta_and_materialised_equals_a_plain_one():
    plain = small_model(tie_embeddings=True)
    with torch.device("meta"):
        model = Llama(plain.config)
    assert model(torch.zeros(1, 3, dtype=torch.int64, device="meta")).shape == (1, 3, 64)
    model.to_empty(device="cpu")
    model.init_weights(torch.Generator().manual_seed(1))
    tokens = torch.arange(12).view(2, 6)
    assert model.output.weight is model.tok_embeddings.weight
    assert torch.equal(model(tokens), plain(tokens))


def test_init_refuses_parameters_still_on_meta():
    with torch.device("meta"):
        model = Llama(SMALL)
    with pytest.raises(ValueError, match=r"meta device.*to_empty"):
        model.init_weights(torch.Generator())


def test_init_depends_on_the_seed_and_scales_residual_outputs_by_depth():
    one, same = small_model(), small_model()
    other = Llama(SMALL)
    other.init_weights(torch.Generator().manual_seed(2))
    for (name, a), b, c in zip(
        one.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b)
        assert torch.equal(a, c) == (a.dim() == 1), name
    large = small_model(dim=128, ffn_hidden=512, n_layers=8)
    assert large.layers[7].attention.wq.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert large.layers[7].attention.wo.weight.std().item() == pytest.approx(0.005, rel=0.05)
    assert large.layers[0].feed_forward.w2.weight.std().item() == pytest.approx(0.005, rel=0.05)


def test_rotary_tables_stay_float32_and_out_of_the_state_in_a_bfloat16_model():
    model = small_model().bfloat16()
    assert model(torch.zeros(1, 4, dtype=torch.int64)).dtype == torch.bfloat16
    assert all(table.dtype == torch.float32 for table in model.rotary.on(torch.device("cpu")))
    assert not any("rotary" in name for name in model.state_dict())
    assert list(model.buffers()) == []


def test_rotary_angles_are_right_to_float32_at_the_last_position():
    cos, sin = RotaryTables(128, 10000.0, 4096).on(torch.device("cpu"))
    frequencies = 10000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    angles = torch.arange(4096, dtype=torch.float64)[:, None] * frequencies
    torch.testing.assert_close(cos.double(), angles.cos(), rtol=0, atol=5e-4)
    torch.testing.assert_close(sin.double(), angles.sin(), rtol=0, atol=5e-4)


def test_rotary_tables_first_used_in_inference_mode_still_train():
    model = small_model()
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with torch.inference_mode():
        model(tokens)
    model(tokens).sum().backward()


def test_a_deep_copy_computes_the_same_and_shares_no_parameter():
    model = small_model()
    twin = copy.deepcopy(model)
    tokens = torch.arange(6)[None]
    assert torch.equal(model(tokens), twin(tokens))
    assert not {id(p) for p in model.parameters()} & {id(p) for p in twin.parameters()}


def test_attention_sees_relative_positions_only_and_no_later_token():
    model = small_model().double()
    tokens = torch.randint(64, (2, 10), generator=torch.Generator().manual_seed(0))
    logits = model(tokens)
    shifted = model(tokens, positions=torch.arange(5, 15).expand(2, 10))
    torch.testing.assert_close(shifted, logits, atol=1e-6, rtol=0)
    stretched = model(tokens, positions=torch.arange(0, 20, 2))
    assert (stretched - logits).abs().max() > 1e-5
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 64
    assert torch.equal(model(changed)[:, :7], logits[:, :7])


def test_rms_norm_of_bfloat16_is_computed_in_float32():
    norm = RMSNorm(64, 1e-5).bfloat16()
    x = (torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 100).bfloat16()
    wide = x.float()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x).float(), expected, rtol=2**-8, atol=0)


def test_blocks_take_no_floating_point_besides_x():
    model = small_model()
    seen = []
    model.layers[0].register_forward_pre_hook(lambda _, args: seen.extend(args[1:]))
    model(torch.arange(12).view(2, 6))
    assert not any(isinstance(a, torch.Tensor) and a.is_floating_point() for a in seen)


def test_blocks_compile_without_a_graph_break_for_any_length():
    model, plain = small_model(), small_model()
    torch._dynamo.reset()
    for block in model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    for seq in (6, 9, 1, 20):
        tokens = torch.arange(2 * seq).view(2, seq)
        torch.testing.assert_close(model(tokens), plain(tokens))


def test_wrong_shapes_and_too_long_sequences_are_refused():
    model = small_model()
    with pytest.raises(ValueError, match=r"33 tokens exceeds max_seq_len 32"):
        model(torch.zeros(1, 33, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"must be \(batch, seq\)"):
        model(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"positions must be"):
        model(torch.zeros(2, 4, dtype=torch.int64), positions=torch.arange(5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(dim=30), r"dim \(30\) must be a multiple of n_heads \(4\)"),
        (dict(n_kv_heads=3), r"n_heads \(4\) must be a multiple of n_kv_heads \(3\)"),
        (dict(dim=12), r"must be even"),
        (dict(n_layers=0), r"n_layers must be a positive integer"),
        (dict(vocab_size=1.5), r"vocab_size must be a positive integer"),
        (dict(norm_eps=0), r"norm_eps must be a positive number"),
    ],
)
def test_an_inconsistent_configuration_names_the_fields(changes, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**{**vars(SMALL), **changes})


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match="70b, tiny"):
        LlamaConfig.preset("8b")


def test_config_survives_a_trip_through_config_json(tmp_path):
    for name in ("tiny", "34b"):
        config = LlamaConfig.preset(name)
        (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
        assert LlamaConfig.from_hf(tmp_path) == config


def test_config_json_of_transformers_5_keeps_its_rope_theta(tmp_path):
    hf = LlamaConfig.preset("34b").to_hf()
    del hf["rope_theta"]
    hf["rope_parameters"] = {"rope_theta": 1e6, "rope_type": "default"}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    assert LlamaConfig.from_hf(tmp_path).rope_theta == 1e6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model_type="mistral"), "model_type is 'mistral'"),
        (dict(rope_scaling={"rope_type": "llama3", "factor": 8}), "rope type is 'llama3'"),
        (dict(attention_bias=True), "attention_bias is True"),
        (dict(head_dim=64), "head_dim is 64"),
        (dict(hidden_size="big"), "'hidden_size' must be a positive integer"),
        (dict(rms_norm_eps="a"), "'rms_norm_eps' must be a positive number, not 'a'"),
        (dict(rope_theta="x"), "'rope_theta' must be a positive number, not 'x'"),
        (dict(rope_scaling="yarn"), "'rope_scaling' must be an object or null, not 'yarn'"),
        (dict(max_position_embeddings=0), "'max_position_embeddings' must be a positive integer"),
        (dict(num_key_value_heads=3), "must be a multiple of n_kv_heads"),
    ],
)
def test_a_config_json_that_is_not_llama_2_is_refused_by_field(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps({**SMALL.to_hf(), **changes}))
    with pytest.raises(ValueError, match=f"config.json.*{message}"):
        LlamaConfig.from_hf(tmp_path)


@pytest.mark.parametrize(
    ("name", "meta"),
    [
        ("7b", dict(dim=4096, multiple_of=256, n_heads=32, n_layers=32)),
        ("13b", dict(dim=5120, multiple_of=256, n_heads=40, n_layers=40)),
        (
            "34b",
            dict(
                dim=8192,
                multiple_of=256,
                ffn_dim_multiplier=1.0,
                n_heads=64,
                n_kv_heads=8,
                n_layers=48,
                rope_theta=1000000,
            ),
        ),
        (
            "70b",
            dict(
                dim=8192,
                multiple_of=4096,
                ffn_dim_multiplier=1.3,
                n_heads=64,
                n_kv_heads=8,
                n_layers=80,
                vocab_size=-1,
            ),
        ),
    ],
)
def test_meta_params_json_gives_the_preset(tmp_path, name, meta):
    (tmp_path / "params.json").write_text(json.dumps({**meta, "norm_eps": 1e-5}))
    assert LlamaConfig.from_meta(tmp_path) == LlamaConfig.preset(name)


def test_missing_and_malformed_config_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        LlamaConfig.from_hf(tmp_path)
    (tmp_path / "params.json").write_text("{")
    with pytest.raises(ValueError, match=r"params\.json: not valid JSON"):
        LlamaConfig.from_meta(tmp_path)

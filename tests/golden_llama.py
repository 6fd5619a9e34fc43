"""The models and tokens that the figures in golden_llama.json were made with."""

import json
from pathlib import Path

import torch

from llama import Llama, LlamaConfig
from llama.weights import hf_name

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())["cases"]


def golden_model(case: str) -> Llama:
    """The configuration in float64, each weight filled by the formula in the file."""
    hf = CASES[case]["config"]
    config = LlamaConfig(
        dim=hf["hidden_size"],
        n_layers=hf["num_hidden_layers"],
        n_heads=hf["num_attention_heads"],
        n_kv_heads=hf["num_key_value_heads"],
        ffn_hidden=hf["intermediate_size"],
        vocab_size=hf["vocab_size"],
        norm_eps=hf["rms_norm_eps"],
        rope_theta=hf["rope_theta"],
        max_seq_len=64,
        tie_embeddings=hf["tie_word_embeddings"],
    )
    model = Llama(config).double()
    parameters = {hf_name(name): p for name, p in model.named_parameters()}
    for t, name in enumerate(sorted(parameters)):
        k = torch.arange(parameters[name].numel(), dtype=torch.float64)
        if parameters[name].dim() == 1:
            values = 1 + 0.1 * torch.cos(0.7 * k + t)
        else:
            values = 0.08 * torch.sin(torch.fmod(0.37 * k * k, 1000) + 0.61 * k + 1.3 * t)
        parameters[name].data.copy_(values.view_as(parameters[name]))
    return model


def golden_tokens(vocab_size: int) -> torch.Tensor:
    """`(2, 24)` token ids."""
    rows = [[(7 * i * i + 13 * i + 31 * b + 3) % vocab_size for i in range(24)] for b in range(2)]
    return torch.tensor(rows)

"""Low-rank adapters: beside each frozen matrix W a trained product, `W x + scale * B (A x)`
(Hu et al., arXiv:2106.09685; targets and first values as Hugging Face's peft has them).

    with torch.device("meta"):
        model = Llama(config)
    add_lora(model, rank=16)  # then shard, model.to_empty, load_hf
    init_lora(model, torch.Generator().manual_seed(0))

The optimizer is given `trainable_parameters(model)`. `llama.weights.save_hf` and `save_meta` write
the sums of matrices and adapters, `save_peft` the adapters on their own.

What is where: `layers` (what is computed), `add` (which layers, what is frozen, first values),
`merge` (the sums).
"""

from llama.lora.add import (
    ALL_LINEAR,
    ATTENTION,
    HF_TARGETS,
    add_lora,
    freeze,
    init_lora,
    trainable_parameters,
)
from llama.lora.layers import LoRALinear, adapters, is_adapter
from llama.lora.merge import merged_rows

__all__ = [
    "ALL_LINEAR",
    "ATTENTION",
    "HF_TARGETS",
    "LoRALinear",
    "adapters",
    "add_lora",
    "freeze",
    "init_lora",
    "is_adapter",
    "merged_rows",
    "trainable_parameters",
]

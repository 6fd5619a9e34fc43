"""Which layers get adapters, what is frozen, and what adapters begin with."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from llama.head import Head
from llama.lora.layers import LoRAHead, LoRALinear, adapters, is_adapter
from llama.model import Llama
from llama.parameters import Owners, local_part, materialise, named_parameters, own_rows

# The linear layers by our names and by Hugging Face's.
HF_TARGETS = {
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "output": "lm_head",
}
ALL_LINEAR = "all-linear"  # all but the head, as in peft
ATTENTION = ("wq", "wk", "wv", "wo")


def add_lora(
    model: Llama,
    rank: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: str | Iterable[str] = ATTENTION,
    base_dtype: torch.dtype | None = None,
) -> None:
    """Give a Llama's linear layers adapters of `rank`, in place, and freeze everything else.

    alpha: the adapters' weight is alpha / rank; 2 * rank unless given.
    dropout: probability with which an adapter, while training, does not see a value of its input.
        Where blocks are recomputed in backward, that must be with `preserve_rng_state=True`.
    targets: layers by our names (wq, wk, wv, wo, w1, w2, w3, output) or Hugging Face's (q_proj to
        lm_head), or "all-linear", which is all but the head.
    base_dtype: the type that frozen parameters are stored in from now on (see `freeze`). With
        `llama.weights.stored_dtype` of the folder that is loaded nothing of it is lost.

    Before sharding; the model may be on meta. Adapters are float32, or float64 in such a model, and
    add nothing at first (B is 0); where parameters get memory or values later, call `init_lora`
    then. Raises ValueError for what cannot be, among it a head that is tied to the embedding.
    """
    chosen = _chosen(targets)
    if not isinstance(model, Llama):
        raise ValueError(
            f"add_lora takes a Llama, before anything wraps it, not {type(model).__name__}"
        )
    if adapters(model):
        raise ValueError("the model has LoRA adapters already: build it anew to give it others")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("the model is sharded already: call add_lora before fully_shard")
    if "output" in chosen and model.config.tie_embeddings:
        raise ValueError(
            "output (lm_head) is tied to the embedding, which an adapter of the head would part "
            "from it: choose other LoRA targets"
        )
    _check_dtype(base_dtype)
    layers = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and path.rpartition(".")[2] in chosen
    }
    _check(rank, alpha, dropout, layers)
    for path, base in layers.items():
        parent, _, attribute = path.rpartition(".")
        kind = LoRAHead if isinstance(base, Head) else LoRALinear
        layer = kind(base, rank, 2 * rank if alpha is None else alpha, dropout)
        setattr(model.get_submodule(parent), attribute, layer.train(base.training))
    freeze(model, base_dtype)


def freeze(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Make every parameter but the adapters' untrained and, if given, store it as `dtype`.

    Under mixed precision nothing that is computed changes by it where `dtype` holds the weights as
    they are loaded, or is what is computed in: they are rounded once. But what `dtype` does not
    hold is missing in an export. Call it before sharding; ValueError after that.
    """
    _check_dtype(dtype)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        parameter.requires_grad_(False)
        if dtype is not None and parameter.dtype != dtype:
            if isinstance(parameter, DTensor):
                raise ValueError(f"{name} is sharded already: cast it before fully_shard")
            parameter.data = parameter.data.to(dtype)


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"frozen parameters cannot be stored as {dtype}: choose a floating type")


def _chosen(targets: str | Iterable[str]) -> set[str]:
    """Our names of the target layers."""
    ours = {hf: own for own, hf in HF_TARGETS.items()} | {own: own for own in HF_TARGETS}
    wanted = {targets} if isinstance(targets, str) else set(targets)
    if ALL_LINEAR in wanted:
        wanted = (wanted - {ALL_LINEAR}) | (HF_TARGETS.keys() - {"output"})
    unknown = sorted(map(str, wanted - ours.keys()))
    if unknown or not wanted:
        names = ", ".join(f"{own} ({hf})" for own, hf in HF_TARGETS.items())
        what = f"unknown LoRA targets {', '.join(unknown)}" if unknown else "no LoRA targets"
        raise ValueError(f"{what}: choose among {names}, or {ALL_LINEAR}")
    return {ours[name] for name in wanted}


def _check(rank: int, alpha: float | None, dropout: float, layers: dict[str, nn.Linear]) -> None:
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"LoRA's rank must be a positive integer, not {rank!r}")
    for path, layer in layers.items():
        if rank > max(layer.in_features, layer.out_features):
            raise ValueError(
                f"LoRA's rank {rank} is larger than both dimensions of {path}, "
                f"{tuple(layer.weight.shape)}: choose a smaller one"
            )
    if alpha is not None and not 0 < alpha < float("inf"):
        raise ValueError(f"LoRA's alpha must be a positive number, not {alpha!r}")
    if not 0 <= dropout < 1:
        raise ValueError(f"LoRA's dropout must be at least 0 and below 1, not {dropout!r}")


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained, by name: what an optimizer is to hold."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def init_lora(model: nn.Module, generator: torch.Generator) -> None:
    """Fill every adapter: A from uniform(-1, 1) / sqrt(in_features), B with zeros.

    That is kaiming_uniform_(a=sqrt(5)), as in peft. As in `Llama.init_weights`, values depend on
    the generator's state and a parameter's own name and shape alone, so on any number of ranks they
    are the same. Adapters on meta get memory. ValueError for a model without any.
    """
    parameters = {
        name: parameter
        for name, parameter in named_parameters(model, allow_meta=True).items()
        if is_adapter(name)
    }
    if not parameters:
        raise ValueError("the model has no LoRA adapters: call add_lora first")
    draw = torch.randint(2**62, (), generator=generator, device=generator.device).item()
    owners = Owners(model)
    for name, parameter in parameters.items():
        if parameter.is_meta:
            parameter = materialise(parameter, owners)
        local = local_part(parameter)
        if name.endswith(".lora_b.weight"):
            local.zero_()
            continue
        own = torch.Generator(generator.device).manual_seed(draw ^ zlib.crc32(name.encode()))
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=generator.device)
        bound = parameter.shape[1] ** -0.5
        local.copy_(full.uniform_(-bound, bound, generator=own)[own_rows(parameter)])

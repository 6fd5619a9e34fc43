"""Adding adapters into the matrices beside them, as exports and generation want them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llama.lora.layers import adapters
from llama.parameters import local_part, named_parameters


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add every adapter's product to its frozen matrix, and stop computing it beside.

    The model then computes what it did, and `save_hf` and `save_meta` write it. Every rank of a
    sharded model calls this and changes its own rows; one A is gathered at a time, sums are in
    float32 at least and rounded to the matrix's type. There is no way back: the sum forgets its
    terms. Layers that are merged already are left as they are.
    """
    named_parameters(model)  # reshards, so that rows are the truth; refuses what is on meta
    for layer in adapters(model).values():
        if layer.merged:
            continue
        rows, b = local_part(layer.weight), local_part(layer.lora_b.weight)
        wide = torch.promote_types(rows.dtype, b.dtype)
        a = _whole(layer.lora_a.weight).to(b.device, wide)
        rows.copy_(rows.to(wide) + layer.scale * (b.to(wide) @ a))
        layer.merged = True


def _whole(parameter: Tensor) -> Tensor:
    """All rows of a parameter, on every rank; where its mesh is, which sends no other memory."""
    if not isinstance(parameter, DTensor):
        return parameter
    mesh = parameter.device_mesh
    there = DTensor.from_local(
        parameter.to_local().to(mesh.device_type),
        mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return there.full_tensor()


def check_merged(model: nn.Module) -> None:
    """ValueError for adapters that files of whole models cannot hold."""
    apart = [path for path, layer in adapters(model).items() if not layer.merged]
    if apart:
        raise ValueError(
            f"{len(apart)} layers have LoRA adapters beside their weights ({apart[0]}, ...): call "
            "merge(model) to add them in, or write them on their own with save_peft"
        )

"""Matrices with their adapters added in, as exports want them.

[Note: summed as it is written]
W + scale * B A is computed a buffer of rows at a time, in float32 at least, while it goes into a
file, where it is rounded once, to the file's type. Put into the model instead it would be rounded
to what W is stored in, where a change that is small beside W is lost; and the model could neither
go on training nor forget the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llama.lora.layers import LoRALinear, adapters
from llama.parameters import local_part


def merged_rows(model: nn.Module) -> dict[Tensor, Callable[[slice], Tensor]]:
    """For each adapted matrix what gives rows of its sum with the adapter's product.

    The slice is of the rows that this rank holds; the rows are float32, or float64 where a term is.
    Every rank of a sharded model calls this, as each A is gathered here; computing rows sends
    nothing. Units must be resharded. The model is not changed.
    """
    sums = {}
    for layer in adapters(model).values():
        a = _whole(layer.lora_a.weight).to(local_part(layer.lora_b.weight).device)
        sums[layer.weight] = functools.partial(_sum, layer, a)
    return sums


@torch.no_grad()
def _sum(layer: LoRALinear, a: Tensor, rows: slice) -> Tensor:
    w, b = local_part(layer.weight)[rows], local_part(layer.lora_b.weight)[rows]
    wide = torch.promote_types(w.dtype, b.dtype)
    return (b.to(wide) @ a.to(wide)).mul_(layer.scale).add_(w)


@torch.no_grad()
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

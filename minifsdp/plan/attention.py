"""The attention that a GPU would run, where there is none to choose it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_FLASH = (torch.float16, torch.bfloat16)
_MULTIPLE = 8  # flash kernels take head dims that are multiples of it; others are padded


class PretendedAttention:
    """`scaled_dot_product_attention` by the kernel that torch would choose on an NVIDIA GPU.

    Half precision without a mask: flash. Else, where query and key have as many heads: the
    memory-efficient kernel. Else the plain formula, which holds a score for each pair of tokens.
    """

    def __init__(self) -> None:
        self._plain = F.scaled_dot_product_attention

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        given = (query, key, value)
        if query.device.type == "cpu" or query.dim() != 4:
            return self._plain(
                *given, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        head_dim = query.shape[-1]
        if query.dtype in _FLASH and attn_mask is None and head_dim <= 256:
            if padding := -head_dim % _MULTIPLE:
                given = tuple(F.pad(x, (0, padding)) for x in given)
            scale = head_dim**-0.5 if scale is None else scale
            mixed = torch.ops.aten._scaled_dot_product_flash_attention(
                *given, dropout_p, is_causal, False, scale=scale
            )[0]
            return mixed[..., :head_dim] if padding else mixed
        if query.shape[1] == key.shape[1]:
            keeps = query.requires_grad or key.requires_grad or value.requires_grad
            return torch.ops.aten._scaled_dot_product_efficient_attention(
                *given, attn_mask, keeps, dropout_p, is_causal, scale=scale
            )[0]
        return self._plain(
            *given, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

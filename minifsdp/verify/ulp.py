"""Bits of floating-point numbers: whether they are the same, and how far apart in ULP.

A ULP (unit in the last place) is the step from one representable number to the next, so a distance
in ULP counts the numbers between two. 0.0 and -0.0 are 0 ULP apart, and not the same bits.
"""

from __future__ import annotations

import torch

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
SHORT = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of real numbers: a complex one as (..., 2)."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where bits differ, as bools; a NaN counts as any other NaN. Same shape and dtype."""
    if not a.is_floating_point():
        return a != b
    found = _bits(a) != _bits(b)
    return found & ~(a.isnan() & b.isnan()) if found.any() else found


def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many representable numbers apart, float64; infinite between a NaN and a number.

    Exact up to 2**53. Integers count in units of 1.
    """
    if not a.is_floating_point():
        return (a.double() - b.double()).abs()
    left, right = _ordered(a), _ordered(b)
    same_side = (left < 0) == (right < 0)
    apart = torch.where(
        same_side,
        (left - right).abs().double(),
        left.double().abs() + right.double().abs(),
    )
    apart[a.isnan() != b.isnan()] = float("inf")
    apart[a.isnan() & b.isnan()] = 0.0
    return apart


def fits(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether every value is representable in a narrower `dtype`."""
    return bool((tensor.to(dtype).to(tensor.dtype) == tensor).all())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the numbers, neighbours 1 apart; both zeros are 0."""
    lowest = -(2 ** (8 * tensor.element_size() - 1))
    as_bits = _bits(tensor).long()
    return torch.where(as_bits < 0, lowest - as_bits, as_bits)

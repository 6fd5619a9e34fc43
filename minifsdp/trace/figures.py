"""Seconds and bytes as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Three figures, in s, ms or µs."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{_three(seconds * factor)} {unit}"
    return f"{_three(seconds * 1e6)} µs"


def size(nbytes: float) -> str:
    """Three figures, in bytes, KiB, MiB or GiB."""
    if nbytes < 1024:
        return f"{nbytes:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1000 or unit == "GiB":
            break
    return f"{_three(nbytes)} {unit}"


def _three(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"

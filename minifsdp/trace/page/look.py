"""Names and colours of what a trace shows, the same on the page and in the picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Look(NamedTuple):
    """How one thing is named and coloured."""

    label: str
    light: str
    dark: str


PHASES = {
    "forward": Look("forward", "#8fbcec", "#79abe6"),
    "backward": Look("backward", "#5b82cf", "#4c74c6"),
    "unshard": Look("unshard", "#0b8a7f", "#22c3b2"),
    "prefetch": Look("prefetch", "#53c3b4", "#1a8d82"),
    "wait": Look("wait for unshard", "#e3192f", "#ff4452"),
    "reduce": Look("reduce", "#eda12a", "#f0b040"),
    "reduce_wait": Look("wait for reduce", "#cb2a92", "#f161b8"),
    "reshard": Look("reshard", "#5d6b7e", "#93a1b5"),
    "accumulate": Look("add up gradients", "#c3ab7b", "#a8956b"),
    "optimizer": Look("optimizer", "#7dab3c", "#97c455"),
    "optimizer_wait": Look("wait for optimizer", "#a65326", "#d98452"),
}
"""By kind of event, in the order of the legend."""

PARTS = {
    "computing": Look("computing", "#76a3de", "#6293d8"),
    "exposed": Look("exposed communication", "#e3192f", "#ff4452"),
    "engine": Look("engine", "#7b8798", "#8b98ab"),
    "optimizer": Look("optimizer", "#7dab3c", "#97c455"),
    "outside": Look("outside the model", "#dde2e9", "#2f3845"),
}
"""What the training thread does at a moment, as `waits.Shares` has it."""

HELD = {
    "unsharded": Look("unsharded parameters", "#58b7ab", "#2f9d91"),
    "message": Look("messages", "#efc46b", "#d9a94a"),
    "gradients": Look("gradients", "#9388dc", "#8479d6"),
}
"""Bytes, from the bottom up, as `Held` has them."""

GROUND = {
    "page": ("#f6f7f9", "#10141a"),
    "card": ("#ffffff", "#181e27"),
    "text": ("#1b2430", "#e4e9f0"),
    "soft": ("#5c6879", "#98a5b8"),
    "rule": ("#e2e6ec", "#2a323f"),
    "grid": ("#eceff3", "#242c37"),
}


def row_height(rows: int) -> int:
    """Pixels of a row, fewer where there are more of them."""
    return next(high for most, high in ((10, 30), (24, 22), (48, 17), (rows, 14)) if rows <= most)


def colours(dark: bool) -> Mapping[str, str]:
    """Every colour by its name; those of moments are `at-`, those of bytes `held-`."""
    looks = [("", PHASES), ("at-", PARTS), ("held-", HELD)]
    named = {
        before + name: look.dark if dark else look.light
        for before, table in looks
        for name, look in table.items()
    }
    return {name: pair[dark] for name, pair in GROUND.items()} | named

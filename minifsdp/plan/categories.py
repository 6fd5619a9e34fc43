"""What a block of memory is for, told from who allocates it."""

from __future__ import annotations

import sys
from enum import Enum


class Category(Enum):
    """What memory is for; in the order they are stacked in the picture."""

    PARAMETERS = "parameters"  # this rank's rows, and parameters outside of units
    GRADIENTS = "gradients"  # sharded; whole ones while they accumulate or wait for their message
    OPTIMIZER = "optimizer"
    UNSHARDED = "unsharded units"
    MESSAGES = "messages"
    STAGING = "staging"  # page-locked buffers on the way to and from the host
    ACTIVATIONS = "activations"  # and what backward computes from them
    LOGITS = "logits and loss"
    INPUTS = "inputs"
    OTHER = "other"


_PACKAGE = __name__.rpartition(".plan.")[0]
_OF_MODULES = {
    f"{_PACKAGE}.message": Category.MESSAGES,
    f"{_PACKAGE}.reduction": Category.GRADIENTS,
    f"{_PACKAGE}.offload": Category.STAGING,
    f"{_PACKAGE}.clip": Category.OTHER,
}
_OF_FUNCTIONS = {
    (f"{_PACKAGE}.flat", "fill"): Category.PARAMETERS,
    (f"{_PACKAGE}.flat", "make_full"): Category.UNSHARDED,
}
_HEADS = ("output", "lm_head", "head")


def category_of_caller(phase: str, unit: str) -> Category:
    """The category of a block that is allocated now, by the nearest caller that says."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_PACKAGE):
            if module.startswith(f"{_PACKAGE}.collectives"):
                return Category.MESSAGES
            found = _OF_MODULES.get(module) or _OF_FUNCTIONS.get((module, frame.f_code.co_name))
            if found is not None:
                return found
        elif module.startswith("torch.optim"):
            return Category.OPTIMIZER
        elif module.rpartition(".")[2] in _HEADS:
            return Category.LOGITS
        frame = frame.f_back
    if phase in ("build", "between steps", "clipping"):
        return Category.OTHER
    if phase == "inputs":
        return Category.INPUTS
    if phase == "optimizer":
        return Category.OPTIMIZER
    if phase == "loss" or unit.rpartition(".")[2] in _HEADS:
        return Category.LOGITS
    return Category.ACTIVATIONS

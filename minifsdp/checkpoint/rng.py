"""The random number generators of all ranks, as values that a checkpoint holds."""

from __future__ import annotations

import base64
import hashlib
import json
import random
from typing import Any

import numpy as np
import torch

from .ranks import Ranks


def rng_states() -> list[dict[str, Any]]:
    """The states of torch's, Python's and numpy's generators on each rank; every rank calls it.

    torch's are that of the CPU and, if CUDA is in use, that of this rank's device.
    """
    numpy_state = np.random.get_state(legacy=False)
    own = {
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": numpy_state | {"state": _listed(numpy_state["state"])},
    }
    return Ranks().gather(own)


def restore_rng(states: list[dict[str, Any]]) -> None:
    """Put every generator where it was; every rank calls it.

    On another number of ranks there is no state for each: then all are seeded anew from the saved
    ones and the rank, the same way each time.
    """
    ranks = Ranks()
    if len(states) != ranks.size:
        content = f"{json.dumps(states)} {ranks.size} {ranks.rank}"
        seed = int.from_bytes(hashlib.sha256(content.encode()).digest()[:4], "big")
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        return
    own = states[ranks.rank]
    torch.set_rng_state(_tensor(own["torch"]))
    if own["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(own["cuda"]))
    random.setstate(own["python"])
    np.random.set_state(own["numpy"])


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _listed(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in state.items()}

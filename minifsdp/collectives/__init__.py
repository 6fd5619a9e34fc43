"""Moving a unit's parameters and gradients between ranks, behind one small interface.

*backend* calls the process group; *direct* sends each piece straight to each peer (CPU); *shared*
copies through shared memory (CPU, one host), and is *direct* where there is none. A unit's
parameters travel as one message. `auto` is *shared* for CPU ranks on gloo, else *backend*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from .backend import BackendCollectives, divides
from .direct import DirectCollectives
from .packed import Gradients, Part, Peers
from .shared import SharedCollectives

__all__ = ["Collectives", "Gather", "Gradients", "Part", "Peers", "Reduction", "all_reduce"]
__all__ += ["choose", "idle_nbytes", "mapped_nbytes", "use_collectives"]


class Gather(Protocol):
    """An all-gather under way."""

    nbytes: int
    held: int
    """Bytes of this rank's buffers for it until it has been waited for."""
    is_deferred: bool
    """Whether it only begins when it is waited for; ranks must then wait in the same order."""

    def wait(self, outputs: Sequence[Sequence[Sequence[torch.Tensor]]]) -> None:
        """Fill `outputs`: for each part and rank, one (slot,) view a parameter."""

    def finish(self) -> None:
        """Block until nothing of it is under way."""

    def discard(self) -> None:
        """Drop what arrived, after `finish`."""


class Reduction(Protocol):
    """A reduce-scatter under way."""

    held: int
    """Bytes of this rank's buffers for it; of its output, once it has been waited for."""
    is_complete: bool
    """Whether it was over when it was made, so that waiting costs nothing."""

    def wait(self) -> torch.Tensor:
        """This rank's reduced piece, (piece_numel,), in a tensor of its own."""


class Collectives(Protocol):
    """How messages travel."""

    name: str

    def all_gather(self, parts: Sequence[Part], peers: Peers, device: torch.device) -> Gather: ...

    def reduce_scatter(self, grads: Gradients, peers: Peers, device: torch.device) -> Reduction: ...


_DIRECT = DirectCollectives()
_BACKEND = BackendCollectives()
_SHARED = SharedCollectives(_DIRECT)
_IMPLEMENTATIONS: dict[str, Collectives] = {
    "shared": _SHARED,
    "direct": _DIRECT,
    "backend": _BACKEND,
}
_chosen = "auto"


class use_collectives:
    """Choose how messages travel: `use_collectives("direct")`, or `with use_collectives(...):`.

    name: "shared", "direct", "backend" or "auto". All ranks must choose the same, outside a step.
    Raises ValueError for another name.
    """

    def __init__(self, name: str) -> None:
        global _chosen
        if name != "auto" and name not in _IMPLEMENTATIONS:
            known = ", ".join(["auto", *_IMPLEMENTATIONS])
            raise ValueError(f"no collectives named {name!r}; choose one of: {known}")
        self._previous, _chosen = _chosen, name

    def __enter__(self) -> use_collectives:
        return self

    def __exit__(self, *exc: object) -> None:
        global _chosen
        _chosen = self._previous


def choose(peers: Peers, device: torch.device) -> Collectives:
    """The collectives that a message between `peers` on `device` takes now."""
    if _chosen != "auto":
        return _IMPLEMENTATIONS[_chosen]
    on_gloo = device.type == "cpu" and dist.get_backend(peers.group) == "gloo"
    return _IMPLEMENTATIONS["shared" if on_gloo else "backend"]


def mapped_nbytes() -> int:
    """Shared memory mapped into this process for messages, for as long as their groups live."""
    return _SHARED.mapped_nbytes()


def idle_nbytes() -> int:
    """Host memory kept for the next messages while none is in it."""
    return _DIRECT.pool.nbytes() + _BACKEND.pool.nbytes()


class all_reduce:
    """An all-reduce of `tensor` in place, under way; the mean if `average`, else the sum.

    Always by the backend: its bits define what replicas agree on.
    """

    def __init__(self, tensor: torch.Tensor, peers: Peers, average: bool) -> None:
        in_backend = average and divides(peers.group, tensor.device)
        op = dist.ReduceOp.AVG if in_backend else dist.ReduceOp.SUM
        self._tensor = tensor
        self.held = tensor.nbytes
        self._divisor = peers.size if average and not in_backend else None
        self._work = dist.all_reduce(tensor, op=op, group=peers.group, async_op=True)

    def wait(self) -> torch.Tensor:
        self._work.wait()
        return self._tensor if self._divisor is None else self._tensor.div_(self._divisor)

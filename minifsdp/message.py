"""Rows in and out of messages, and the messages of one rank, which go nowhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .flat import FlatShard
from .param import ShardedParam


def place_rows(message: torch.Tensor, offset: int, param: ShardedParam, grad: torch.Tensor) -> None:
    """Write a full gradient into its slot of every piece of `message`, zeros where rows end."""
    slot = param.layout.slot_numel
    if slot == 0:
        return
    columns = message[:, offset : offset + slot]
    rows = grad.reshape(-1)
    whole, rest = divmod(rows.numel(), slot)
    if whole:
        columns[:whole].copy_(rows[: whole * slot].view(whole, slot))
    if whole < len(columns):
        columns[whole, :rest].copy_(rows[whole * slot :])
        columns[whole, rest:].zero_()
        columns[whole + 1 :].zero_()


def take_rows(message: torch.Tensor, offset: int, param: ShardedParam) -> torch.Tensor:
    """The full gradient that `place_rows` wrote."""
    columns = message[:, offset : offset + param.layout.slot_numel]
    return columns.reshape(-1)[: param.layout.numel].view(param.shape)


class LocalGather:
    """The gather of a unit on one rank: nothing travels, rows are copied (cast) at most."""

    nbytes = 0

    def __init__(self, parts: Sequence[FlatShard]) -> None:
        self._parts = parts

    def wait(self, outputs: Sequence[Sequence[torch.Tensor]]) -> None:
        for part, outs in zip(self._parts, outputs, strict=True):
            pieces = part.source().split(part.slots)
            torch._foreach_copy_([out.view(-1) for out in outs], list(pieces))

    def finish(self) -> None: ...

    def discard(self) -> None: ...


class LocalReduction:
    """The reduction of a unit on one rank: what was filled in is the result."""

    nbytes = 0

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.message = torch.empty(1, numel, dtype=dtype, device=device)

    def start(self, average: bool) -> None: ...

    def wait(self) -> torch.Tensor:
        return self.message[0]

    def discard(self) -> None: ...

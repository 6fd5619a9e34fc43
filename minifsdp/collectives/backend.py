"""Collectives by the process group's own backend: NCCL on GPUs, gloo when asked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .packed import Gradients, PackedGather, PackedReduction, Part, Peers, Pool


def divides(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the backend averages by itself (NCCL does, in the kernel)."""
    return device.type == "cuda" and "nccl" in dist.get_backend(group)


class BackendReduction(PackedReduction):
    def __init__(self, grads: Gradients, peers: Peers, device: torch.device, pool: Pool) -> None:
        super().__init__(grads, peers, device, pool)
        in_backend = self.average and divides(peers.group, device)
        self._divide = self.average and not in_backend
        self._output = torch.empty(self.numel, dtype=self.dtype, device=device)
        self.held += self._output.nbytes
        self._work = dist.reduce_scatter_tensor(
            self._output,
            self.message.view(-1),
            op=dist.ReduceOp.AVG if in_backend else dist.ReduceOp.SUM,
            group=peers.group,
            async_op=True,
        )

    def wait(self) -> torch.Tensor:
        self._work.wait()
        self.discard()
        self.held = self._output.nbytes
        return self._output.div_(self.peers.size) if self._divide else self._output


class BackendCollectives:
    """One call of the process group a message."""

    name = "backend"

    def __init__(self) -> None:
        self.pool = Pool()

    def all_gather(self, parts: Sequence[Part], peers: Peers, device: torch.device) -> PackedGather:
        """Start gathering every rank's `parts`."""
        gather = PackedGather(parts, peers, device, self.pool)
        if gather.nbytes:
            own = gather.message[peers.rank]
            work = dist.all_gather_into_tensor(
                gather.message.view(-1), own, group=peers.group, async_op=True
            )
            gather.works.append(work)
        return gather

    def reduce_scatter(
        self, grads: Gradients, peers: Peers, device: torch.device
    ) -> BackendReduction:
        """Start reducing every rank's `grads`."""
        return BackendReduction(grads, peers, device, self.pool)

"""The most memory that a rank took in training."""

import itertools
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile


class PeakMemory:
    """The most bytes of tensors that this rank held at once in training.

    On CUDA the allocator counts them itself, over the life of the process. On a CPU there is no
    such counter, and the resident size of a process says little about its tensors, so the first
    training steps, between `start` and `close`, run under torch's profiler: the peak is what was
    held at the start (`held`: parameters and any optimizer state) plus the highest running total of
    allocations less releases since. Two steps are enough, and needed: the first makes optimizer
    state and what else lasts. What an engine had allocated for itself before is not seen.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._profiler: profile | None = None
        self._held_bytes = 0
        self._peak_bytes = 0

    @property
    def peak_bytes(self) -> int:
        """Bytes; on a CPU 0 until `close`."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return self._peak_bytes

    def start(self, held: Iterable[torch.Tensor]) -> None:
        """Start to measure; on CUDA there is nothing to do."""
        if self.device.type != "cuda":
            self._held_bytes = sum(t.untyped_storage().nbytes() for t in _one_a_storage(held))
            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profiler.start()

    def close(self) -> None:
        """End the measurement, if one is going on."""
        if self._profiler is None:
            return
        self._profiler.stop()
        # The public summary adds memory up by operator; only the events tell what lived at once.
        events = self._profiler.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        totals = itertools.accumulate((nbytes for _, nbytes in changes), initial=self._held_bytes)
        self._peak_bytes = max(totals)
        self._profiler = None


def _one_a_storage(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors as this rank holds them, one for each storage."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return list({t.untyped_storage().data_ptr(): t for t in local}.values())

"""What a run leaves behind besides weights: its metrics, its summary, and the memory it took."""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile


class Metrics:
    """The lines of a run's `metrics.jsonl`: a JSON object a line, with the step that it belongs to.

    Steps count from 1 once they are done; step 0 is what was measured before training. A run that
    resumes after `step` steps drops what an interrupted run wrote later, and the evaluation at
    `step`, which it repeats; with None the file starts empty.
    """

    def __init__(self, path: Path, step: int | None = None) -> None:
        self.path = path
        lines = [] if step is None else read_metrics(path)
        kept = [line for line in lines if line["step"] < step + ("loss" in line)]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        partial.replace(path)

    def write(self, step: int, **values: Any) -> None:
        """Append a line."""
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, none if it is missing.

    The last is left out if a killed run wrote it only partly. ValueError as "file:line: reason".
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return [_metrics_line(line, f"{path}:{at}") for at, line in enumerate(lines[:-1], start=1)]


def _metrics_line(line: str, where: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except ValueError:
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("step"), int):
        raise ValueError(
            f"{where}: damaged, not a JSON object with a step: mend or delete the line"
        )
    return content


def describe(summary: dict[str, Any]) -> Iterator[str]:
    """The lines of a summary for a screen: without what was not measured, bytes in MiB as well."""
    for key, value in summary.items():
        if value is None or value == {}:
            continue
        mebibytes = f" ({value / 2**20:,.1f} MiB)" if key.endswith("_bytes") else ""
        yield f"{key}: {value}{mebibytes}"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as an indented JSON file that is either absent or whole."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)


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

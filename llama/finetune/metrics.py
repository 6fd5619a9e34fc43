"""What a run measured: `metrics.jsonl` step by step, TensorBoard beside it, and the summary."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Metrics:
    """The lines of a run's `metrics.jsonl`: a JSON object a line, with the step that it belongs to.

    Steps count from 1 once they are done; step 0 is what was measured before training. A run that
    resumes after `step` steps drops what an interrupted run wrote later, and the evaluation at
    `step`, which it repeats; with None the file starts empty. Numbers that are not finite become
    null, since JSON has none.

    Where the package `tensorboard` is installed, the numbers go to the folder `tensorboard` beside
    the file as well, as `train/...` and `eval/...`.
    """

    def __init__(self, path: Path, step: int | None = None) -> None:
        self.path = path
        lines = [] if step is None else read_metrics(path)
        kept = [line for line in lines if line["step"] < step + ("loss" in line)]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        partial.replace(path)
        self._board = _open_board(path.with_name("tensorboard"), step)
        for line in kept:
            if line["step"] == step:  # TensorBoard drops whole steps
                self._show(line)

    def write(self, step: int, **values: Any) -> None:
        """Append a line."""
        finite = {key: _finite(value) for key, value in values.items()}
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **finite}) + "\n")
        self._show({"step": step, **values})

    def close(self) -> None:
        """End TensorBoard's thread, if there is one; a line written later opens it again."""
        if self._board is not None:
            self._board.close()

    def _show(self, line: dict[str, Any]) -> None:
        """Send a line's numbers to TensorBoard."""
        if self._board is None:
            return
        for name, value in _scalars(line).items():
            self._board.add_scalar(name, value, line["step"])
        self._board.flush()  # or a killed run loses what a thread holds for up to two minutes


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _open_board(folder: Path, step: int | None) -> Any:
    """A TensorBoard writer that hides what was written for `step` and later; None without one."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step)


def _scalars(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line by the names that TensorBoard groups them by."""
    numbers = {
        key: value
        for key, value in line.items()
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
    if numbers.get("tokens") and numbers.get("seconds"):
        numbers["tokens_per_second"] = numbers["tokens"] / numbers["seconds"]
    return {
        f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}": value
        for key, value in numbers.items()
    }


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

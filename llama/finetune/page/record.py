"""A run folder, read: what its configuration, its metrics and its summary say so far."""

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llama.finetune.metrics import read_metrics
from llama.finetune.page.series import Series, by_step, number, series
from llama.finetune.run_folder import TRACES, is_run, read_object


class Run(NamedTuple):
    """A run folder, read."""

    name: str
    config: dict[str, Any]
    summary: dict[str, Any]  # empty while the run goes on
    lines: list[dict[str, Any]]
    training: dict[int, dict[str, Any]]  # by step
    evaluation: dict[int, dict[str, Any]]
    skipped: dict[int, str]  # steps and why
    written: str  # when metrics.jsonl was
    trace: str  # the file that --trace wrote a page to; "": none

    @property
    def last_step(self) -> int:
        """The last step that anything is known of."""
        return max((line["step"] for line in self.lines if line["step"] < 2**53), default=0)


def read_run(folder: Path) -> Run:
    """What a run folder says of its run so far; ValueError if it is no run's."""
    if not is_run(folder):
        raise ValueError(f"{folder} is no run folder: its config.json has no flags and model")
    config, summary = read_object(folder / "config.json"), read_object(folder / "summary.json")
    lines = read_metrics(folder / "metrics.jsonl")
    training = by_step(lines, "loss")
    if summary.get("steps") != config.get("steps"):  # of before the run was trained on
        summary = {}
    written = ""
    if lines:
        seconds = (folder / "metrics.jsonl").stat().st_mtime
        written = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Run(
        str(config["arguments"].get("name") or folder.resolve().name),
        config,
        summary,
        lines,
        training,
        by_step(lines, "eval_loss"),
        _skipped(training),
        written,
        TRACES[0] if (folder / TRACES[0]).is_file() else "",
    )


def _skipped(training: dict[int, dict[str, Any]]) -> dict[int, str]:
    return {n: str(line["skipped"])[:200] for n, line in training.items() if line.get("skipped")}


def perplexity(run: Run) -> Series:
    """The perplexity of each evaluation; where it was not written down, that of its loss."""
    losses = series(run.evaluation, "eval_loss")
    written = series(run.evaluation, "eval_perplexity").values.tolist()
    for at, loss in enumerate(losses.values.tolist()):
        if not math.isfinite(written[at]) and loss < 690:  # above, exp nears overflow
            written[at] = math.exp(loss)
    return Series(losses.steps, np.array(written, np.float64))


def speed_and_mfu(run: Run) -> tuple[float, float]:
    """Tokens a second and MFU: the summary's, or the mean of the steps after the first two."""
    speed, mfu = (number(run.summary.get(key)) for key in ("tokens_per_second", "mfu"))
    lines = dict(list(run.training.items())[2:]) or run.training
    tokens, seconds = series(lines, "tokens").values, series(lines, "seconds").values
    both = (tokens + seconds) == (tokens + seconds)  # neither NaN
    if not math.isfinite(speed) and seconds[both].sum() > 0:
        speed = tokens[both].sum() / seconds[both].sum()
    shares = series(lines, "mfu").values
    known = (shares + seconds) == (shares + seconds)
    if not math.isfinite(mfu) and seconds[known].sum() > 0:
        mfu = (shares * seconds)[known].sum() / seconds[known].sum()
    return float(speed), float(mfu)

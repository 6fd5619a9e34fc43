"""The figures at the top of the page."""

import math
from collections.abc import Iterable

from llama.finetune.page.chart import figure_text
from llama.finetune.page.record import Run, perplexity, speed_and_mfu
from llama.finetune.page.series import number, series


def tiles(run: Run) -> Iterable[tuple[str, str, str]]:
    """Name, figure and remark of each that is known: of the summary, or of the run so far."""
    summary, training = run.summary, run.training
    losses = series(training, "loss").known
    if len(losses.values):
        first, last = losses.values[0], losses.values[-1]
        yield (
            "Training loss",
            figure_text(last),
            f"from {figure_text(first)} at step {losses.steps[0]:,}",
        )
    losses = series(run.evaluation, "eval_loss").known
    if len(losses.values):
        loss = losses.values[-1]
        best = losses.values.argmin()
        lowest = f"lowest {figure_text(losses.values[best])} at step {losses.steps[best]:,}"
        remark = "the lowest so far" if best == len(losses.values) - 1 else lowest
        yield "Evaluation loss", figure_text(loss), remark
        yield "Perplexity", figure_text(perplexity(run).known.values[-1]), "on evaluation data"
    matched = number(summary.get("eval_exact_match"))
    if math.isfinite(matched):
        yield "Exact answers", f"{matched:.1%}", "of unseen questions"
    ranks = number(run.config.get("world_size"))
    speed, mfu = speed_and_mfu(run)
    if math.isfinite(speed):
        remark = f"{figure_text(speed / ranks)} a rank" if ranks > 1 else "without padding"
        yield "Tokens a second", figure_text(float(f"{speed:.4g}")), remark
    if math.isfinite(mfu):
        yield "MFU", f"{mfu:.1%}", "of the dense peak"
    peak = number(summary.get("peak_bytes"))
    if math.isfinite(peak):
        yield "Peak memory", bytes_text(peak), "of the rank with most"
    seconds = number(summary.get("seconds"))
    remark = "start to end"
    if not math.isfinite(seconds):
        seconds, remark = float(series(training, "seconds").known.values.sum()), "in steps"
    if seconds:
        yield "Time", seconds_text(seconds), remark
    engine = str(run.config["arguments"].get("engine", "\N{EN DASH}"))
    if ranks >= 1:
        yield "Engine", engine, f"{ranks:,.0f} rank{'s' if ranks > 1 else ''}"
    parameters = number(summary.get("parameters"))
    if math.isfinite(parameters):
        trained = number(summary.get("trained_parameters"))
        remark = f"{count_text(trained)} trained" if trained < parameters else "all trained"
        yield "Parameters", count_text(parameters), remark
    refused = number(summary.get("lines_refused"))
    if refused > 0:
        yield "Refused lines", f"{refused:,.0f}", "of the data"
    if run.skipped:
        yield "Skipped steps", f"{len(run.skipped):,}", f"of {len(training):,}"


def bytes_text(count: float) -> str:
    """Bytes in MiB or GiB."""
    unit, name = (2**30, "GiB") if count >= 2**30 else (2**20, "MiB")
    return f"{figure_text(float(f'{count / unit:.4g}'))} {name}"


def seconds_text(seconds: float) -> str:
    """A span of time in its two largest units."""
    if seconds < 60:
        return f"{figure_text(float(f'{seconds:.3g}'))} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"


def count_text(count: float) -> str:
    """A large number in thousands, millions or billions."""
    for size, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{name}"
    return figure_text(count)

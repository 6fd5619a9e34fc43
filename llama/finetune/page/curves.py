"""The curves of the page: which there are, and of what."""

from llama.finetune.page.chart import Chart, Curve, figure, step_axis
from llama.finetune.page.record import Run, perplexity
from llama.finetune.page.series import Series, series, smooth, tokens_per_second, tokens_seen

FEW_STEPS = 30  # of which each is easily seen
SPANS = 80  # of smoothing, in a whole curve, if each has some steps


def charts(run: Run) -> str:
    """All figures with curves; a note where there are none yet."""
    training, skipped = run.training, run.skipped

    def of(key: str) -> Series:
        return series(training, key)

    def trend(name: str, look: str, values: Series) -> list[Curve]:
        """Each step, and once these are many, how they tend."""
        if len(values.steps) <= FEW_STEPS:
            return [Curve(name, look, values)]
        # What a skipped step met is shown, but did not count.
        counted = values.values.copy()
        counted[[step in skipped for step in values.steps.tolist()]] = float("nan")
        smoothed = smooth(Series(values.steps, counted), max(3.0, len(values.steps) / SPANS))
        each = Curve(name, look, values, "faint")
        return [each, Curve("smoothed", look, smoothed)]

    losses = trend("training", "train", of("loss"))
    losses.append(Curve("evaluation", "eval", series(run.evaluation, "eval_loss"), "dots"))
    perplexities = [Curve("perplexity", "eval", perplexity(run), "dots")]
    rates = [Curve("learning rate", "rate", of("lr"))]
    norms = trend("norm", "norm", of("grad_norm"))
    speeds = trend("tokens/s", "speed", tokens_per_second(training))
    shares = of("mfu")
    shares = trend("MFU", "use", Series(shares.steps, shares.values * 100))
    drawn = [
        Chart("Loss", "nats a token", losses, skipped, may_be_log=True, wide=True),
        Chart("Evaluation perplexity", "", perplexities, may_be_log=True),
        Chart("Learning rate", "", rates, from_zero=True),
        Chart("Gradient norm", "before clipping", norms, skipped, may_be_log=True),
        Chart("Speed", "tokens/s, all ranks", speeds, from_zero=True),
        Chart("MFU", "% of dense peak", shares, from_zero=True),
    ]
    first = min((line["step"] for line in run.lines), default=0)
    steps, tokens = step_axis(min(first, 1), run.last_step), tokens_seen(training)
    figures = "".join(figure(chart, steps, tokens) for chart in drawn)
    return figures or '<p class="card wide note">No step has been measured yet.</p>'

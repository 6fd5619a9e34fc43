"""`report.html`: what a run did, on one page that needs neither a network nor a script.

    python -m llama.finetune.page RUN_FOLDER

makes it anew from the folder's `config.json`, `metrics.jsonl` and `summary.json`, also while the
run goes on.
"""

import html
from pathlib import Path
from typing import Any

from llama.finetune.arguments import build_parser
from llama.finetune.page.chart import figure_text
from llama.finetune.page.curves import charts
from llama.finetune.page.headline import tiles
from llama.finetune.page.look import SCRIPT, STYLE
from llama.finetune.page.record import Run, read_run
from llama.finetune.page.series import number
from llama.finetune.page.tables import samples, settings

__all__ = ["write_page"]

# The page may fetch nothing at all, whatever stands in a prompt.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def write_page(folder: Path, defaults: dict[str, Any] | None = None) -> Path:
    """Write `report.html` in the run folder `folder`, absent or whole, and return its path.

    `defaults` are the values of flags that were not given, by the names in config.json; None: those
    of `train.py`. ValueError if `folder` is no run's, or its metrics are damaged.
    """
    run = read_run(folder)
    if defaults is None:
        defaults = vars(build_parser().parse_args([]))
    path = folder / "report.html"
    partial = path.with_name(f".{path.name}.partial")
    # Of text that is no Unicode, such as half a surrogate pair, a browser makes a question mark.
    partial.write_text(render(run, defaults), encoding="utf-8", errors="xmlcharrefreplace")
    partial.replace(path)
    return path


def render(run: Run, defaults: dict[str, Any]) -> str:
    """The whole page."""
    title = html.escape(f"{run.name}: training report")
    formula = run.summary.get("mfu_formula")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header><h1>{html.escape(run.name)}</h1><p class="state">{_state(run)}</p></header>
<dl class="tiles">{"".join(_tile(*tile) for tile in tiles(run))}</dl>
{f'<p class="formula">{html.escape(formula)}</p>' if formula else ""}
<div class="charts">{charts(run)}</div>
{samples(run.lines)}
{settings(run, defaults)}
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _state(run: Run) -> str:
    """One line on where the run stands, and a way to its trace, if it has one."""
    done, steps = max(run.training, default=0), run.config.get("steps")
    if run.summary:
        progress = f"Finished: {figure_text(number(steps))} steps"
    else:
        progress = f"{done:,} of {figure_text(number(steps))} steps so far"
    trace = f'<a href="{run.trace}">trace of some steps</a>' if run.trace else ""
    return ", ".join(filter(None, (html.escape(progress), html.escape(run.written), trace)))


def _tile(name: str, value: str, remark: str) -> str:
    name, value, remark = map(html.escape, (name, value, remark))
    return f"<div><dt>{name}</dt><dd>{value}<small>{remark}</small></dd></div>"

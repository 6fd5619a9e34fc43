"""What a run answered to its prompts, and its settings, as HTML."""

import html
from typing import Any

from llama.finetune.page.record import Run

TEXT_LIMIT = 2000  # characters of one text that are shown
ITEMS = 30  # of a list
PROMPTS, ANSWERS = 30, 8  # shown, and of each prompt


def samples(lines: list[dict[str, Any]]) -> str:
    """What the model answered to each prompt, over time."""
    said: dict[str, dict[int, str]] = {}
    for line in lines:
        if "prompt" in line and "answer" in line:
            said.setdefault(str(line["prompt"]), {})[line["step"]] = str(line["answer"])
    if not said:
        return ""
    cards = [_sample(prompt, sorted(answers.items())) for prompt, answers in said.items()]
    more = len(cards) - PROMPTS
    note = f'<p class="note">{more:,} more prompts are in metrics.jsonl.</p>' if more > 0 else ""
    return f"<section><h2>Answers</h2>{''.join(cards[:PROMPTS])}{note}</section>"


def _sample(prompt: str, answers: list[tuple[int, str]]) -> str:
    note = ""
    if len(answers) > ANSWERS:  # first, last, and evenly between
        note = f'<p class="note">{ANSWERS} of {len(answers):,} answers.</p>'
        spread = (len(answers) - 1) / (ANSWERS - 1)
        answers = [answers[round(i * spread)] for i in range(ANSWERS)]
    rows = "".join(
        f'<dt>step {step:,}</dt><dd class="text">'
        f"{_text(answer, TEXT_LIMIT) or '<span class=none>(nothing)</span>'}</dd>"
        for step, answer in answers
    )
    return (
        f'<article class="card"><p class="text prompt">{_text(prompt, TEXT_LIMIT)}</p>'
        f'<dl class="answers">{rows}</dl>{note}</article>'
    )


def settings(run: Run, defaults: dict[str, Any]) -> str:
    """All flags, those that differ from their defaults first; the model; the summary."""
    made = {key: run.config[key] for key in ("world_size", "steps", "torch") if key in run.config}
    measured = {
        key: value
        for key, value in run.summary.items()
        if value not in (None, {}) and key != "mfu_formula"  # which stands at the top
    }
    tables = {"Model": run.config["model"], "Run": made, "Summary": measured}
    beside = "".join(
        f'<div class="card"><h3>{title}</h3><table>{_rows(content)}</table></div>'
        for title, content in tables.items()
        if content
    )
    return (
        '<section><h2>Settings</h2><div class="tables"><div class="card"><h3>Flags</h3>'
        f"{_flags(run.config['arguments'], defaults)}</div><div>{beside}</div></div></section>"
    )


def _flags(arguments: dict[str, Any], defaults: dict[str, Any]) -> str:
    """The flags as a table; those that have no value at all below it."""
    chosen, usual, absent = [], [], []
    for name, value in sorted(arguments.items()):
        flag = _text("--" + name.replace("_", "-"))
        if name not in defaults or value != defaults[name]:
            default = f'<td class="none">{_value(defaults.get(name))}</td>'
            row = f"<td>{flag}</td><td>{_value(value)}</td>{default}"
            chosen.append(f'<tr class="chosen">{row}</tr>')
        elif value is None:
            absent.append(f'<span class="flag">{flag}</span>')
        else:
            usual.append(f'<tr><td>{flag}</td><td colspan="2">{_value(value)}</td></tr>')
    head = "<tr><th>Flag</th><th>Value</th><th>Default</th></tr>"
    note = f'<p class="note">Not given: {", ".join(absent)}</p>' if absent else ""
    return f"<table>{head}{''.join(chosen)}{''.join(usual)}</table>{note}"


def _rows(content: dict[str, Any]) -> str:
    return "".join(
        f"<tr><td>{_text(name.replace('_', ' '))}</td><td>{_value(value)}</td></tr>"
        for name, value in content.items()
    )


def _value(value: Any) -> str:
    """A setting as HTML."""
    if value is None:
        return '<span class="none">\N{EN DASH}</span>'
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return _text(f"{value:.6g}")
    if isinstance(value, list):
        more = f"<br>… ({len(value) - ITEMS:,} more)" if len(value) > ITEMS else ""
        return "<br>".join(_value(item) for item in value[:ITEMS]) + more
    if isinstance(value, dict):
        return "<br>".join(f"{_text(str(key))}: {_value(item)}" for key, item in value.items())
    return _text(str(value), TEXT_LIMIT)


def _text(text: str, limit: int | None = None) -> str:
    """Text as HTML, cut at `limit` characters."""
    if limit is not None and len(text) > limit:
        return f"{html.escape(text[:limit])}… ({len(text) - limit:,} more characters)"
    return html.escape(text)

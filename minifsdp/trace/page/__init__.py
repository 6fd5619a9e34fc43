"""A trace as one HTML page that fetches nothing, and as a picture."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources

from ..figures import duration
from ..spans import RankTrace
from ..waits import shares
from .look import PARTS, colours
from .pack import LIMIT, kept, packed
from .picture import picture

__all__ = ["page", "picture"]

_SCRIPTS = ("unpack", "draw", "point", "page")  # one program, in this order
# The page may fetch nothing at all, whatever stands in a name.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(
    ranks: Mapping[int, RankTrace], words: Mapping[int, Sequence[str]], title: str = "Trace"
) -> str:
    """The whole page.

    ranks: what each did. Of more than `pack.LIMIT` events in all, only some ranks' are in the page,
        which says so.
    words: for each rank, sentences on what it waited for.
    """
    if not ranks:
        raise ValueError("a page needs the trace of at least one rank")
    chosen = kept(ranks)
    first = ranks[chosen[0]]
    stored = json.dumps(packed(ranks, chosen), separators=(",", ":")).replace("<", "\\u003c")
    articles = "".join(_article(trace, words.get(r, ())) for r, trace in sorted(ranks.items()))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(title)}</title>
<style>{_style()}</style>
</head>
<body>
<main>
<h1>{_text(title)}</h1>
<p class="state">{_text(_state(ranks, chosen))}</p>
{articles}
<section class="card script" id="compare" hidden>
<header><h2>Ranks</h2><p>the training thread of each; right: exposed communication</p></header>
<div class="ranks" id="ranks" role="radiogroup" aria-label="Rank to show"></div>
</section>
<section class="card script" hidden>
<header><h2 id="who"></h2><p>units and their phases, and what is held</p>
<div class="zooms" id="zooms"></div></header>
<p id="absent" hidden>This rank's events were left out: a page holds {LIMIT:,} at most.
A trace saved as .json holds all.</p>
<div id="present">
<ul class="legend" id="phases"></ul>
<div class="plot" id="plot" tabindex="0" role="application" aria-describedby="hint"
 aria-label="Timeline of units">
<div class="names top"><span style="top:17px;line-height:16px">time</span>
<span style="top:36px;line-height:20px">this thread</span></div>
<canvas class="top" id="top"></canvas>
<div class="names rows" id="names"></div><canvas id="body"></canvas>
<div class="names memory" id="levels"></div><canvas class="memory" id="memory"></canvas>
<div class="cross" id="cross" hidden></div><div class="range" id="range" hidden></div>
<div class="mark" id="mark" hidden></div>
<div class="reading" id="reading" role="status" hidden></div>
</div>
<ul class="legend bytes" id="bytes"></ul>
<p class="soft hint" id="hint">Drag over a stretch of time to look closer, double-click to see all
again. With the keyboard: arrows go from event to event, + and - zoom, 0 shows all.</p>
</div>
</section>
<noscript><section class="card picture"><header><h2>Rank {first.rank}</h2></header>
{picture(first, width=1000)}</section></noscript>
</main>
<script type="application/json" id="data">{stored}</script>
<script>{_script()}</script>
</body>
</html>
"""


def _text(text: str) -> str:
    """Escaped; what is no Unicode, such as half a surrogate pair, becomes a question mark."""
    return html.escape(text.encode("utf-8", "replace").decode("utf-8"))


def _own(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _script() -> str:
    parts = "\n".join(_own(f"{name}.js") for name in _SCRIPTS)
    return f'"use strict";(() => {{\n{parts}}})();'


def _style() -> str:
    light, dark = (
        "".join(f"--{name}:{colour};" for name, colour in colours(which).items())
        for which in (False, True)
    )
    return (
        f":root{{color-scheme:light dark;{light}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{_own('page.css')}"
    )


def _state(ranks: Mapping[int, RankTrace], chosen: Sequence[int]) -> str:
    """One line on what was recorded."""
    traces = list(ranks.values())
    hosts = len({trace.host for trace in traces})
    times = max(len(trace.iterations) for trace in traces)
    said = [
        _count(len(ranks), "rank") + (f" on {hosts} hosts" if hosts > 1 else ""),
        _count(times, "iteration"),
        duration(max(trace.seconds for trace in traces)),
        "times by the device" if traces[0].clock == "device" else "times by the host's clock",
    ]
    if len(chosen) < len(ranks):
        named = ", ".join(map(str, chosen))
        said.append(f"events of ranks {named} only, {LIMIT:,} at most")
    return ", ".join(said)


def _count(number: int, of: str) -> str:
    return f"{number:,} {of}{'' if number == 1 else 's'}"


def _article(trace: RankTrace, sentences: Sequence[str]) -> str:
    """What one rank's time went into, and what it waited for, in words."""
    split = shares(trace)
    whole = max(sum(split), 1e-12)
    parts = list(zip(PARTS.items(), split, strict=True))
    bar = "".join(
        f'<i style="flex:{seconds / whole:.4f} 0 0;--ink:var(--at-{part})"></i>'
        for (part, _), seconds in parts
        if seconds
    )
    figures = "".join(
        f'<div class="at-{part}" style="--ink:var(--at-{part})"><dt>{look.label}</dt>'
        f"<dd>{seconds / whole:.1%}<small>{duration(seconds)}</small></dd></div>"
        for (part, look), seconds in parts
    )
    said = "".join(f"<li>{_text(sentence)}</li>" for sentence in sentences)
    return (
        f'<article class="card rank" data-rank="{trace.rank}"><header>'
        f"<h2>What rank {trace.rank} waited for</h2><p>{_text(trace.host)}</p></header>"
        f'<div class="shares" aria-hidden="true">{bar}</div><div class="told">'
        f'<dl class="figures">{figures}</dl><ul class="says">{said}</ul></div></article>'
    )

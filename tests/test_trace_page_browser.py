"""A trace's page in headless Chromium: phases at their places, names to read, figures to point at.

These tests never skip: without Chromium they fail, and say how to install it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from browser import Shown, show
from made_trace import make_trace

from minifsdp.trace import RankTrace, TraceEvent
from minifsdp.trace import page as trace_page
from minifsdp.trace.page import page, picture
from minifsdp.trace.page.moments import Stretch, innermost
from minifsdp.trace.page.picture import _Picture
from minifsdp.trace.waits import arrivals, explain

# Puts a look closer at `AT` (two times in seconds; nothing: as the page begins).
ZOOM = """
const plot = document.getElementById("plot"), body = document.getElementById("body");
const put = (type, target, x, y) => target.dispatchEvent(new PointerEvent(type,
  { bubbles: true, clientX: x, clientY: y, button: 0, pointerType: "mouse" }));
const place = seconds => {
  const { left, width } = body.getBoundingClientRect(), { from, to } = plot.dataset;
  return left + (seconds * 1e7 - from) / (to - from) * width;
};
const AT = %s;
const drag = (from, to) => {
  const y = body.getBoundingClientRect().top + 5, ends = [place(from), place(to)];
  put("pointerdown", body, ends[0], y);
  put("pointermove", body, ends[1], y);
  put("pointerup", body, ends[1], y);
};
if (AT) {
  plot.dispatchEvent(new MouseEvent("dblclick"));
  drag(AT[0] - 0.06, AT[1] + 0.06);
  drag(...AT);
}
"""
# Where all lies and in which colours.
MEASURE = """
const box = each => { const { left, top, width, height } = each.getBoundingClientRect();
  return { left, top, width, height }; };
const colours = {}, ink = line => getComputedStyle(line, "::before").backgroundColor;
for (const line of document.querySelectorAll(".legend li, article:not([hidden]) dt")) {
  const name = (line.tagName === "DT" ? "at " : "") + line.textContent;
  colours[name] = ink(line).match(/\\d+/g);
}
const names = [...document.querySelectorAll("#names span")].map(line => ({ ...box(line),
  text: line.textContent, font: parseFloat(getComputedStyle(line).fontSize),
  cut: line.scrollWidth > line.clientWidth, wide: line.firstChild.getBoundingClientRect().width }));
return { colours, names, body: box(body), top: box(document.getElementById("top")),
  memory: box(document.getElementById("memory")), from: plot.dataset.from / 1e7,
  to: plot.dataset.to / 1e7, width: document.documentElement.scrollWidth,
  title: [...document.querySelectorAll("article:not([hidden]) h2")].map(each => each.textContent) };
"""
LABELS = {
    "wait": "wait for unshard",
    "reduce_wait": "wait for reduce",
    "accumulate": "add up gradients",
}


def made(blocks: int, iterations: int = 2) -> dict[int, RankTrace]:
    return {r: make_trace(blocks, r, iterations, gather=(2.6 + r) * 1e-3) for r in range(2)}


RANKS = {4: made(4), 80: made(80, iterations=3)}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for blocks, ranks in RANKS.items():
        words = {rank: explain(ranks[rank], arrivals(ranks)) for rank in ranks}
        (folder / f"{blocks}.html").write_text(page(ranks, words, f"{blocks} blocks"))
    return {blocks: folder / f"{blocks}.html" for blocks in RANKS}


def looked(pages, blocks: int, width: int = 1200, at: object = None, dark: bool = False) -> Shown:
    height = {4: 1350, 80: 2000}[blocks] + (0 if width == 1200 else 400)
    return show(pages[blocks], width, height, ZOOM % json.dumps(at) + MEASURE, dark)


def x_of(shown: Shown, seconds: float) -> float:
    answer, body = shown.answer, shown.answer["body"]
    share = (seconds - answer["from"]) / (answer["to"] - answer["from"])
    return body["left"] + share * body["width"]


def is_near(pixels: np.ndarray, colour) -> np.ndarray:
    return np.abs(pixels.astype(int) - np.array(colour, int)).max(axis=-1) < 16


def longest(trace: RankTrace, begin: float, end: float) -> dict[str, Stretch]:
    """For each kind of event, the longest stretch within a time that is the event's own."""
    found: dict[str, Stretch] = {}
    for each in innermost(trace.events, 0):
        kind = each.event.kind
        if begin <= each.start and each.end <= end:
            best = found.get(kind)
            if best is None or each.end - each.start > best.end - best.start:
                found[kind] = each
    return found


def check_bars(shown: Shown, trace: RankTrace, least: float) -> set[str]:
    """Each phase of at least `least` pixels has its colour between its ends, and not beyond."""
    answer, checked = shown.answer, set()
    for kind, (start, end, event) in longest(trace, answer["from"], answer["to"]).items():
        left, right = x_of(shown, start), x_of(shown, end)
        if right - left < least:
            continue
        row = answer["names"][trace.units.index(event.unit)]
        middle = round(row["top"] + row["height"] / 2)
        line = shown.pixels[middle - 2, :]  # above the line of a message under way
        there = is_near(line, answer["colours"][LABELS.get(kind, kind)])
        centre, others = round((left + right) / 2 - 0.5), np.flatnonzero(~there)
        first = others[others < centre].max() + 1
        last = others[others > centre].min()
        said = f"{kind} of {event.unit}: at {first} to {last}, not {left:.1f} to {right:.1f}"
        assert there[centre] and abs(first - left) <= 3 and abs(last - right) <= 3, said
        checked.add(kind)
    return checked


def check_names(shown: Shown, trace: RankTrace, least: float) -> None:
    """Each unit's name is beside its row, whole, of a size to read, and apart from the next."""
    names, body = shown.answer["names"], shown.answer["body"]
    assert [name["text"] for name in names] == trace.units
    for index, name in enumerate(names):
        assert name["height"] >= least and name["font"] >= 11
        assert name["top"] == pytest.approx(body["top"] + index * name["height"], abs=0.6)
        assert not name["cut"] and name["left"] + name["wide"] < body["left"]
        top, left = round(name["top"]), round(name["left"])
        drawn = shown.pixels[top : top + round(name["height"]), left : left + round(name["wide"])]
        ink = np.abs(drawn.astype(int) - drawn[0, -1].astype(int)).max(axis=2)
        assert (ink > 110).sum() > 6 * len(name["text"]), f"{name['text']} is not legible"


LOOKS = [(4, 1200, False), (4, 400, True), (80, 1200, True), (80, 400, False)]


@pytest.mark.parametrize(("blocks", "width", "dark"), LOOKS)
def test_every_phase_is_where_its_times_are(blocks: int, width: int, dark: bool, pages):
    trace = RANKS[blocks][0]
    turn = next(e.start for e in trace.events if e.kind == "backward")
    # Around the first backwards, where each phase but the optimizer takes some pixels.
    shown = looked(pages, blocks, width, (turn - 3.3e-3, turn + 9.7e-3), dark)
    assert shown.complaints == [] and shown.answer["width"] == width
    ground = shown.pixels[2, 2]
    assert (ground < 60).all() if dark else (ground > 200).all()
    checked = check_bars(shown, trace, 3)
    wanted = {"forward", "backward", "wait", "prefetch", "unshard", "reduce", "accumulate"}
    assert checked >= (wanted if width > 1000 else wanted - {"accumulate"})
    check_names(shown, trace, 30 if blocks == 4 else 14)


@pytest.fixture(scope="module")
def whole(pages: dict[int, Path]) -> Shown:
    return looked(pages, 4)


def test_a_whole_trace_of_4_units_shows_its_waits_optimizer_memory_and_thread(whole: Shown):
    trace, shown = RANKS[4][0], whole
    answer, colours = shown.answer, shown.answer["colours"]
    assert (answer["from"], answer["to"]) == (0, pytest.approx(RANKS[4][1].seconds, abs=1e-6))
    assert check_bars(shown, trace, 6) >= {"wait", "reduce_wait", "optimizer", "backward"}
    middle = round(answer["top"]["top"] + answer["top"]["height"] - 12)
    labels = {"computing": "computing", "exposed": "exposed communication"}
    for each in longest(trace, 0, 1).values():
        part = each.event.part
        x = round(x_of(shown, (each.start + each.end) / 2))
        if part in labels and x_of(shown, each.end) - x_of(shown, each.start) > 4:
            assert is_near(shown.pixels[middle, x], colours[f"at {labels[part]}"]), each.event
    check_memory(shown, trace)


def check_memory(shown: Shown, trace: RankTrace) -> None:
    """The stack is as high as what was held at the middle of each long stretch."""
    memory, colours = shown.answer["memory"], shown.answer["colours"]
    bottom = memory["top"] + memory["height"]
    full = 1.2 * trace.peak().total / (memory["height"] - 1)
    checked = 0
    for point, after in zip(trace.held, trace.held[1:], strict=False):
        left, right = x_of(shown, point.seconds), x_of(shown, after.seconds)
        if right - left < 8:
            continue
        column = shown.pixels[round(memory["top"]) + 1 : round(bottom), round((left + right) / 2)]
        for part, label in (
            (point.unsharded, "unsharded parameters"),
            (point.message, "messages"),
            (point.gradients, "gradients"),
        ):
            assert is_near(column, colours[label]).sum() == pytest.approx(part / full, abs=3)
        checked += 1
    assert checked > 8


def test_another_rank_is_another_picture_and_other_words(whole: Shown, pages):
    pick = 'document.querySelectorAll("#ranks button")[1].click();'
    other = show(pages[4], 1200, 1350, ZOOM % "null" + pick + MEASURE)
    assert whole.answer["title"] == ["What rank 0 waited for"]
    assert other.answer["title"] == ["What rank 1 waited for"]
    check_bars(other, RANKS[4][1], 6)
    with pytest.raises(AssertionError):
        check_bars(other, RANKS[4][0], 6)
    check_memory(other, RANKS[4][1])


POINT = """
const read = () => document.getElementById("reading").hidden ? null
  : [...document.querySelectorAll("#reading > *")].map(line => line.textContent);
const over = (id, seconds, y) => {
  const canvas = document.getElementById(id), { top } = canvas.getBoundingClientRect();
  put("pointermove", canvas, place(seconds), top + y);
  return read();
};
const press = key => {
  plot.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  return read();
};
const hit = (row, seconds) => over("body", seconds, (row + 0.5) * HIGH);
"""


def told(event: TraceEvent) -> list[str]:
    """How the page should put an event's first figures."""
    figure = lambda seconds: f"{seconds * 1e3:,.3f}".rstrip("0").rstrip(".")  # noqa: E731
    whole, own = figure(event.seconds), figure(event.own)
    kind = LABELS.get(event.kind, event.kind)
    return [
        f"{event.unit}: {kind}",
        f"{whole} ms" if whole == own else f"{own} ms own of {whole} ms",
        f"from {figure(event.start)} ms to {figure(event.end)} ms",
    ]


def test_pointer_and_keys_tell_the_figures_of_what_is_under_them(pages):
    trace = RANKS[4][0]
    chosen = [
        next(e for e in trace.events if (e.kind, e.unit) == wanted)
        for wanted in [("wait", "layers.0"), ("backward", "layers.2"), ("optimizer", "optimizer")]
    ]
    root = next(e for e in trace.events if e.kind == "forward")
    asked = [[trace.units.index(e.unit), e.start + 0.3 * e.seconds] for e in [*chosen, root]]
    flight = next(e for e in trace.events if e.kind == "prefetch")
    row = trace.units.index(flight.unit)
    script = f"""
      const HIGH = 30, answers = {json.dumps(asked)}.map(([row, at]) => hit(row, at));
      answers.push(hit({row}, {flight.end + 1e-3}), over("memory", {root.end}, 40),
        over("top", {chosen[0].start + 1e-4}, 50), press("Home"), press("ArrowRight"));
      const before = +plot.dataset.to - plot.dataset.from;
      press("+");
      const closer = +plot.dataset.to - plot.dataset.from;
      press("0"); press("Escape");
      return {{ answers, last: read(), zoomed: closer / before }};
    """
    shown = show(pages[4], 1200, 1350, ZOOM % "null" + POINT + script)
    assert shown.complaints == []
    *events, line, memory, thread, home, right = shown.answer["answers"]
    for event, answer in zip([*chosen, root], events, strict=True):
        assert answer[:3] == told(event)
    assert events[0][3] == "message of 3 MiB"
    assert "held at its end: " in events[1][4] or "held at its end: " in events[1][3]
    assert line[0] == f"{flight.unit}: gather under way" and line[2] == "message of 3 MiB"
    held = [h for h in trace.held if h.seconds <= root.end][-1]
    assert memory[1] == f"held: {held.total / 2**20:.4g} MiB"
    assert thread[:2] == ["Training thread: exposed communication", told(chosen[0])[0]]
    assert home[:3] == told(trace.events[0]) and right[:3] == told(trace.events[1])
    assert shown.answer["last"] is None and shown.answer["zoomed"] == pytest.approx(0.5)


def test_a_rank_whose_events_were_left_out_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(trace_page, "kept", lambda ranks: [1])
    (tmp_path / "part.html").write_text(page(RANKS[4], {}))
    ask = """
      const read = () => [document.getElementById("who").innerText,
        document.getElementById("absent").checkVisibility(), plot.checkVisibility()];
      const plot = document.getElementById("plot"), answers = [read()];
      for (const each of [0, 1]) {
        document.querySelectorAll("#ranks button")[each].click();
        answers.push(read());
      }
      return answers"""
    shown = show(tmp_path / "part.html", 700, 500, ask)
    here, absent = ["Rank 1", False, True], ["Rank 0", True, False]
    assert (shown.answer, shown.complaints) == ([here, absent, here], [])


def test_without_scripts_there_are_the_words_and_a_picture(pages, tmp_path):
    source = re.sub(r"<script.*?</script>", "", pages[4].read_text(), flags=re.S)
    plain = source.replace("<noscript>", "").replace("</noscript>", "")
    (tmp_path / "plain.html").write_text(plain)
    ask = """const { left, top, width } = document.querySelector("svg").getBoundingClientRect();
      return { left, top, width, words: document.body.innerText,
               all: document.documentElement.scrollWidth }"""
    shown = show(tmp_path / "plain.html", 1200, 1600, ask)
    trace, answer = RANKS[4][0], shown.answer
    assert shown.complaints == [] and answer["all"] == 1200
    assert all(
        s in answer["words"] for rank in (0, 1) for s in explain(RANKS[4][rank], arrivals(RANKS[4]))
    )
    scale, drawing = answer["width"] / 1000, _Picture(trace, 1000, 0.0, trace.seconds)
    assert "#e3192f" in picture(trace)
    start, end, event = longest(trace, 0, 1)["wait"]
    y = drawing.top + (trace.units.index(event.unit) + 0.5) * drawing.high
    line = shown.pixels[round(answer["top"] + scale * (y - 3))]
    found = np.flatnonzero(is_near(line, (0xE3, 0x19, 0x2F)))
    for seconds in (start, end):
        x = drawing.left + drawing.wide * seconds / trace.seconds
        edge = answer["left"] + scale * x
        assert np.abs(found - edge).min() <= 3


@pytest.mark.parametrize(
    "planted", ["<script>nothing_of_the_kind()</script>", '<img src="https://example.com/a.png">']
)
def test_an_error_or_a_request_would_be_noticed(planted: str, pages, tmp_path):
    (tmp_path / "bad.html").write_text(pages[4].read_text() + planted)
    assert show(tmp_path / "bad.html", 600, 400, "return 1").complaints

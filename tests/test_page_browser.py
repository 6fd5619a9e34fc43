"""report.html in headless Chromium: curves where they belong, no overflow, no complaint.

These tests never skip: without Chromium they fail, and say how to install it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import browser
import numpy as np
import pytest
from browser import Shown, show
from made_run import DEFAULTS, make_run

from llama.finetune.page import write_page

# Where each plot lies, by its title, which colour each curve has, and how wide all is.
MEASURE = """
const plots = {};
for (const chart of document.querySelectorAll(".chart")) {
  const box = chart.querySelector("svg").getBoundingClientRect(), curves = {};
  for (const path of chart.querySelectorAll("svg path")) {
    const rgb = getComputedStyle(path).stroke.match(/\\d+/g).map(Number);
    curves[path.className.baseVal] = rgb;
  }
  plots[chart.querySelector("h2").textContent] =
    { left: box.left, top: box.top, width: box.width, height: box.height, curves };
}
const root = document.documentElement;
return { plots, width: root.scrollWidth, height: root.scrollHeight, inner: innerWidth };
"""
POINT = """
const plot = document.querySelector(".plot"), box = plot.getBoundingClientRect();
const at = { clientX: box.left + 0.5 * box.width, clientY: box.top + 9 };
plot.dispatchEvent(new PointerEvent("pointermove", at));
const read = () => [...plot.querySelectorAll(".reading > *")].map(line => line.textContent);
const press = key => plot.dispatchEvent(new KeyboardEvent("keydown", { key, cancelable: true }));
const answers = [read()];
press("ArrowLeft"); answers.push(read());
press("Home"); answers.push(read());
const seen = plot.querySelector(".reading").getBoundingClientRect();
press("Escape");
return { answers, seen: seen.width * seen.height, hidden: plot.querySelector(".reading").hidden,
         width: document.documentElement.scrollWidth };
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(make_run(tmp_path_factory.mktemp("run"), steps=600), DEFAULTS)


@pytest.fixture(scope="module")
def wide(page: Path) -> Shown:
    return show(page, 1200, 1500, MEASURE)


def drawn(shown: Shown, title: str, look: str) -> np.ndarray:
    """Where in a plot the colour of a curve is: (height, width) bool."""
    plot = shown.answer["plots"][title]
    top, left = round(plot["top"]), round(plot["left"])
    box = shown.pixels[top : top + round(plot["height"]), left : left + round(plot["width"])]
    return np.abs(box.astype(int) - plot["curves"][look]).max(axis=2) < 24


CURVES = [
    ("Loss", "train line", 0.9),
    ("Loss", "eval line", 0.9),
    ("Evaluation perplexity", "eval line", 0.9),
    ("Learning rate", "rate line", 0.9),
    ("Gradient norm", "norm line", 0.9),
    ("Speed", "speed line", 0.9),
    ("MFU", "use line", 0.9),
]


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (400, False)])
def test_every_curve_spans_its_plot_and_nothing_overflows(width, dark, page, wide):
    shown = wide if (width, dark) == (1200, False) else show(page, width, 2600, MEASURE, dark)
    assert shown.complaints == []
    assert shown.answer["inner"] == shown.answer["width"] == width
    ground = shown.pixels[2, 2].astype(int)
    assert (ground < 60).all() if dark else (ground > 200).all()
    for title, look, share in CURVES:
        found = drawn(shown, title, look)
        columns = found.any(axis=0).mean()
        assert columns > share, f"{title}: {look} is in {columns:.0%} of the columns"
        # A line two pixels wide, and a few for its slope, its dots and its noise.
        assert 1 < found.sum() / found.shape[1] < 20, f"{title}: {look}"
    assert 4 < drawn(shown, "Gradient norm", "mark").sum() < 200


def test_the_learning_rate_is_drawn_where_its_values_are(wide: Shown):
    found = drawn(wide, "Learning rate", "rate line")
    height, width = found.shape
    rows = np.arange(height)[:, None]
    middles = (rows * found).sum(axis=0) / np.maximum(found.sum(axis=0), 1)
    for share in (0.25, 0.5, 0.75):
        column = round(share * width)
        expected = 0.5 * (1 + np.cos(np.pi * share))  # of an axis that ends at the highest rate
        assert abs(middles[column] - (1 - expected) * height) < 3


def test_the_loss_falls_as_it_was_made_to(wide: Shown):
    found = drawn(wide, "Loss", "eval line")
    first, last = np.flatnonzero(found[:, 3])[0], np.flatnonzero(found[:, -4])[-1]
    height = found.shape[0]
    assert first < 0.25 * height < 0.6 * height < last


def test_a_page_looks_the_same_without_scripts(page: Path, wide: Shown, tmp_path: Path):
    source = page.read_text(encoding="utf-8")
    plain, count = re.subn(r"<script>.*?</script>", "", source, flags=re.S)
    assert count == 1
    (tmp_path / "plain.html").write_text(plain, encoding="utf-8")
    shown = show(tmp_path / "plain.html", 1200, 1500, "return 1")
    assert np.array_equal(shown.pixels, wide.pixels)


@pytest.mark.parametrize("width", [1200, 400])
def test_pointer_and_keys_read_the_nearest_step(width, page):
    shown = show(page, width, 900, POINT)
    assert shown.complaints == []
    at_half, before, first = shown.answer["answers"]
    assert at_half[0] == "step 300" and before[0] == "step 299" and first[0] == "step 1"
    assert re.fullmatch(r"1[23],\d{3},\d{3} tokens so far", at_half[1])
    assert [line.split()[0] for line in at_half[2:4]] == ["training", "smoothed"]
    assert re.fullmatch(r"evaluation 0\.97\d+ *", at_half[4])
    assert re.fullmatch(r"evaluation 0\.97\d+ \(step 300\)", before[4])
    assert shown.answer["seen"] > 1000 and shown.answer["hidden"]
    assert shown.answer["width"] == width


def test_a_skipped_step_is_marked_and_says_why(page: Path):
    shown = show(page, 1200, 900, POINT.replace("0.5 * box.width", "(310 / 600) * box.width"))
    assert "step 310 skipped: loss is not finite" in shown.answer["answers"][0]


@pytest.mark.parametrize(
    "planted",
    [
        "<script>nothing_of_the_kind()</script>",
        "<script>fetch('https://example.com/a')</script>",
    ],
)
def test_an_error_or_a_request_would_be_noticed(planted, page, tmp_path):
    (tmp_path / "bad.html").write_text(page.read_text(encoding="utf-8") + planted, encoding="utf-8")
    assert show(tmp_path / "bad.html", 600, 400, "return 1").complaints


@pytest.mark.parametrize("run", ["one step", "no step", "long text"])
def test_odd_runs_fit_a_phone(run: str, tmp_path: Path):
    summary: dict[str, Any] = {"run": "w" * 500} if run == "long text" else {}
    steps = 1 if run == "one step" else 30
    folder = make_run(tmp_path, steps=steps, skipped=(), **summary)
    if run == "no step":
        (folder / "metrics.jsonl").write_text("")
    if run == "long text":
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": 30, "prompt": "{"p" * 3000}", "answer": "{"a" * 3000}"}}\n')
    shown = show(write_page(folder, DEFAULTS), 400, 1200, MEASURE)
    assert (shown.answer["width"], shown.complaints) == (400, [])
    if run == "one step":
        assert drawn(shown, "Loss", "train dots").sum() > 8  # half of it, as it lies on the edge


def test_without_chromium_the_tests_fail_and_name_the_command(page, monkeypatch):
    monkeypatch.setattr(browser.shutil, "which", lambda _: None)
    with pytest.raises(AssertionError, match=r"apt-get install .* chromium"):
        show(page, 400, 400, "return 1")

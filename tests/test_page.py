"""report.html of run folders as they come: short, long, damaged, hostile, still going on."""

from __future__ import annotations

import json
import math
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_run import ARGUMENTS, DEFAULTS, MODEL, evaluated, make_run, write

from llama.finetune import page as page_module
from llama.finetune.page import __main__ as command
from llama.finetune.page import write_page


class Page(HTMLParser):
    """What a page holds: its words, its elements, and the data of each figure."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.figures: dict[str, dict[str, Any]] = {}
        self._inside = self._title = ""
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = "json" if ("type", "application/json") in attrs else tag

    def handle_data(self, data: str) -> None:
        if self._inside == "h2":
            self._title = data
        if self._inside == "json":
            self.figures[self._title] = json.loads(data, parse_constant=pytest.fail)
        elif self._inside not in ("style", "script"):
            self.words.append(data)
        self._inside = ""

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def curve(self, figure: str, name: str) -> dict[str, Any]:
        (found,) = (c for c in self.figures[figure]["curves"] if c["name"] == name)
        return found


def page_of(folder: Path) -> Page:
    return Page(write_page(folder, DEFAULTS))


def page_of_lines(folder: Path, *lines: dict[str, Any], **config: Any) -> Page:
    """The page of a run that goes on and wrote these lines."""
    about = {"world_size": 1, "torch": "2.13.0", "steps": 10, "arguments": ARGUMENTS}
    write(folder / "config.json", about | {"model": MODEL} | config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return page_of(folder)


def test_a_page_of_a_finished_run_tells_its_figures_curves_answers_and_settings(tmp_path):
    page = page_of(make_run(tmp_path))
    for words in (
        "Finished: 1,200 steps",
        "Perplexity 2.587",
        "Tokens a second 8,176 1,022 a rank",
        "Peak memory 38.4 GiB",
        "Time 1 h 50 min",
        "Engine minifsdp 8 ranks",
        "Parameters 6.74B",
        "Refused lines 12",
        "Skipped steps 3 of 1,200",
        "squared lengths) / 2,252.0 s / (8 x 312 TFLOP/s) = 38.2%",
        "My parcel has not arrived. What now?",
        "Yes, as long as the parcel has not left",
        "n layers 32",
    ):
        assert words in page.text, words
    titles = ["Loss", "Evaluation perplexity", "Learning rate", "Gradient norm", "Speed", "MFU"]
    assert list(page.figures) == titles
    assert [c["name"] for c in page.figures["Loss"]["curves"]] == [
        "training",
        "smoothed",
        "evaluation",
    ]
    assert list(page.figures["Gradient norm"]["marks"]) == ["310", "311", "742"]
    spoken = [a["aria-label"] for tag, a in page.tags if tag == "svg"]
    assert "evaluation: 2.31 at step 0, 0.9505 at step 1,200" in spoken[0]
    tokens = page.curve("Evaluation perplexity", "perplexity")["tokens"]
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert tokens[0] == 0 and tokens[-1] == sum(line.get("tokens", 0) for line in lines)


def test_flags_that_differ_from_their_defaults_come_first_with_the_default(tmp_path):
    page = page_of(make_run(tmp_path))
    flags = re.findall(r"<td>--([a-z0-9-]+)</td>", page.source)
    unlike = [n.replace("_", "-") for n in ARGUMENTS if ARGUMENTS[n] != DEFAULTS[n]]
    assert flags[: len(unlike)] == sorted(unlike)
    assert {*flags, "seq-len"} == {name.replace("_", "-") for name in ARGUMENTS}
    assert "Not given: --seq-len" in page.text
    assert "--bf16 yes no" in page.text
    own = Page(write_page(tmp_path))  # with train.py's own defaults
    assert own.text.index("--bf16") < own.text.index("--clip") and "--bf16 yes no" in own.text


def test_a_page_needs_no_network_and_says_so(tmp_path):
    page = page_of(make_run(tmp_path))
    assert not re.search(r"https?:|//|url\(|@import", page.source)
    assert not [a for _, a in page.tags if {"src", "href", "action", "data"} & a.keys()]
    policies = [a["content"] for _, a in page.tags if "http-equiv" in a]
    assert policies and policies[0].startswith("default-src 'none';")


def test_a_run_of_one_step_is_drawn_as_dots(tmp_path):
    line = {"step": 1, "loss": 2.0, "lr": 1e-3, "grad_norm": 1.0, "tokens": 10, "seconds": 0.5}
    page = page_of_lines(tmp_path, line)
    assert page.curve("Loss", "training")["y"] == ["2"]
    assert page.curve("Speed", "tokens/s")["y"] == ["20"]
    assert "1 of 10 steps so far" in page.text
    dots = [a["d"] for tag, a in page.tags if tag == "path" and "dots" in a["class"]]
    assert len(dots) == 4 and all(re.fullmatch(r"M[\d.]+ [\d.]+h0", d) for d in dots)


def test_a_run_without_a_step_says_so(tmp_path):
    page = page_of_lines(tmp_path)
    assert "No step has been measured yet" in page.text and not page.figures
    page = page_of_lines(tmp_path, evaluated(0, 2.0))
    assert page.curve("Loss", "evaluation")["y"] == ["2"]


def test_a_hundred_thousand_steps_are_thinned_and_keep_their_extremes(tmp_path):
    make_run(tmp_path, steps=100_000, eval_every=1000, skipped=())
    path = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (spike,) = (line for line in lines if line["step"] == 54_321)
    (dip,) = (line for line in lines if line["step"] == 76_543)
    spike["loss"], dip["loss"] = 3.21, 0.0123
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    began = time.perf_counter()
    page = page_of(tmp_path)
    assert time.perf_counter() - began < 20
    assert len(page.source) < 1_500_000
    training = page.curve("Loss", "training")
    assert 1000 < len(training["x"]) <= 1500
    drawn = dict(zip(training["x"], training["y"], strict=True))
    assert drawn[54_321] == "3.21" and drawn[76_543] == "0.0123"
    assert (training["x"][0], training["x"][-1]) == (1, 100_000)


@pytest.mark.parametrize(
    "odd",
    [math.nan, math.inf, -math.inf, None, "much", True, [1], 10**400, 1.7e308],
    ids=lambda odd: str(odd)[:8],
)
def test_a_value_that_is_none_breaks_a_curve_and_nothing_else(odd, tmp_path):
    keys = ("loss", "lr", "grad_norm", "tokens", "seconds", "mfu")
    lines = [{"step": step} | dict.fromkeys(keys, 0.5) for step in range(1, 8)]
    lines[3] |= dict.fromkeys(keys, odd)
    del lines[5]["grad_norm"], lines[5]["tokens"]
    page = page_of_lines(tmp_path, *lines, {"step": 7, "eval_loss": odd, "eval_perplexity": odd})
    assert page.curve("Loss", "training")["x"] == [1, 2, 3, 5, 6, 7]
    assert page.curve("Gradient norm", "norm")["x"] == [1, 2, 3, 5, 7]
    (line,) = (a["d"] for tag, a in page.tags if tag == "path" and a["class"] == "norm line")
    assert (line.count("M"), line.count("L")) == (1, 2)  # 1 to 3; 5 and 7 stand alone
    paths = " ".join(a["d"] for tag, a in page.tags if tag == "path")
    assert not re.search("(?i)nan|inf", paths)


def test_html_in_what_people_wrote_is_shown_and_not_run(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \"quoted\" 'too'"
    skipped = {"step": 2, "loss": None, "skipped": evil}
    said = {"step": 2, "prompt": evil, "answer": evil}
    arguments = ARGUMENTS | {"name": evil, "data": [evil], evil: evil}
    page = page_of_lines(tmp_path, {"step": 1, "loss": 1.0}, skipped, said, arguments=arguments)
    scripts = [a for tag, a in page.tags if tag == "script"]
    assert scripts == [{"type": "application/json"}, {}]
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert page.text.count(evil) >= 5
    assert page.figures["Loss"]["marks"] == {"2": evil}


def test_huge_texts_are_cut_and_what_is_no_unicode_is_written(tmp_path):
    answer = "a\ud800\n" * 900
    said = [{"step": step, "prompt": "p" * 9000, "answer": answer} for step in range(40)]
    said += [{"step": 40, "prompt": f"{number}", "answer": answer} for number in range(40)]
    page = page_of_lines(tmp_path, *said)
    assert "(7,000 more characters)" in page.text and "(700 more characters)" in page.text
    assert "8 of 40 answers" in page.text
    assert "11 more prompts are in metrics.jsonl" in page.text
    assert len(page.source) < 400_000


def test_a_run_that_goes_on_is_read_up_to_its_last_whole_line(tmp_path):
    make_run(tmp_path, finished=False)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 801, "lo')
    page = page_of(tmp_path)
    assert "800 of 1,200 steps so far" in page.text
    assert "Peak memory" not in page.text and "Tokens a second" in page.text
    assert page.figures["Loss"]["high"] == 800


def test_a_summary_of_before_the_run_was_trained_on_is_left_out(tmp_path):
    make_run(tmp_path, steps=30)
    summary = json.loads((tmp_path / "summary.json").read_text())
    write(tmp_path / "summary.json", summary | {"steps": 20})
    page = page_of(tmp_path)
    assert "30 of 30 steps so far" in page.text and "Peak memory" not in page.text


def test_a_step_written_twice_counts_once_as_it_was_last(tmp_path):
    lines = [{"step": step, "loss": 1.0, "tokens": 5} for step in (1, 2, 3)]
    page = page_of_lines(tmp_path, *lines, {"step": 2, "loss": 7.0, "tokens": 5})
    training = page.curve("Loss", "training")
    assert (training["x"], training["y"]) == ([1, 2, 3], ["1", "7", "1"])
    assert training["tokens"] == [5, 10, 15]


def test_a_page_is_absent_or_whole(tmp_path, monkeypatch):
    make_run(tmp_path, steps=5)
    before = write_page(tmp_path, DEFAULTS).read_bytes()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(OSError, match="full"):
        write_page(tmp_path, DEFAULTS)
    assert (tmp_path / "report.html").read_bytes() == before
    monkeypatch.undo()
    write_page(tmp_path, DEFAULTS)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "metrics.jsonl", "summary.json", "report.html"}


def test_the_command_makes_the_page_and_names_what_is_wrong(tmp_path, capsys):
    make_run(tmp_path, steps=5)
    assert command.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert command.main([str(tmp_path)]) == 2
    assert f"page: error: {tmp_path / 'metrics.jsonl'}:1: damaged" in capsys.readouterr().err
    assert command.main([str(tmp_path / "no")]) == 2
    assert "is no run folder: its config.json has no flags" in capsys.readouterr().err
    assert page_module.__doc__ and "python -m llama.finetune.page RUN_FOLDER" in page_module.__doc__

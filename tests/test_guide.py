"""The guide shows what the engine does, and its exercises' answers are the tests that fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import Page

from docs.make.build import PAGES, ROOT, Made
from docs.make.exercises import break_it, exercises
from docs.make.markers import Marker, StaleError, markers, rewritten
from docs.make.yourself.check import check

EXERCISES = exercises()
QUICK = (1, 2)
INDEX = "README.md"
NAMES = sorted(path.name for path in PAGES.glob("*.md"))


def test_every_part_of_the_guide_is_what_the_engine_does():
    command = [sys.executable, "-m", "docs.make", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def _links(name: str) -> set[str]:
    page = Page(ROOT, str((PAGES / name).relative_to(ROOT)))
    found = {link for _, link in page.links if "://" not in link}
    return found | {text.split("](", 1)[1][:-1] for text in _pictures(page.text)}


def _pictures(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("![")]


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_somewhere(name):
    for link in _links(name):
        path, _, anchor = link.partition("#")
        target = (PAGES / path).resolve() if path else PAGES / name
        assert target.exists(), f"{name} links to {link}"
        if anchor:
            assert anchor in Page(ROOT, str(target.relative_to(ROOT))).anchors, link


def test_every_page_can_be_reached_from_the_index():
    reached, waiting = set(), [INDEX]
    while waiting:
        name = waiting.pop()
        if name not in reached and name in NAMES:
            reached.add(name)
            waiting += [link.partition("#")[0] for link in _links(name)]
    assert reached == set(NAMES)


class Edited:
    """A copy of the guide and of the engine's files, to be spoilt."""

    def __init__(self, folder: Path) -> None:
        self.pages, self.root = folder / "pages", folder / "root"
        shutil.copytree(PAGES, self.pages)
        for name in ("minifsdp", "docs/make"):
            shutil.copytree(ROOT / name, self.root / name)

    def edit(self, path: Path, old: str, new: str) -> None:
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new, 1), encoding="utf-8")

    def complaints(self) -> list[str]:
        """Of what needs no ranks: everything but what these print."""
        return Unplayed(self.pages, self.root).check()


class Unplayed(Made):
    """Takes what ranks did as it stands in the pages."""

    def __call__(self, marker: Marker) -> str:
        return marker.body if marker.kind in ("run", "table", "value") else super().__call__(marker)

    def pictures(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in (PAGES / "pictures").glob("*.svg")}


@pytest.fixture
def edited(tmp_path: Path) -> Edited:
    made = Edited(tmp_path)
    assert made.complaints() == []
    return made


def test_a_block_that_is_not_the_engines_code_is_told_of_with_a_diff(edited):
    edited.edit(edited.pages / "layout.md", "start = min(rank", "start = max(rank")
    (complaint,) = edited.complaints()
    assert "layout.md:" in complaint
    assert "code: minifsdp/layout.py RowLayout.rows_of" in complaint
    assert "-    start = max(rank" in complaint and "+    start = min(rank" in complaint


def test_a_function_that_was_renamed_is_told_of(edited):
    edited.edit(edited.root / "minifsdp/layout.py", "def rows_of(", "def rows_at(")
    (complaint,) = edited.complaints()
    assert "layout.md:" in complaint and "minifsdp/layout.py has no RowLayout.rows_of" in complaint


def test_a_line_of_an_exercise_that_is_gone_is_told_of(edited):
    edited.edit(edited.root / "minifsdp/layout.py", "-(-self.rows", "-(-1 * self.rows")
    told = edited.complaints()
    assert len(told) == 1 and "exercises.md:" in told[0] and "<!-- change: 1 -->" in told[0]


def test_a_picture_that_is_not_drawn_so_now_is_told_of(edited):
    (edited.pages / "pictures" / "old.svg").write_text("<svg/>")
    edited.edit(edited.pages / "pictures" / "layout-rows.svg", "rank0", "rank1")
    told = edited.complaints()
    assert any("layout-rows.svg is stale" in complaint for complaint in told)
    assert any("old.svg: no page shows it" in complaint for complaint in told)


def test_a_wrong_figure_is_told_of(tmp_path):
    folder = tmp_path / "pages"
    shutil.copytree(PAGES, folder)
    for name in NAMES:
        if name != INDEX:
            (folder / name).unlink()
    shutil.rmtree(folder / "pictures")
    page = folder / INDEX
    assert Made(folder).check() == []  # the index needs no ranks
    page.write_text(page.read_text().replace("| 8 | 100.4 | 12.6 |", "| 8 | 100.4 | 12.5 |"))
    (complaint,) = Made(folder).check()
    assert "README.md:" in complaint and "<!-- table: layout.shares -->" in complaint
    assert "-| 8 | 100.4 | 12.5 |" in complaint and "+| 8 | 100.4 | 12.6 |" in complaint


@pytest.mark.parametrize(
    "text",
    [
        "<!-- run: layout.chunk -->\n",
        "<!-- end -->",
        "<!-- walk: layout.chunk -->\n<!-- end -->",
        "<!-- code: a b -->\n<!-- run: layout.chunk -->\n<!-- end -->",
        "there are\n<!-- value: layout.parameters -->278<!-- end --> of them",
    ],
)
def test_a_marker_without_partner_of_no_kind_or_out_of_place_is_refused(text):
    with pytest.raises(StaleError):
        list(markers(text))


def test_rewriting_changes_what_is_between_markers_and_nothing_else():
    text = (
        "one <!-- value: a.b -->1<!-- end --> two\n<!-- table: c.d -->\nold\n<!-- end -->\nthree\n"
    )
    made = rewritten(text, lambda marker: marker.what.upper())
    assert made == text.replace(">1<", ">A.B<").replace("old", "C.D")


def test_there_are_exercises_on_every_page_and_each_has_its_answer():
    text = (PAGES / "exercises.md").read_text(encoding="utf-8")
    numbers = [str(number) for number in range(1, len(EXERCISES) + 1)]
    for kind in ("change", "answer"):
        assert [m.what for m in markers(text) if m.kind == kind] == numbers
    assert len(EXERCISES) >= 12 and all(exercise.tells for exercise in EXERCISES)


RING_SUM = """
def ring_sum(values, owner):
    first, *others = [values[(owner - i) % len(values)] for i in range(1, len(values))]
    total = first.clone()
    for value in [*others, values[owner]]:
        total += value
    return total
"""


@pytest.mark.parametrize("name", ["rows_of", "place_rows", "ring_sum"])
def test_what_the_reader_has_not_written_is_not_right(name):
    told = check(name, ROOT / "docs/make/yourself" / f"{name}.py")
    assert told == f"{name} is not written yet"


@pytest.mark.parametrize(
    ("name", "written", "words"),
    [
        (
            "rows_of",
            "def rows_of(rows, world_size, rank): return range(rank, rows, world_size)",
            "rank",
        ),
        ("place_rows", "def place_rows(c, r): c.view(-1)[: r.numel()] = r", "nan"),
        ("ring_sum", "def ring_sum(values, owner): return sum(values)", "other bits"),
        ("ring_sum", RING_SUM.replace(".clone()", ""), "changes the values"),
    ],
)
def test_what_the_reader_wrote_wrong_is_told(name, written, words, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(written)
    assert words in check(name, path)


def test_what_the_reader_wrote_right_is_right_in_a_step_too(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(RING_SUM)
    command = [sys.executable, "-m", "docs.make.yourself", "ring_sum", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "right, alone and in a step" in done.stdout, done.stdout


def _proven(number: int) -> None:
    exercise = EXERCISES[number - 1]
    said = break_it(exercise)
    assert sorted(said.failed) == sorted(exercise.tells), said.output


@pytest.mark.parametrize("number", QUICK)
def test_exactly_the_tests_of_the_answer_tell(number):
    _proven(number)


@pytest.mark.slow
@pytest.mark.parametrize("number", [n + 1 for n in range(len(EXERCISES)) if n + 1 not in QUICK])
def test_exactly_the_tests_of_the_answer_tell_of_the_other_exercises(number):
    _proven(number)

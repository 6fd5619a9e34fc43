"""The exercises: a line of the engine to break, the tests to choose from, and those that tell.

A test proves of each that these tests fail and the others do not (`tests/test_guide.py`).
"""

from __future__ import annotations

import functools
import re
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

from .markers import StaleError

_TESTS = Path(__file__).resolve().parents[2] / "tests"
if str(_TESTS) not in sys.path:
    sys.path.append(str(_TESTS))  # where `mutations` is

from mutations import Mutation, run  # noqa: E402

_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
_WHY = re.compile(r"^E  +(.*)$", re.MULTILINE)


class Exercise(NamedTuple):
    """A line to break."""

    mutation: Mutation
    suspects: tuple[str, ...]
    """Tests to choose from, as pytest names them."""
    tells: tuple[str, ...]
    """Of these, the tests that fail, parameters included."""


class Said(NamedTuple):
    """What the tests said of a broken engine."""

    failed: list[str]
    why: list[str]
    """The first line of each error."""
    output: str


def break_it(exercise: Exercise) -> Said:
    """Run the suspects on a copy of the tree with the line changed, to the end."""
    outcome = run(exercise.mutation, ["--maxfail=1000", *exercise.suspects])
    failed = list(dict.fromkeys(_FAILED.findall(outcome.output)))
    if outcome.hung and outcome.killed_by:
        failed.append(outcome.killed_by)
    return Said(failed, _WHY.findall(outcome.output), outcome.output)


@functools.cache
def exercises() -> tuple[Exercise, ...]:
    """All of them, in order, from `exercises.toml`."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    found = []
    for each in table["exercise"]:
        within = each.get("within", "")
        mutation = Mutation(each["file"], each["line"], each["becomes"], each["says"], within)
        suspects, tells = (tuple(f"tests/{t}" for t in each[k]) for k in ("suspects", "tells"))
        found.append(Exercise(mutation, suspects, tells))
    return tuple(found)


def exercise(number: int) -> Exercise:
    """By its number, from 1. Raises StaleError for another."""
    if not 1 <= number <= len(exercises()):
        raise StaleError(f"there are exercises 1 to {len(exercises())}, not {number}")
    return exercises()[number - 1]


def change(root: Path, number: int, up: str = "../../") -> str:
    """What to change, the tests to choose from, and how to run them, as Markdown."""
    mutation, suspects, _ = exercise(number)
    source = (root / mutation.file).read_text(encoding="utf-8")
    try:
        mutation.lineno(source)
    except ValueError as error:
        raise StaleError(str(error)) from None
    within = f", in `{mutation.within}`" if mutation.within else ""
    lines = [
        f"In [`{mutation.file}`]({up}{mutation.file}){within}:",
        "",
        "```diff",
        f"-{mutation.line}",
        f"+{mutation.becomes}",
        "```",
        "",
        "Which of these tests tell you?",
        "",
    ]
    lines += [f"- [`{_name(test)}`]({up}{test.partition('::')[0]})" for test in suspects]
    lines += ["", "```", f"python -m docs.make.exercise {number}", "```"]
    return "\n".join(lines)


def answer(number: int) -> str:
    """The tests that tell, as Markdown."""
    variants: dict[str, list[str]] = {}
    for test in exercise(number).tells:
        name, _, variant = _name(test).partition("[")
        variants.setdefault(name, []).extend([variant[:-1]] if variant else [])
    lines = []
    for name, of_it in variants.items():
        words = ", ".join(f"`{variant}`" for variant in of_it)
        lines.append(f"- `{name}`" + (f" with {words}" if words else ""))
    return "\n".join(lines)


def _name(test: str) -> str:
    return test.rpartition("::")[2] if "::" in test else test

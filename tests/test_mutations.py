"""The fault suite: no line of the engine can be broken without a test that tells.

pytest -m mutation              # all of them; `-k unit.py` for one file's
pytest -m mutation -s           # and each as it is killed
"""

from __future__ import annotations

import ast
import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mutations import Mutation, StaleError, run
from mutations.runner import stop
from mutations.sandbox import ROOT
from mutations.table import MUTATIONS
from mutations.verdict import Verdict, judge, summary

LANES = 2  # mutations at a time
ENGINE = [*(ROOT / "minifsdp").glob("*.py"), *(ROOT / "minifsdp" / "collectives").glob("*.py")]
NOT_MUTATED = {
    # Only GPUs run them.
    "minifsdp/debug.py: _host_group",
    "minifsdp/hooks.py: _enter_model",
    "minifsdp/managed.py: move_to_device",
    "minifsdp/offload.py: _copied",
    # They set up what others use, which are mutated.
    "minifsdp/collectives/futex.py: _syscall",
    "minifsdp/collectives/shared.py: _scratch",
    "minifsdp/pages.py: _madvise",
    "minifsdp/reduction.py: _forget",
    # What they say is for people.
    "minifsdp/arrivals.py: _why_late",
    "minifsdp/arrivals.py: _why_silent",
    "minifsdp/watchdog.py: _stack",
    "minifsdp/watchdog.py: speak",
    "minifsdp/watchdog.py: write",
    # A cache, whose lack only costs time.
    "minifsdp/flat.py: full_slots",
    # Threads that end processes: see the watchdog's own tests.
    "minifsdp/watchdog.py: _end_alone",
    "minifsdp/watchdog.py: _talk",
}


@functools.cache
def read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def source_of(mutation: Mutation) -> str:
    return read(mutation.file)


# The table


def test_every_line_that_is_mutated_is_there_once_and_what_becomes_of_it_is_python():
    """All mutations of a file are made at once, those of one line in turn: compiling takes time."""
    for file in sorted({m.file for m in MUTATIONS}):
        waiting = [m for m in MUTATIONS if m.file == file]
        lines = {m: m.lineno(source_of(m)) for m in waiting}  # raises StaleError
        while waiting:
            together = {lines[m]: m for m in waiting}
            waiting = [m for m in waiting if m not in together.values()]
            after = read(file)
            for line, mutation in together.items():
                assert mutation.becomes != mutation.line
                after = mutation.apply(after, line)
            compile(after, file, "exec")


def test_no_two_mutations_are_the_same():
    changes = [(m.file, m.lineno(source_of(m)), m.becomes) for m in MUTATIONS]
    assert sorted(changes) == sorted(set(changes))


def _functions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, first and last line of each function that is more than one expression or error."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef) or node.name == "__init__":
            continue
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        simple = (ast.Pass, ast.Expr, ast.Return, ast.Raise)
        if len(body) > 1 or not all(isinstance(one, simple) for one in body):
            yield node.name, node.lineno, node.end_lineno


def test_every_function_of_the_engine_that_does_something_is_mutated():
    missing = []
    for path in ENGINE:
        file = str(path.relative_to(ROOT))
        mutated = [m.lineno(source_of(m)) for m in MUTATIONS if m.file == file]
        for name, first, last in _functions(path):
            told = any(first <= line <= last for line in mutated)
            if not told and f"{file}: {name}" not in NOT_MUTATED:
                missing.append(f"{file}: {name}")
    assert missing == []


def test_a_line_that_is_missing_or_ambiguous_is_stale():
    source = "class A:\n    def f(self):\n        x = 1\n        x = 1\n\n\ndef f():\n    x = 1\n"
    assert Mutation("a.py", "x = 1", "x = 2", "", "A.f#2").lineno(source) == 4
    assert Mutation("a.py", "class A:", "class B:", "").apply(source).startswith("class B:\n")
    for line, within in [("x = 1", ""), ("x = 3", ""), ("x = 1", "A.f"), ("x = 1", "A.f#3")]:
        with pytest.raises(StaleError, match="times"):
            Mutation("a.py", line, "x = 2", "", within).lineno(source)


# The runner

CEILING = Mutation(
    "minifsdp/layout.py",
    "return -(-self.rows // self.world_size)",
    "return (self.rows + self.world_size - 1) // self.world_size",
    "nothing: it is the same number",
)


@pytest.mark.mutation
def test_the_runner_sees_a_survivor_a_death_and_a_process_that_dies():
    tests = ["tests/test_layout.py::test_rows_on_four_ranks"]
    assert run(CEILING, tests).killed_by is None
    floor = CEILING._replace(becomes="return self.rows // self.world_size")
    outcome = run(floor, tests)
    assert outcome.killed_by.startswith(tests[0]) and not outcome.hung
    assert "1 failed" in outcome.output
    dies = CEILING._replace(becomes="import os; os.abort()")
    assert run(dies, tests).killed_by.startswith(tests[0])
    hangs = CEILING._replace(becomes="import time; time.sleep(600)")
    outcome = run(hangs, tests, limit_seconds=5)
    assert outcome.killed_by.startswith(tests[0]) and outcome.hung


@pytest.mark.mutation
def test_the_runner_breaks_the_engine_of_every_rank_too():
    lost = Mutation("minifsdp/unit.py", "part.grow_full()", "pass", "no memory")
    test = "tests/test_engine_schedule.py::test_units_may_run_in_another_order_than_last_time"
    assert run(None, [test]).killed_by is None
    assert run(lost, [test]).killed_by == test


@pytest.mark.mutation
def test_the_runner_refuses_tests_that_are_not_there_and_lines_that_are_not():
    with pytest.raises(ValueError, match="test_nothing"):
        run(None, ["tests/test_layout.py::test_nothing"])
    with pytest.raises(StaleError, match="layout"):
        run(CEILING._replace(line="return 7"), ["tests/test_layout.py"])


# The engine


class Report:
    """A pytest plugin: the table at the end."""

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []
        self.began = time.monotonic()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("mutations")
        terminalreporter.write_line(summary(self.verdicts, time.monotonic() - self.began))


@pytest.fixture(scope="session")
def verdict_of(request: pytest.FixtureRequest) -> Iterator[Callable[[Mutation], Verdict]]:
    """Gives the verdict on a mutation; those of all that were selected are begun at once."""
    report = Report()
    request.config.pluginmanager.register(report)
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = [p.params["mutation"] for p in parameters if p and "mutation" in p.params]
    lanes = ThreadPoolExecutor(LANES)
    verdicts = {mutation: lanes.submit(judge, mutation) for mutation in wanted}

    def result(mutation: Mutation) -> Verdict:
        report.verdicts.append(verdicts[mutation].result())
        return report.verdicts[-1]

    yield result
    lanes.shutdown(wait=False, cancel_futures=True)
    if not all(verdict.done() for verdict in verdicts.values()):
        stop()  # after an interruption


@pytest.mark.mutation
def test_the_tests_that_tell_pass_on_the_engine_as_it_is(request):
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = [p.params["mutation"] for p in parameters if p and "mutation" in p.params]
    tests = dict.fromkeys(test for m in wanted if (test := MUTATIONS[m]) is not None)
    if tests:
        outcome = run(None, list(tests), limit_seconds=900)
        assert outcome.killed_by is None, outcome.output


def _place(mutation: Mutation) -> str:
    try:
        return f"{mutation.file}:{mutation.lineno(source_of(mutation))}"
    except StaleError:
        return f"{mutation.file}:?"


@pytest.mark.mutation
@pytest.mark.parametrize("mutation", MUTATIONS, ids=_place)
def test_a_test_tells(verdict_of, mutation):
    verdict = verdict_of(mutation)
    outcome = verdict.outcome
    assert outcome.killed_by is not None, f"survived: {mutation}\n{outcome.output}"
    print(f"{outcome.seconds:.1f} s, {mutation}: {outcome.killed_by}")

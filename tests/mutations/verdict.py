"""Whether any test of the engine tells of a mutation, and what came of many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from .mutation import Mutation
from .runner import Outcome, run
from .sandbox import ROOT
from .server import NOT_IMPORTED
from .table import MUTATIONS

WHOLE_SUITE_LIMIT_SECONDS = 900.0
# Tests of other parts than the engine, by what their names begin with.
_OTHERS = "bench evaluate faults finetune from_fsdp gpu guide ladder llama lora mutations older "
_OTHERS += "page plan readme settings structure trace_page train two_hosts verify"


def engine_tests() -> list[str]:
    """The files of tests that may tell of a mutation."""
    others = tuple(f"test_{name}" for name in _OTHERS.split())
    files = sorted((ROOT / "tests").glob("test_*.py"))
    return [f"tests/{file.name}" for file in files if not file.name.startswith(others)]


class Verdict(NamedTuple):
    """What the tests said of a mutation: first the one that is noted in the table, then all."""

    mutation: Mutation
    outcome: Outcome
    is_news: bool = False
    """Whether another test told than the one in the table."""


def judge(mutation: Mutation) -> Verdict:
    """Run the test that is noted for `mutation`, and the whole engine's if that does not tell."""
    noted = MUTATIONS.get(mutation)
    if noted is not None:
        try:
            outcome = run(mutation, [noted])
        except ValueError as missing:  # the test has another name now
            outcome = Outcome(None, 0.0, str(missing))
        if outcome.killed_by is not None:
            return Verdict(mutation, outcome)
    outcome = run(mutation, engine_tests(), WHOLE_SUITE_LIMIT_SECONDS)
    if outcome.killed_by is not None and not outcome.hung:
        test = outcome.killed_by.removesuffix(NOT_IMPORTED)  # then it is a file
        sound = run(None, [test])
        if sound.killed_by is not None:
            raise AssertionError(f"{test} fails on the engine as it is:\n{sound.output}")
    return Verdict(mutation, outcome, is_news=True)


def summary(verdicts: Iterable[Verdict], seconds: float) -> str:
    """A table by file, and what there is to do."""
    verdicts = list(verdicts)
    by_file: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        by_file[verdict.mutation.file].append(verdict)
    lines = [f"{'file':36}{'mutations':>10}{'killed':>8}{'hung':>6}{'survived':>10}{'seconds':>9}"]
    for file, theirs in [*sorted(by_file.items()), ("all", verdicts)]:
        survived = sum(v.outcome.killed_by is None for v in theirs)
        hung = sum(v.outcome.hung for v in theirs)
        counts = f"{len(theirs):10}{len(theirs) - survived - hung:8}{hung:6}{survived:10}"
        lines.append(f"{file:36}{counts}{sum(v.outcome.seconds for v in theirs):9.1f}")
    lines.append(f"in {seconds:.0f} s")
    for verdict in verdicts:
        mutation, outcome = verdict.mutation, verdict.outcome
        if outcome.killed_by is None:
            lines.append(f"SURVIVED  {mutation}")
        elif outcome.hung:
            lines.append(f"hung      {mutation}, in {outcome.killed_by}")
        elif verdict.is_news:
            lines.append(f"to note   {mutation}: {outcome.killed_by} tells")
    return "\n".join(lines)

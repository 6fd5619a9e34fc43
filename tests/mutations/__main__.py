"""Finds the tests that tell of mutations, and notes them in the table.

    PYTHONPATH=tests python -m mutations            # of those for which none is noted
    PYTHONPATH=tests python -m mutations unit.py    # of those of a file, noted or not

The whole suite is run on each of them, so a mutation that survives takes minutes.
"""

from __future__ import annotations

import argparse
import time

from .table import MUTATIONS, note
from .verdict import judge, summary


def main() -> int:
    """Returns the exit code: 1 if a mutation survived."""
    parser = argparse.ArgumentParser(prog="python -m mutations", description=__doc__)
    parser.add_argument("files", nargs="*", help="parts of names of engine files")
    files = parser.parse_args().files
    began, verdicts = time.monotonic(), []
    for mutation, noted in list(MUTATIONS.items()):
        if not any(part in mutation.file for part in files) and (files or noted is not None):
            continue
        verdict = judge(mutation)
        verdicts.append(verdict)
        told, hung = verdict.outcome.killed_by, verdict.outcome.hung
        print(f"{mutation}: {told or 'SURVIVED'}", flush=True)
        if told is not None and "::" in told and not hung:
            note(mutation, told)
    print(summary(verdicts, time.monotonic() - began))
    return any(v.outcome.killed_by is None for v in verdicts)


if __name__ == "__main__":
    raise SystemExit(main())

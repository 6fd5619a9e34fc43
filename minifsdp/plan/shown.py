"""A plan on the terminal and in files: what is known first is told first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .report import Report
from .text import around, plan_text, remedy_line

FITS, DOES_NOT_FIT, MISTAKE = 0, 1, 2
"""Exit codes of what plans; MISTAKE also where a plan or a file of it failed."""
ENDINGS = {"--json": ".json", "--page": ".html"}


def check_file(flag: str, path: str | Path) -> None:
    """ValueError for a file that a plan could not be written to; nothing is planned then."""
    path = Path(path)
    if path.suffix != ENDINGS[flag]:
        raise ValueError(f"{flag} {path} must end in {ENDINGS[flag]}")
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {path.parent}: make it first")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{flag} {path} cannot be written: give another file")


def show(report: Report, files: dict[str, str | Path | None]) -> int:
    """Print the plan, then changes as they are planned, then write the files of flags in `files`.

    Returns the exit code. A file that cannot be written costs neither the text nor the others.
    """
    print(plan_text(report), flush=True)
    for line in around(report, map(remedy_line, report.search or ())):
        print(line, flush=True)
    code = FITS if report.fits else DOES_NOT_FIT
    for flag, path in files.items():
        if path is None:
            continue
        try:
            report.save(path)
        except OSError as reason:
            print(f"{flag} {path} was not written: {reason}", file=sys.stderr)
            code = MISTAKE
    return code

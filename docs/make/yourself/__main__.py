"""`python -m docs.make.yourself NAME FILE`: check a function that you wrote."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .check import check


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 if the function is right."""
    parser = argparse.ArgumentParser(prog="python -m docs.make.yourself", description=__doc__)
    parser.add_argument("name", help="rows_of, place_rows or ring_sum")
    parser.add_argument("file", type=Path, help="where your function is")
    given = parser.parse_args(arguments)
    try:
        wrong = check(given.name, given.file)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(wrong or f"{given.name} is right, alone and in a step on three ranks")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

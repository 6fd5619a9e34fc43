"""Climb the whole ladder: `python docs/ladder` prints its table, `--write` brings README.md up to
date."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ladder import print_table
from page import FOLDER, code_parts, refreshed
from trial import MBIT_PER_SECOND, start_ranks

_STEPS = 20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python docs/ladder")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=MBIT_PER_SECOND, help="see a rung's --help")
    parser.add_argument("--write", action="store_true", help="write it and the code into README.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.md"
        start_ranks(print_table, arguments.ranks, _STEPS, arguments.mbit, str(path))
        if arguments.write:
            page = FOLDER / "README.md"
            parts = code_parts() | {"table": path.read_text() + "\n"}
            page.write_text(refreshed(page.read_text(), parts))


if __name__ == "__main__":
    main()

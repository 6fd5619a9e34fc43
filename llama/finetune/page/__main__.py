"""Make `report.html` of a run folder: `python -m llama.finetune.page RUN_FOLDER`."""

import argparse
import sys
from pathlib import Path

from llama.finetune.page import write_page


def main(argv: list[str] | None = None) -> int:
    """The command line: 0, or 2 with a line on stderr for a folder that is no run's."""
    about = "Write report.html of a run, finished or not."
    parser = argparse.ArgumentParser(prog="python -m llama.finetune.page", description=about)
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="such as runs/tasks")
    folder = parser.parse_args(argv).folder
    try:
        print(write_page(folder))
    except (OSError, ValueError) as reason:
        print(f"page: error: {reason}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

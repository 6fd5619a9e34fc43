"""`python -m minifsdp.trace trace.json`: show a saved trace in text, and make its page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .text import timeline
from .trace import load


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m minifsdp.trace", description=__doc__)
    parser.add_argument("trace", type=Path, help="a trace that was saved as .json")
    parser.add_argument("--rank", type=int, help="show this rank (default: the first)")
    parser.add_argument("--page", type=Path, help="also write a page, an .html file")
    args = parser.parse_args()
    try:
        trace = load(args.trace)
        rank = trace.rank if args.rank is None else args.rank
        if rank not in trace.ranks:
            known = ", ".join(map(str, trace.ranks))
            raise ValueError(f"--rank {rank}: {args.trace} holds ranks {known}")
        print(timeline(trace.ranks, rank))
        if args.page is not None:
            trace.save(args.page)
            print(f"written: {args.page}")
    except (OSError, ValueError) as error:
        print(f"minifsdp.trace: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

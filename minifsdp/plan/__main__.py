"""`python -m minifsdp.plan --build pkg.module:function --batch pkg.module:function ...`.

Ends with 0 if the run fits, 1 if it does not, 2 for a mistake or where the plan failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import minifsdp

from .machines import GPUS
from .report import plan
from .shown import MISTAKE, check_file, show

_NAME = "python -m minifsdp.plan"


def main(argv: list[str] | None = None) -> int:
    """Plan and print; 0 if it fits, 1 if it does not, 2 for a mistake or where the plan failed."""
    args = _parser().parse_args(argv)
    settings: dict[str, Any] = {
        "nodes": args.nodes, "micro_batches": args.micro_batches, "clip_norm": args.clip or None,
        "steps": args.steps, "price": args.price, "host_memory_gib": args.host_memory,
    }  # fmt: skip
    if args.network is not None:
        settings["network_gb_s"] = args.network
    files = {"--json": args.json, "--page": args.page}
    try:
        for flag, path in files.items():
            if path is not None:
                check_file(flag, path)
        build, batch = named(args.build, "--build"), named(args.batch, "--batch")
        if args.loss is not None:
            settings["loss"] = named(args.loss, "--loss")
        return show(plan(build, batch, args.world_size, args.gpu, **settings), files)
    except Exception as error:
        print(f"{_NAME}: {_told(error)}", file=sys.stderr)
        return MISTAKE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_NAME,
        description="Plan a sharded run without a GPU.",
        epilog="Ends with 0 if the run fits, 1 if it does not, 2 for a mistake or a failed plan.",
    )
    add = parser.add_argument
    add(
        "--build", required=True, metavar="MODULE:FUNCTION",
        help="makes the model on meta, sharded, and returns it with a function from the model to "
        "its optimizer",
    )  # fmt: skip
    add(
        "--batch", required=True, metavar="MODULE:FUNCTION",
        help="makes what the model is called with: a tensor, a tuple, or a dict of keywords",
    )  # fmt: skip
    add(
        "--loss", metavar="MODULE:FUNCTION",
        help="from what the model returns to a tensor without dimensions; default: its sum",
    )  # fmt: skip
    add("--world-size", type=_whole, required=True, help="ranks, one GPU each")
    add("--gpu", required=True, help=f"a number of GB (timed as an A100), or {', '.join(GPUS)}")
    add("--nodes", type=_whole, help="machines, all with as many ranks; default: eight on each")
    add("--network", type=_positive, help="GB/s of a node, all its cards (200)")
    add("--host-memory", type=_positive, metavar="GIB", help="of a node, for what is offloaded")
    add("--micro-batches", type=_whole, default=1, help="a step (1)")
    add("--clip", type=_amount, default=1.0, help="norm to clip to, 0: none (1.0)")
    add("--steps", type=_whole, help="of the run, to say how long it takes")
    add("--price", type=_positive, help="of a GPU for an hour, to say what --steps cost")
    add("--json", type=Path, metavar="FILE", help="write the plan there")
    add("--page", type=Path, metavar="FILE", help="write the picture there")
    return parser


def _number(of: type, fits: Callable[[Any], bool], must: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if fits(value := of(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {must}, not {text}")

    return read


_whole = _number(int, lambda n: n >= 1, "a whole number, 1 or more")
_amount = _number(float, lambda x: 0 <= x < math.inf, "a number, 0 or more")
_positive = _number(float, lambda x: 0 < x < math.inf, "a number above 0")


def named(name: str, flag: str) -> Callable[..., Any]:
    """The function called `module:function`. Raises ValueError if there is none."""
    module, _, function = name.partition(":")
    sys.path[:0] = [] if "" in sys.path else [""]
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{flag} {name}: {error}; give package.module:function") from None
    if not callable(found):
        raise ValueError(f"{flag} {name} is a {type(found).__name__}: give a function")
    return found


def _told(error: Exception) -> str:
    """An error in a line: the plan's own as they are, those of what was given with where.

    One of minifsdp's own is a defect; its traceback is told as well.
    """
    plan, engine, torchs = (
        str(Path(file).parent) for file in (__file__, minifsdp.__file__, torch.__file__)
    )
    places = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, (ValueError, RuntimeError)) and places[-1][0].startswith(plan):
        return str(error)
    words = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    given = [place for place in places if not place[0].startswith((engine, torchs, "<"))]
    if given:
        return f"{given[-1][0]}, line {given[-1][1]}: {words}"
    notes = getattr(error, "__notes__", [])
    if notes and not places[-1][0].startswith(engine):
        return f"{words} ({notes[0]})"
    return f"{words}\n{''.join(traceback.format_exception(error))}"


if __name__ == "__main__":
    sys.exit(main())

"""`python -m minifsdp.plan --build pkg.module:function --batch pkg.module:function ...`."""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .machines import GPUS
from .report import plan


def main(argv: list[str] | None = None) -> int:
    """Plan and print; 0 if it fits, 1 if it does not, 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m minifsdp.plan", description="Plan a sharded run without a GPU."
    )
    parser.add_argument(
        "--build", required=True, metavar="MODULE:FUNCTION",
        help="makes the model on meta, sharded, and returns it with a function from the model to "
        "its optimizer",
    )  # fmt: skip
    parser.add_argument(
        "--batch", required=True, metavar="MODULE:FUNCTION",
        help="makes what the model is called with: a tuple, or a dict of keywords",
    )  # fmt: skip
    parser.add_argument("--world-size", type=int, required=True, help="ranks, one GPU each")
    parser.add_argument("--gpu", required=True, help=f"a number of GB, or {', '.join(GPUS)}")
    parser.add_argument("--nodes", type=int, help="machines; default: eight ranks on each")
    parser.add_argument("--network", type=float, help="GB/s of a node, all its cards (200)")
    parser.add_argument("--micro-batches", type=int, default=1, help="a step (1)")
    parser.add_argument("--clip", type=float, default=1.0, help="norm to clip to, 0: none (1.0)")
    parser.add_argument("--steps", type=int, help="of the run, to say how long it takes")
    parser.add_argument("--price", type=float, help="of a GPU for an hour, to say what it costs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the picture there")
    args = parser.parse_args(argv)
    settings: dict[str, Any] = {
        "nodes": args.nodes, "micro_batches": args.micro_batches, "clip_norm": args.clip or None,
        "steps": args.steps, "price": args.price,
    }  # fmt: skip
    if args.network is not None:
        settings["network_gb_s"] = args.network
    warnings.filterwarnings("ignore", module=r"torch\.")
    try:
        build, batch = named(args.build, "--build"), named(args.batch, "--batch")
        report = plan(build, batch, args.world_size, args.gpu, **settings)
        for path, suffix, flag in ((args.json, ".json", "--json"), (args.page, ".html", "--page")):
            if path is not None:
                if path.suffix != suffix:
                    raise ValueError(f"{flag} {path} must end in {suffix}")
                report.save(path)
    except (ValueError, RuntimeError) as error:
        print(f"python -m minifsdp.plan: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0 if report.fits else 1


def named(name: str, flag: str) -> Callable[..., Any]:
    """The function called `module:function`. Raises ValueError if there is none."""
    module, _, function = name.partition(":")
    sys.path[:0] = [] if "" in sys.path else [""]
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{flag} {name}: {error}; give package.module:function") from None
    return found


if __name__ == "__main__":
    sys.exit(main())

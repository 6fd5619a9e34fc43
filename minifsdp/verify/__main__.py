"""`python -m minifsdp.verify --model pkg.mod:build --batch pkg.mod:batch ...`."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from .comparison import compare
from .judging import ALLOWANCE
from .settings import DTYPES

_ABOUT = f"""\
Train a model with one engine and with others, side by side in the same processes on the same data,
and compare inputs and outputs of units, parameters as they are used, losses, gradients, norms and
parameters after each step. Prints a table, and the first difference: where, by how much, how it
spreads, what it looks like. Exits 0 if nothing differs that may not, 1 if something does, 2 for a
mistake or a rank that dies or hangs.

FSDP2 and minifsdp must be equal in every bit. FSDP1, DDP and none (the whole model on all ranks'
data) sum in another order and may be as far off as rounding explains, which is measured: the same
training with every gradient moved at random as far as 2 W roundings could (W ranks). An engine can
be {ALLOWANCE:g} times as far from none's as that, in each phase up to that step, and two units
of its dtype more; nothing is allowed before the first gradient. The table shows the share used.
"""
_UNITS = """\
which modules are units besides the root: a glob of names, * for one part of them ("layers.*"), or
package.module:function from the model to a list of modules; default: the children of the ModuleList
or Sequential that has most parameters"""


def main(argv: list[str] | None = None) -> int:
    """Compare and print; 0 if nothing differs that may not, 1 if anything does, 2 for a mistake."""
    args = _parser().parse_args(argv)
    warnings.filterwarnings("ignore", module=r"torch\.")
    try:
        if args.json is not None and not args.json.parent.is_dir():
            raise ValueError(f"--json {args.json}: there is no folder {args.json.parent}")
        report = compare(
            args.model,
            args.batch,
            (args.engine, *(name.strip() for name in args.against.split(",") if name.strip())),
            args.steps,
            world_size=args.world_size,
            dtype=args.dtype,
            reduce_dtype=args.reduce_dtype,
            accumulate=args.accumulate,
            clip=args.clip,
            offload=args.offload,
            lr=args.lr,
            optimizer=args.optimizer,
            loss=args.loss,
            units=args.units,
            seed=args.seed,
            device=args.device,
            rounding=args.allow_rounding,
            timeout_seconds=args.timeout,
        )
        if args.json is not None:
            args.json.write_text(report.to_json(), encoding="utf-8")
    except (ValueError, RuntimeError, OSError) as error:
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
        print(f"python -m minifsdp.verify: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minifsdp.verify",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="MODULE:BUILD", help="build() -> nn.Module")
    add("--batch", required=True, metavar="MODULE:BATCH",
        help="batch(rank, step), with --accumulate batch(rank, step, micro) -> what the model is "
        "called with: a tuple, a dict of keywords, or one argument")  # fmt: skip
    add("--loss", metavar="MODULE:LOSS",
        help="loss(output, batch) -> one number; default: what the model returns")  # fmt: skip
    add("--engine", default="minifsdp", metavar="NAME",
        help="the engine that is tested: minifsdp, or package.module:shard, a function "
        "shard(model, units, settings) -> model, or an Engine (minifsdp)")  # fmt: skip
    add("--against", default="fsdp2", metavar="NAMES",
        help="with commas: fsdp2, fsdp1, ddp, none, minifsdp, one of your own (fsdp2)")  # fmt: skip
    add("--world-size", type=int, default=2, help="ranks to launch (2)")
    add("--steps", type=int, default=5, help="optimizer steps (5)")
    add("--units", metavar="GLOB", help=_UNITS)
    add("--dtype", choices=DTYPES, help="of parameters while they compute (as built)")
    add("--reduce-dtype", choices=DTYPES, help="of gradients while they are summed (as computed)")
    add("--accumulate", type=int, default=1, help="micro-batches a step, reduced at the end (1)")
    add("--clip", type=float, help="norm to clip to (no clipping)")
    add("--offload", action="store_true", help="keep rows and optimizer on the host")
    add("--optimizer", default="adamw", metavar="NAME",
        help="adamw, sgd (with momentum), or package.module:function (adamw)")  # fmt: skip
    add("--lr", type=float, default=1e-2, help="learning rate (0.01)")
    add("--seed", type=int, default=0, help="of build and of random numbers in forward (0)")
    add("--device", default="cpu", help="cpu (gloo) or cuda (nccl, a GPU a rank) (cpu)")
    add("--allow-rounding", action="store_true",
        help="allow every engine what rounding explains, FSDP2 and minifsdp too")  # fmt: skip
    add("--timeout", type=float, default=300.0, metavar="SECONDS",
        help="without progress, after which ranks are ended and named (300)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the report there too")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""`python -m llama.weights convert --from hf --to meta SRC DST`: weights from folder to folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from llama.weights.convert import FORMATS, convert


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments say; 0, or 2 with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m llama.weights", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "convert", help="write a folder of weights anew, in the other format or another type"
    )
    add = command.add_argument
    add("source", metavar="SRC", help="the folder to read")
    add("target", metavar="DST", help="the folder to write, which must not exist or be empty")
    add("--from", dest="source_format", choices=FORMATS, required=True, help="the format of SRC")
    add("--to", dest="target_format", choices=FORMATS, required=True, help="the format of DST")
    types = ("bfloat16", "float16", "float32")
    add("--dtype", choices=types, help="the type to write (default: as stored)")
    add("--shards", type=int, default=1, metavar="N", help="number of Meta's files (default: 1)")
    add(
        "--max-seq-len",
        type=int,
        metavar="N",
        help="longest sequence in tokens, which Meta's files do not tell (default: 4096, or 16384 "
        "for Code Llama)",
    )
    args = parser.parse_args(argv)
    if args.shards != 1 and args.target_format == "hf":
        parser.error("--shards counts Meta's files: it needs --to meta")
    try:
        config = convert(
            (args.source_format, args.source),
            (args.target_format, args.target),
            dtype=getattr(torch, args.dtype) if args.dtype else None,
            shards=args.shards,
            max_seq_len=args.max_seq_len,
        )
    except (ValueError, OSError) as reason:
        print(f"{parser.prog}: error: {reason}", file=sys.stderr)
        return 2
    print(f"{args.target}: {config.num_parameters:,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())

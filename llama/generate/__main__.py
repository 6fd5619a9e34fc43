"""`python -m llama.generate --model DIR`: a chat with a model, or its answers to prompts."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from llama.generate.chat import COMMANDS, converse
from llama.generate.load import load
from llama.generate.reply import Settings, answer_all

DTYPES = ("float32", "bfloat16", "float16")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Without the usage, which hides the one line that matters."""
        raise ValueError(message)


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = _Parser(
        prog="python -m llama.generate",
        description="Chat with a model, or put prompts to it. Lines that do not come from a "
        "terminal are a turn of the chat each.",
        epilog=f"In the chat {COMMANDS}; Ctrl-C ends an answer.",
        allow_abbrev=False,
    )
    add, default = parser.add_argument, "default: %(default)s"
    add("--model", metavar="DIR", required=True, help="folder in Hugging Face layout")
    add("--adapter", metavar="DIR", help="low-rank adapters for it, as PEFT writes them")
    add("--prompt", nargs="+", action="extend", metavar="TEXT", help="answer these, without a chat")
    add("--system", default="", metavar="TEXT", help="system text of the chat or of each prompt")
    add("--raw", action="store_true", help="continue each --prompt as it is, no chat format")
    tokens = f"longest answer, in tokens; {default}"
    add("--max-new-tokens", type=_whole, default=512, metavar="N", help=tokens)
    likeliest = "0: always the likeliest token; default: 0"
    add("--temperature", type=_number, default=0.0, metavar="T", help=likeliest)
    mass = f"share of the likeliest mass to draw from; {default}"
    add("--top-p", type=_number, default=1.0, metavar="P", help=mass)
    add("--seed", type=_integer, default=0, help=f"of what is drawn; {default}")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    add("--dtype", choices=DTYPES, help="of the weights; default: float32, on a GPU bfloat16")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments say; 0, or 2 with the reason on stderr."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a stray byte is no reason to end a chat
    parser = build_parser()
    try:
        _run(parser.parse_args(argv))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the answers has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as reason:
        print(f"{parser.prog}: error: {reason}", file=sys.stderr)
        return 2
    return 0


def _run(args: argparse.Namespace) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("this is for one process: sharded models chat with train.py --chat")
    if args.raw and args.prompt is None:
        raise ValueError("--raw needs --prompt, the text to continue")
    if args.prompt and not all(text.strip() for text in args.prompt):
        raise ValueError("a --prompt is blank: give it some text")
    settings = Settings(
        args.max_new_tokens, args.temperature, args.top_p, args.seed, args.system, args.raw
    )
    for folder in (args.model, args.adapter):
        if folder and not Path(folder).is_dir():
            raise FileNotFoundError(f"{folder}: no such folder")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: no GPU is found; use --device cpu")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
    model, tokenizer = load(args.model, device, getattr(torch, dtype), args.adapter)
    if args.prompt:
        answer_all(model, tokenizer, args.prompt, settings, _write)
        return
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives input() line editing and its history
    converse(model, tokenizer, settings)


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, not {text!r}")
    return int(text)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None


if __name__ == "__main__":
    sys.exit(main())

"""The flags of `train.py`, in groups, each with a line of help."""

import argparse
import contextlib
import math
import os
import re
from collections.abc import Callable
from typing import Any

from llama.finetune.data import ON_BAD_LINE, TEMPLATES
from llama.finetune.schedule import CURVES

ENGINES = ("minifsdp", "fsdp2", "fsdp1", "ddp", "none")
DTYPES = ("float32", "bfloat16", "float16")


class Parser(argparse.ArgumentParser):
    """Raises ValueError, so that rank 0 alone reports what every rank finds."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ValueError(f"{message} (--help lists the flags)")

    def print_help(self, file: Any = None) -> None:
        """Once, however many ranks are asked."""
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)


def _number(of: type, fits: Callable[[Any], bool], must: str) -> Callable[[str], Any]:
    """A reader of numbers of a type that fit; what they must be is in the refusal of others."""

    def read(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if fits(value := of(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {must}, not {text}")

    return read


_whole = _number(int, lambda n: n >= 1, "a whole number, 1 or more")
_amount = _number(float, lambda x: 0 <= x < math.inf, "a number, 0 or more")
_positive = _number(float, lambda x: 0 < x < math.inf, "a number above 0")
_share = _number(float, lambda x: 0 <= x < 1, "a number, 0 or more and below 1")
# That torch's generators take.
_seed = _number(int, lambda n: -(2**63) <= n < 2**64, "a whole number from -2**63 to 2**64 - 1")


def _steps_to_trace(text: str) -> str:
    """A number of steps, or the first and the last of them."""
    if match := re.fullmatch(r"([1-9]\d*)(?:-(\d+))?", text):
        first, last = match.groups()
        if last is None or int(first) <= int(last):
            return text
    must = "a number of steps, or the first and the last, such as 5-8"
    raise argparse.ArgumentTypeError(f"must be {must}, not {text}")


def build_parser() -> argparse.ArgumentParser:
    """A flag that is None unless given has its default where it is used."""
    about = "Train a Llama 2; without flags, a tiny one on made-up tasks."
    parser = Parser(description=about, allow_abbrev=False)
    _add_run(parser)
    _add_saving(parser)
    _add_instead(parser)
    _add_model(parser)
    _add_data(parser)
    _add_optimisation(parser)
    _add_memory(parser)
    return parser


_SWITCH: dict[str, Any] = {"action": "store_true"}
_EITHER: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
_OFF = _EITHER | {"default": False}  # a recipe may turn it on, and the command line off again
_DEFAULT = "default: %(default)s"


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("run").add_argument
    add("--config", metavar="TOML", help="flags from a file, or a recipe's name; given ones win")
    add("--name", help="name of the run; default: the first data file's, or tasks")
    add("--out", metavar="DIR", help="run folder; default: runs/NAME")
    resume = {"nargs": "?", "const": "last", "choices": ("last", "auto"), "metavar": "auto"}
    add("--resume", **resume, help="continue the run in --out; auto: if there is one to continue")
    add("--overwrite", **_SWITCH, help="replace the run in --out")
    add("--engine", choices=ENGINES, default="minifsdp", help=f"sharing of the work; {_DEFAULT}")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    add("--seed", type=_seed, default=0, help=f"of weights, tasks and order of data; {_DEFAULT}")
    add("--stop-at", type=_whole, metavar="STEP", help="stop there, to be resumed later")
    traced = "record N steps after the first two, or steps A-B, in OUT/trace.html"
    add("--trace", type=_steps_to_trace, metavar="N|A-B", help=traced)
    timeout = {"type": _amount, "default": 600.0, "metavar": "SECONDS"}
    add("--hang-timeout", **timeout, help=f"a rank this late is named, all end; 0: off; {_DEFAULT}")
    add("--peak-tflops", type=_positive, metavar="N", help="of a device, for MFU; default: a table")


def _add_saving(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("evaluating and saving").add_argument
    add("--eval-every", type=_whole, metavar="STEPS", help="default: before and after training")
    often = "steps between checkpoints; default: a tenth of all, at least 100"
    save_every = ("--save-every", "--checkpoint-every")
    add(*save_every, dest="save_every", type=_whole, metavar="STEPS", help=often)
    add("--save-minutes", type=_positive, metavar="M", help="save as well when M minutes went by")
    kept = "checkpoints kept; default: 2, or all with --save-every"
    add("--keep-last", type=_whole, metavar="N", help=kept)
    add("--keep-best", **_OFF, help="keep the weights that evaluated best in OUT/best")
    add("--async-checkpoint", **_OFF, help="write checkpoints while training goes on")
    add("--export-dtype", choices=DTYPES, default="float32", help=f"of OUT/export; {_DEFAULT}")
    add("--export-best", **_SWITCH, help="export the weights that evaluated best")
    add("--sample", nargs="+", metavar="PROMPT", help="answered at each evaluation and at the end")
    add("--max-new-tokens", type=_whole, default=64, help=f"longest answer, in tokens; {_DEFAULT}")


def _add_instead(parser: argparse.ArgumentParser) -> None:
    about = "the weights are --model's, the last checkpoint's with --resume, or OUT/export's"
    add = parser.add_argument_group("instead of training", about).add_argument
    add("--eval-only", **_SWITCH, help="evaluate on --eval-data and end")
    add("--chat", **_SWITCH, help="talk to the model, sharded over the ranks; or answer --sample")
    add("--system", metavar="TEXT", help="what --chat tells the model first")
    add("--temperature", type=_amount, default=0.0, help=f"of --chat, 0: likeliest; {_DEFAULT}")
    add("--top-p", type=_positive, default=1.0, help=f"of --chat: likeliest mass; {_DEFAULT}")
    add("--show-sample", type=_whole, metavar="N", help="print N training examples and end")
    add(
        "--plan",
        **_SWITCH,
        help="of a run on --world-size --gpu; status 0: fits, 1: not, 2: mistake",
    )
    add("--world-size", type=_whole, metavar="N", help="ranks that are planned for")
    add("--gpu", metavar="NAME|GB", help="such as A100-80, or GB (timed as an A100), with --plan")
    add("--nodes", type=_whole, help="machines, of equal ranks; default: eight on each")
    memory = "GiB of a node, for what is offloaded"
    add("--host-memory", type=_positive, metavar="GIB", help=memory)
    add("--network", type=_positive, metavar="GB/S", help="of a node, all its cards; default: 200")
    add(
        "--price", type=_positive, metavar="P", help="of a GPU for an hour, for the cost of --steps"
    )
    add("--json", metavar="FILE", help="the plan as JSON")
    add("--page", metavar="FILE", help="the plan as a page with a picture of its memory")


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--model", metavar="DIR", help="start from this model in Hugging Face layout")
    add("--preset", choices=("tiny", "7b", "13b", "34b", "70b"), help="default: tiny")
    add("--dim", type=_whole, help="width")
    add("--layers", type=_whole, help="number of blocks")
    add("--heads", type=_whole, help="query heads")
    add("--kv-heads", type=_whole, help="key and value heads; default: as --heads if given")
    add("--ffn", type=_whole, help="width inside the feed-forward")
    add("--vocab", type=_whole, help="default: the preset's if one is given, or the tokenizer's")
    add("--max-seq-len", type=_whole, help="longest sequence the model takes, in tokens")
    add("--tie-embeddings", **_SWITCH, default=None, help="one matrix for embedding and head")

    add = parser.add_argument_group("LoRA").add_argument
    add(
        "--lora-rank", type=_whole, metavar="R", help="train adapters of this rank, freeze the rest"
    )
    add("--lora-alpha", type=_positive, metavar="A", help="scaled by A / R; default: twice R")
    add("--lora-dropout", type=_share, default=0.0, help=f"before the adapters; {_DEFAULT}")
    targets = {"nargs": "+", "metavar": "NAME"}
    add("--lora-targets", **targets, help="such as wq w1, q_proj, all-linear; default: attention")


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data").add_argument
    files = {"nargs": "+", "metavar": "FILE"}
    many = "JSONL, .txt, .npy, folders, each with =WEIGHT or not; default: made-up tasks"
    add("--data", **files, help=many)
    add("--eval-data", **files, help="evaluate on these")
    add("--tokenizer", metavar="FILE", help="SentencePiece model; default: the one in --model")
    add("--template", choices=TEMPLATES, default="auto", help=f"of dialogs; {_DEFAULT}, by record")
    bad: dict[str, Any] = {"choices": ON_BAD_LINE, "default": "error"}
    add("--on-bad-line", **bad, help=f"of data that cannot be used; {_DEFAULT}")
    add("--seq-len", type=_whole, help="longest sequence, in tokens; default: 2048 or the model's")
    packing = "several documents a row, each to itself; default: with --data"
    add("--packing", **_EITHER, help=packing)
    add("--token-cache", metavar="DIR", help="of tokenised files; default: beside the run folder")


def _add_optimisation(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("optimisation").add_argument
    steps = ("--steps", "--max-steps")
    add(*steps, dest="steps", type=_whole, help="default: 1200 for the tasks, else by --epochs")
    add("--epochs", type=_positive, help="passes over --data, such as 3, the default, or 0.5")
    add("--batch-size", type=_whole, help="sequences a step, over all ranks; default: 120, data 16")
    add("--micro-batch", type=_whole, help="sequences a rank takes at once; default: its share")
    rates = "highest learning rate; default: 3e-3, with --model 5e-5, with --lora-rank 2e-4"
    add("--lr", type=_amount, help=rates)
    add("--min-lr", type=_amount, default=0.0, help=f"learning rate at the end; {_DEFAULT}")
    add("--schedule", choices=tuple(CURVES), default="cosine", help=f"after warm-up; {_DEFAULT}")
    add("--warmup", type=_amount, default=0.03, help=f"share of the steps, below 1; {_DEFAULT}")
    add("--weight-decay", type=_amount, help="of the matrices; default: 0.1, with --model 0.01")
    add("--clip", type=_amount, default=1.0, help=f"largest gradient norm, 0: none; {_DEFAULT}")
    bad = {"type": _whole, "default": 3, "metavar": "K"}
    add("--skip-bad-steps", **bad, help=f"leave out unfit steps, stop at K in a row; {_DEFAULT}")
    spike = "unfit also: a loss or norm of N times the usual; default: what is not finite"
    add("--spike", type=_positive, metavar="N", help=spike)


def _add_memory(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("memory and speed").add_argument
    add("--bf16", **_OFF, help="compute in bfloat16 over float32 weights and reductions")
    add("--activation-checkpointing", **_OFF, help="recompute each block in backward")
    resharded = "default: all but the root's parameters"
    add("--reshard-after-forward", **_EITHER, help=resharded)
    add("--cpu-offload", **_OFF, help="keep weights, gradients and optimizer on the CPU")
    add("--no-sync", **_SWITCH, help="reduce gradients once a step, not for each micro-batch")
    add("--hsdp", type=_whole, metavar="N", help="shard over N ranks, such as a node's; replicate")

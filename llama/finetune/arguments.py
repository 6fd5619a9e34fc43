"""The flags of `train.py`, and what can be said against them before a file is read."""

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llama.finetune.run_folder import check_apart, is_restart, recorded_flags

ENGINES = ("minifsdp", "fsdp2", "fsdp1", "ddp", "none")
CANNOT = {  # a flag, and the engines that cannot honour it
    "bf16": ("ddp", "none"),
    "cpu_offload": ("fsdp1", "ddp", "none"),
    "reshard_after_forward": ("ddp", "none"),
    "no_sync": ("none",),
}
SHAPE = {  # a flag, and the field of LlamaConfig that it sets
    "dim": "dim",
    "layers": "n_layers",
    "heads": "n_heads",
    "kv_heads": "n_kv_heads",
    "ffn": "ffn_hidden",
    "vocab": "vocab_size",
    "max_seq_len": "max_seq_len",
    "tie_embeddings": "tie_embeddings",
}
# What a run keeps when it is resumed: the model, and the order of the data.
FIXED = (*SHAPE, "model", "preset", "seed", "data", "tokenizer", "seq_len", "batch_size")


class _Parser(argparse.ArgumentParser):
    """Raises ValueError, so that rank 0 alone reports what every rank finds."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ValueError(f"{message} (--help lists the flags)")

    def print_help(self, file: Any = None) -> None:
        """Once, however many ranks are asked."""
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)


def _whole(text: str) -> int:
    """A whole number above 0."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return int(text)


def _amount(text: str) -> float:
    """A finite number, 0 or more."""
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number, 0 or more, not {text}")
    return float(text)


def _seed(text: str) -> int:
    """A seed that torch's generators take."""
    if not -(2**63) <= int(text) < 2**64:
        raise argparse.ArgumentTypeError(f"must be from -2**63 to 2**64 - 1, not {text}")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """The flags in groups; one that is None unless given has its default where it is used."""
    about = "Train a Llama 2; without flags, a tiny one on made-up tasks."
    parser = _Parser(description=about, allow_abbrev=False)
    switch, default = {"action": "store_true"}, "default: %(default)s"

    add = parser.add_argument_group("run").add_argument
    add("--name", help="name of the run; default: the first data file's, or tasks")
    add("--out", metavar="DIR", help="run folder; default: runs/NAME")
    add("--resume", **switch, help="continue the run in --out from its last checkpoint")
    add("--overwrite", **switch, help="replace the run in --out")
    add("--engine", choices=ENGINES, default="minifsdp", help=f"sharing of the work; {default}")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    add("--seed", type=_seed, default=0, help=f"of weights, tasks and order of the data; {default}")
    often = "steps between checkpoints; default: a tenth of all, at least 100"
    save_every = ("--save-every", "--checkpoint-every")
    add(*save_every, dest="save_every", type=_whole, metavar="STEPS", help=often)
    kept = "checkpoints kept; default: 2, or all with --save-every"
    add("--keep-last", type=_whole, metavar="N", help=kept)
    add("--async-checkpoint", **switch, help="write checkpoints while training goes on")
    add("--eval-every", type=_whole, metavar="STEPS", help="default: before and after training")
    add("--stop-at", type=_whole, metavar="STEP", help="stop there, to be resumed later")
    add("--sample", nargs="+", metavar="PROMPT", help="put to the trained model; default: a few")
    add("--max-new-tokens", type=_whole, default=64, help=f"longest answer, in tokens; {default}")
    dtypes = ("float32", "bfloat16", "float16")
    add("--export-dtype", choices=dtypes, default="float32", help=f"of OUT/export; {default}")

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
    add("--tie-embeddings", **switch, default=None, help="one matrix for embedding and head")

    add = parser.add_argument_group("data").add_argument
    add("--data", nargs="+", metavar="JSONL", help="train on these; default: the made-up tasks")
    add("--eval-data", nargs="+", metavar="JSONL", help="evaluate on these")
    add("--tokenizer", metavar="FILE", help="SentencePiece model; default: the one in --model")
    add("--seq-len", type=_whole, help="longest example, in tokens; default: 2048 or the model's")

    add = parser.add_argument_group("optimisation").add_argument
    add("--steps", type=_whole, help="default: 1200 for the tasks, with --data as by --epochs")
    add("--epochs", type=_whole, help="passes over --data; default: 3")
    add("--batch-size", type=_whole, help="sequences a step, over all ranks; default: 120, data 16")
    add("--micro-batch", type=_whole, help="sequences a rank takes at once; default: its share")
    add("--lr", type=_amount, help="highest learning rate; default: 3e-3, with --model 5e-5")
    add("--min-lr", type=_amount, default=0.0, help=f"learning rate at the end; {default}")
    add("--warmup", type=_amount, default=0.03, help=f"share of the steps, below 1; {default}")
    add("--weight-decay", type=_amount, help="of the matrices; default: 0.1, with --model 0.01")
    add("--clip", type=_amount, default=1.0, help=f"largest gradient norm, 0: none; {default}")

    add = parser.add_argument_group("memory and speed").add_argument
    add("--bf16", **switch, help="compute in bfloat16 over float32 weights and reductions")
    add("--activation-checkpointing", **switch, help="recompute each block in backward")
    both = argparse.BooleanOptionalAction
    add("--reshard-after-forward", action=both, help="default: all but the root's parameters")
    add("--cpu-offload", **switch, help="keep weights, gradients and optimizer on the CPU")
    add("--no-sync", **switch, help="reduce gradients once a step, not for each micro-batch")
    return parser


def parse_args(argv: list[str], world_size: int) -> argparse.Namespace:
    """The flags of a run, checked; with --resume, the run's own stand unless given anew.

    Raises ValueError for flags that contradict one another, the engine or the number of ranks, and
    for a run folder among the inputs.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.resume and args.overwrite:
        raise ValueError("--resume continues a run and --overwrite deletes it: give one of them")
    if args.resume:
        args = _recorded(parser, argv, args)
    args.out = str(_run_folder(args))
    if args.lr is None:
        args.lr = 5e-5 if args.model else 3e-3
    if args.weight_decay is None:
        args.weight_decay = 0.01 if args.model else 0.1
    if args.batch_size is None:
        args.batch_size = 16 if args.data else 120
    _check_engine(args, world_size)
    _check_batch(args, world_size)
    if args.steps and args.epochs:
        raise ValueError("--steps and --epochs both say how long to train: give one of them")
    if args.min_lr > args.lr:
        raise ValueError(f"--min-lr {args.min_lr} exceeds --lr {args.lr}: lower it")
    if args.warmup >= 1:
        raise ValueError(f"--warmup {args.warmup} is a share of the steps: it must be below 1")
    if args.model and (given := [flag for flag in ("preset", *SHAPE) if getattr(args, flag)]):
        raise ValueError(f"--model fixes the model's shape: drop {_named(given[0])}")
    if args.data and not (args.tokenizer or args.model):
        raise ValueError("--data needs --tokenizer, the SentencePiece model of your text")
    if not args.data and (args.eval_data or args.epochs):
        given = "--eval-data" if args.eval_data else "--epochs"
        raise ValueError(f"{given} goes with --data: the made-up tasks evaluate themselves")
    if args.eval_every and args.data and not args.eval_data:
        raise ValueError("--eval-every needs --eval-data, a JSONL to evaluate on")
    paths = [args.model, args.tokenizer, *(args.data or []), *(args.eval_data or [])]
    check_apart(Path(args.out), args.model, [path for path in paths if path])
    return args


def argv_of_attempt(argv: list[str], steps_saved: Callable[[Path], int | None]) -> list[str]:
    """`argv`; where torchrun starts a run once more, since a rank died, with what goes on with it.

    That is the last checkpoint, or the start if there is none yet.
    """
    folder = _run_folder(build_parser().parse_args(argv))
    if not is_restart(folder):
        return argv
    go_on = "--overwrite" if steps_saved(folder) is None else "--resume"
    return [*(flag for flag in argv if flag not in ("--resume", "--overwrite")), go_on]


def _recorded(
    parser: argparse.ArgumentParser, argv: list[str], args: argparse.Namespace
) -> argparse.Namespace:
    """The flags of the run to resume, changed by those in `argv`."""
    folder = _run_folder(args)
    recorded = recorded_flags(folder) | {"stop_at": None, "overwrite": False}
    # A value that the namespace has already is kept unless its flag is given.
    resumed = parser.parse_args(argv, argparse.Namespace(**recorded))
    for flag in FIXED:
        if (given := getattr(resumed, flag)) != recorded.get(flag):
            raise ValueError(
                f"{_named(flag)} {given} differs from {recorded.get(flag)} in {folder}, which a "
                "resumed run keeps: drop the flag, or start another run"
            )
    lengths = ("steps", "epochs")
    changed = [flag for flag in lengths if getattr(resumed, flag) != recorded.get(flag)]
    if len(changed) == 1:  # it stands for the other, too
        setattr(resumed, *(flag for flag in lengths if flag not in changed), None)
    resumed.out = str(folder)
    return resumed


def _run_folder(args: argparse.Namespace) -> Path:
    name = args.name or (Path(args.data[0]).stem if args.data else "tasks")
    return Path(args.out or Path("runs") / name)


def _check_engine(args: argparse.Namespace, world_size: int) -> None:
    for flag, engines in CANNOT.items():
        if args.engine in engines and getattr(args, flag) not in (None, False):
            able = " or ".join(engine for engine in ENGINES if engine not in engines)
            raise ValueError(
                f"{_named(flag)} cannot be honoured by --engine {args.engine}: drop it, or use "
                f"--engine {able}"
            )
    if args.engine == "none" and world_size > 1:
        raise ValueError(f"--engine none is for one process, not {world_size}: use another")


def _check_batch(args: argparse.Namespace, world_size: int) -> None:
    share, rest = divmod(args.batch_size, world_size)
    if rest:
        raise ValueError(
            f"--batch-size {args.batch_size} is over all ranks and cannot be shared evenly by "
            f"{world_size}: use a multiple, such as {args.batch_size - rest + world_size}"
        )
    micro_batch = args.micro_batch or share
    if share % micro_batch:
        whole = world_size * micro_batch
        raise ValueError(
            f"--batch-size {args.batch_size} gives each of {world_size} ranks {share} sequences, "
            f"which --micro-batch {micro_batch} does not divide: use a --batch-size such as "
            f"{-(-args.batch_size // whole) * whole}, or another --micro-batch"
        )


def _named(flag: str) -> str:
    return "--" + flag.replace("_", "-")

"""The flags of a run, checked for what can be said against them before a file is read."""

import argparse
from collections.abc import Callable
from pathlib import Path

from llama.finetune.data import source_of
from llama.finetune.flags import ENGINES, build_parser
from llama.finetune.run_folder import check_apart, is_restart, is_run, recorded_flags
from llama.finetune.settings import expand
from llama.lora import ATTENTION

CANNOT = {  # a flag, and the engines that cannot honour it
    "bf16": ("ddp", "none"),
    "cpu_offload": ("fsdp1", "ddp", "none"),
    "reshard_after_forward": ("ddp", "none"),
    "no_sync": ("none",),
    "hsdp": ("fsdp1", "ddp", "none"),
    "lora_rank": ("fsdp1",),
    "trace": ("fsdp2", "fsdp1", "ddp", "none"),
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
LORA = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")
DATA = ("data", "tokenizer", "template", "on_bad_line", "seq_len", "packing", "batch_size")
# What a run keeps when it is resumed: the model, and the order of the data.
FIXED = (*SHAPE, "model", "preset", "seed", *LORA, *DATA)
INSTEAD = ("eval_only", "chat", "show_sample", "plan")  # of training

PLANNING = ("world_size", "gpu", "nodes", "network", "host_memory", "price", "json", "page")


def parse_args(argv: list[str], world_size: int) -> argparse.Namespace:
    """The flags of a run, checked; with --resume, the run's own stand unless given anew.

    Raises ValueError for flags that contradict one another, the engine or the number of ranks, and
    for a run folder among the inputs.
    """
    parser = build_parser()
    args = parser.parse_args(expand(argv, parser))
    _check_purpose(args)
    world_size = args.world_size or world_size
    if args.resume or (args.show_sample and not args.data and is_run(_run_folder(args))):
        args = _recorded(parser, argv, args)
    elif (args.eval_only or args.chat) and not args.model:
        args = _of_finished_run(parser, argv, args)
    args.out = str(_run_folder(args))
    _fill_in(args)
    _check_engine(args, world_size)
    if not trains(args) and not args.plan:
        args.batch_size = world_size  # of no consequence, and no reason to refuse
    _check_batch(args, world_size)
    _check_hsdp(args, world_size)
    _check_optimisation(args)
    _check_data(args)
    if trains(args):
        sources = [*(args.data or []), *(args.eval_data or [])]
        paths = [args.model, args.tokenizer, *(source_of(source).name for source in sources)]
        check_apart(Path(args.out), args.model, [path for path in paths if path])
    return args


def trains(args: argparse.Namespace) -> bool:
    """Whether the flags ask for training, not for something instead."""
    return not any(getattr(args, flag) for flag in INSTEAD)


def plans(argv: list[str]) -> bool:
    """Whether `argv`, or the file that it names, asks for a plan; what cannot be read, if it says
    so itself."""
    parser = build_parser()
    try:
        return parser.parse_args(expand(argv, parser)).plan
    except (ValueError, OSError):
        return "--plan" in argv  # whoever acts on the flags says why


def argv_of_attempt(argv: list[str], steps_saved: Callable[[Path], int | None]) -> list[str]:
    """`argv` without what depends on how far the run is: `--resume auto`, or torchrun's restart.

    A run that torchrun starts once more, since a rank died, goes on from its last checkpoint, or
    begins again if there is none yet; `--resume auto` does so however it was stopped.
    """
    parser = build_parser()
    argv = expand(argv, parser)
    args = parser.parse_args(argv)
    folder = _run_folder(args)
    if args.resume != "auto" and not is_restart(folder):
        return argv
    kept = _without_resume(argv)
    if not is_run(folder):
        return kept
    go_on = "--resume=auto" if args.resume == "auto" else "--resume"
    return [*kept, "--overwrite" if steps_saved(folder) is None else go_on]


def _without_resume(argv: list[str]) -> list[str]:
    """`argv` without `--overwrite` and any way to write `--resume`."""
    kept, after_resume = [], False
    for word in argv:
        value, after_resume = after_resume and not word.startswith("-"), word == "--resume"
        if not (value or after_resume or word == "--overwrite" or word.startswith("--resume=")):
            kept.append(word)
    return kept


def _recorded(
    parser: argparse.ArgumentParser, argv: list[str], args: argparse.Namespace
) -> argparse.Namespace:
    """The flags of the run to resume, changed by those in `argv`."""
    folder = _run_folder(args)
    once = ("stop_at", "overwrite", "resume", "trace", *INSTEAD)
    recorded = recorded_flags(folder) | {flag: parser.get_default(flag) for flag in once}
    # A value that the namespace has already is kept unless its flag is given.
    resumed = parser.parse_args(expand(argv, parser), argparse.Namespace(**recorded))
    for flag in FIXED:
        if (given := getattr(resumed, flag)) != recorded.get(flag, parser.get_default(flag)):
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
    read = args.data and not args.plan  # which has no need of the files
    name = args.name or (Path(source_of(args.data[0]).name).stem if read else "tasks")
    return Path(args.out or Path("runs") / name)


def _of_finished_run(
    parser: argparse.ArgumentParser, argv: list[str], args: argparse.Namespace
) -> argparse.Namespace:
    """For what is done instead of training: the flags of the run in --out, and its export."""
    folder = _run_folder(args)
    export = folder / "export"
    if not export.is_dir():
        flag = "--chat" if args.chat else "--eval-only"
        raise ValueError(
            f"{flag} needs weights: --model DIR, or --out of a run that has finished, or with "
            f"--resume its last checkpoint ({export} does not exist)"
        )
    args = _recorded(parser, argv, args)
    for flag in ("preset", *SHAPE, *LORA):  # all in the export
        setattr(args, flag, parser.get_default(flag))
    args.model = str(export)
    return args


def _fill_in(args: argparse.Namespace) -> None:
    """Defaults that depend on other flags."""
    if args.lr is None:
        args.lr = 2e-4 if args.lora_rank else 5e-5 if args.model else 3e-3
    if args.weight_decay is None:
        args.weight_decay = 0.01 if args.model else 0.1
    if args.batch_size is None:
        args.batch_size = 16 if args.data else 120
    if args.packing is None:
        args.packing = bool(args.data)
    if args.lora_rank and args.lora_alpha is None:
        args.lora_alpha = 2.0 * args.lora_rank
    if args.lora_rank and args.lora_targets is None:
        args.lora_targets = list(ATTENTION)
    args.keep_best = args.keep_best or args.export_best


def _check_purpose(args: argparse.Namespace) -> None:
    if args.resume and args.overwrite:
        raise ValueError("--resume continues a run and --overwrite deletes it: give one of them")
    asked = [_named(flag) for flag in INSTEAD if getattr(args, flag)]
    if len(asked) > 1:
        raise ValueError(f"{asked[0]} and {asked[1]} are two things to do: give one of them")
    for flag in ("overwrite", "trace"):
        if asked and getattr(args, flag):
            nothing = f"{asked[0]} trains nothing, so there is nothing to {_named(flag)}"
            raise ValueError(f"{nothing}: drop it")
    planning = [_named(flag) for flag in PLANNING if getattr(args, flag) is not None]
    if args.plan and None in (args.world_size, args.gpu):
        raise ValueError("--plan needs --world-size, how many ranks, and --gpu, a name or GB")
    for flag, ending in (("json", ".json"), ("page", ".html")):
        path = getattr(args, flag)
        if path and (Path(path).suffix != ending or not Path(path).parent.is_dir()):
            raise ValueError(f"--{flag} {path}: give a file in a folder that exists, with {ending}")
    if planning and not args.plan:
        raise ValueError(f"{planning[0]} goes with --plan: give both")
    if args.plan and args.resume:
        raise ValueError("--plan is of a run from its first step: drop --resume")
    if args.plan and args.engine != "minifsdp":
        raise ValueError(f"--plan is of --engine minifsdp alone: drop --engine {args.engine}")
    if args.eval_only and args.model and not args.eval_data:
        raise ValueError("--eval-only of --model needs --eval-data, files to evaluate on")


def _check_optimisation(args: argparse.Namespace) -> None:
    if args.steps and args.epochs:
        raise ValueError("--steps and --epochs both say how long to train: give one of them")
    if args.min_lr > args.lr:
        raise ValueError(f"--min-lr {args.min_lr} exceeds --lr {args.lr}: lower it")
    if args.warmup >= 1:
        raise ValueError(f"--warmup {args.warmup} is a share of the steps: it must be below 1")
    if args.spike is not None and args.spike <= 1:
        raise ValueError(f"--spike {args.spike:g} calls usual steps spikes: it must be above 1")
    if args.top_p > 1:
        raise ValueError(f"--top-p {args.top_p} is a share of the mass: it must be at most 1")
    if not args.lora_rank:
        given = [flag for flag in LORA if getattr(args, flag)]
        if given:
            raise ValueError(f"{_named(given[0])} goes with --lora-rank: give both")
    elif not args.model and not args.plan:
        raise ValueError("--lora-rank adapts a trained model: give --model")


def _check_data(args: argparse.Namespace) -> None:
    if args.model and (given := [flag for flag in ("preset", *SHAPE) if getattr(args, flag)]):
        raise ValueError(f"--model fixes the model's shape: drop {_named(given[0])}")
    if args.data and not (args.tokenizer or args.model or args.plan):
        raise ValueError("--data needs --tokenizer, the SentencePiece model of your text")
    if args.chat or args.plan:
        return
    if args.eval_only:
        if args.data and not args.eval_data:
            raise ValueError("--eval-only needs --eval-data, files to evaluate on")
        return
    if not args.data and (args.eval_data or args.epochs):
        given = "--eval-data" if args.eval_data else "--epochs"
        raise ValueError(f"{given} goes with --data: the made-up tasks evaluate themselves")
    needs_evaluation = [f for f in ("eval_every", "keep_best") if getattr(args, f)]
    if needs_evaluation and args.data and not args.eval_data:
        flag = _named(needs_evaluation[0])
        raise ValueError(f"{flag} needs --eval-data, files to evaluate on")


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


def _check_hsdp(args: argparse.Namespace, world_size: int) -> None:
    if args.hsdp and world_size % args.hsdp:
        raise ValueError(
            f"--hsdp {args.hsdp} does not divide {world_size} ranks into groups that shard: use "
            "the number of ranks of a node"
        )


def _named(flag: str) -> str:
    return "--" + flag.replace("_", "-")

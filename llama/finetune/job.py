"""What a run trains, on what, and where: made from the flags and checked before it is built."""

import argparse
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llama import LlamaConfig, Tokenizer
from llama.chat import encode_dialog
from llama.finetune import tasks
from llama.finetune.arguments import SHAPE, argv_of_attempt, parse_args
from llama.finetune.data import Batches, Example, load_jsonl
from llama.finetune.evaluate import Question
from llama.finetune.processes import launch
from llama.finetune.report import Metrics, write_json
from llama.finetune.run_folder import (
    PARTS,
    check_free,
    check_model_folder,
    check_resumable,
    check_room,
    is_summarised,
)

DATA_SEQ_LEN = 2048  # tokens
TASK_STEPS, TASK_EXAMPLES, TASK_QUESTIONS = 1200, 150_000, 500
CHECKPOINT_BYTES = 12  # a parameter: it and AdamW's two moments, in float32


class Job(NamedTuple):
    """What a run needs besides the model."""

    args: argparse.Namespace
    out: Path
    device: torch.device
    config: LlamaConfig
    tokenizer: Tokenizer
    batches: Batches
    steps: int  # optimizer steps of the whole run
    micro_batch: int  # sequences a rank takes at once
    save_every: int  # steps between two checkpoints
    keep_last: int | None  # checkpoints; None: all
    summarised: bool  # resumed at its end for a lost export, which its summary outlived
    evaluation: list[Example]
    questions: list[Question]  # with one right answer each, so of the tasks only
    samples: list[list[int]]  # prompts to answer at the end, as token ids

    def identity(self) -> dict[str, dict[str, Any]]:
        """What a run cannot change: its model, and what the order of its data depends on."""
        batches = self.batches
        order = {"examples": len(batches.examples), "batch": batches.global_batch}
        return {"config": asdict(self.config), "data": order | {"seed": batches.seed}}

    def check_identity(self, saved: dict[str, Any], path: Path) -> None:
        """ValueError if what the checkpoint `path` holds is of another model or order of data."""
        for part, ours in self.identity().items():
            for key, value in ours.items():
                if saved[part].get(key) != value:
                    raise ValueError(
                        f"checkpoint {path} is of another run ({part}: {key} was "
                        f"{saved[part].get(key)} and is now {value}): start a new run"
                    )

    def open_folder(self, steps_done: int, world_size: int) -> Metrics | None:
        """Make the run folder ready and return its metrics file, if there will be any."""
        if self.summarised:
            return None
        if steps_done == self.steps:  # lacks its summary, but config.json is of those who trained
            return Metrics(self.out / "metrics.jsonl", steps_done)
        if self.args.overwrite:
            for part in (self.out / name for name in PARTS):
                shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        about = {"world_size": world_size, "torch": torch.__version__, "steps": self.steps}
        about["launch"] = launch()  # by which a restart knows its own run
        content = about | {"arguments": vars(self.args), "model": asdict(self.config)}
        write_json(self.out / "config.json", content)
        return Metrics(self.out / "metrics.jsonl", steps_done if self.args.resume else None)


def prepare(
    argv: list[str], rank: int, world_size: int, steps_saved: Callable[[Path], int | None]
) -> Job:
    """Read flags and data; ValueError or OSError for what cannot be run, naming the remedy.

    `steps_saved` tells the steps up to the last checkpoint in a run folder; None: it has none.
    """
    args = parse_args(argv_of_attempt(argv, steps_saved), world_size)
    device = choose_device(args)
    if args.model:
        check_model_folder(args.model)
    if args.tokenizer and Path(args.tokenizer).is_dir():
        raise ValueError(f"--tokenizer {args.tokenizer} is a folder: give a file, tokenizer.model")
    beside = Path(args.model, "tokenizer.model") if args.model else tasks.TOKENIZER_PATH
    tokenizer = Tokenizer(args.tokenizer or beside)
    config = choose_model(args, tokenizer)
    seq_len = args.seq_len or min(DATA_SEQ_LEN, config.max_seq_len)
    if seq_len > config.max_seq_len:
        raise ValueError(
            f"--seq-len {seq_len} exceeds the model's longest sequence, {config.max_seq_len} "
            "tokens: lower it, or raise --max-seq-len of a model trained from scratch"
        )

    def read(paths: list[str]) -> list[Example]:
        return [example for path in paths for example in load_jsonl(path, tokenizer, seq_len)]

    def encode(dialogs: list[tuple[str, list[dict[str, str]]]]) -> list[Example]:
        return [Example(*encode_dialog(tokenizer, messages)) for _, messages in dialogs]

    def ask(prompt: str) -> list[int]:
        return encode_dialog(tokenizer, [{"role": "user", "content": prompt}])[0]

    def sample(prompt: str) -> list[int]:
        try:
            return ask(prompt)
        except ValueError as reason:
            raise ValueError(f"--sample {prompt!r}: {reason}") from None

    if args.data:
        examples, evaluation, questions = read(args.data), read(args.eval_data or []), []
        steps = args.steps or max(1, len(examples) * (args.epochs or 3) // args.batch_size)
        opened = [e.ids[: max(1, e.loss_mask.index(1))] for e in (evaluation or examples)[:3]]
    else:
        steps = args.steps or TASK_STEPS
        examples = encode(tasks.make_dialogs(TASK_EXAMPLES, args.seed, held_out=False))
        held_out = tasks.make_dialogs(TASK_QUESTIONS, args.seed, held_out=True)
        evaluation = encode(held_out)
        questions = [Question(kind, ask(m[0]["content"]), m[1]["content"]) for kind, m in held_out]
        opened = [question.prompt for question in questions[:10]]
    samples = [sample(prompt) for prompt in args.sample] if args.sample else opened
    if max(map(len, samples)) >= config.max_seq_len:
        raise ValueError(f"a --sample leaves no room for an answer in {config.max_seq_len} tokens")
    batches = Batches(examples, args.batch_size, args.seed, tokenizer.pad_id, rank, world_size)
    micro_batch = args.micro_batch or args.batch_size // world_size
    out = Path(args.out)
    save_every = args.save_every or max(100, -(-steps // 10))
    keep_last = args.keep_last or (None if args.save_every else 2)
    summarised = False
    if args.resume:
        done = steps_saved(out)
        check_resumable(out, done, steps, args.stop_at)
        summarised = done == steps and is_summarised(out, steps)
    else:
        check_free(out, args.overwrite)
        saves = -(-steps // save_every)
        # With --keep-last, an old one goes only when the next is there.
        at_once = min(saves, keep_last + 1) if keep_last else saves
        export_bytes = getattr(torch, args.export_dtype).itemsize
        check_room(out, config.num_parameters * (at_once * CHECKPOINT_BYTES + export_bytes))
    return Job(
        args,
        out,
        device,
        config,
        tokenizer,
        batches,
        steps,
        micro_batch,
        save_every,
        keep_last,
        summarised,
        evaluation,
        questions,
        samples,
    )


def choose_device(args: argparse.Namespace) -> torch.device:
    """This rank's device; ValueError where there is no such GPU."""
    if (args.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu":
        return torch.device("cpu")
    index, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"--device cuda: local rank {index} has no GPU ({count} found)")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def choose_model(args: argparse.Namespace, tokenizer: Tokenizer) -> LlamaConfig:
    """The model's shape from --model, or --preset and the flags that refine it."""
    if args.model:
        config = LlamaConfig.from_hf(args.model)
    else:
        shape = {field: getattr(args, flag) for flag, field in SHAPE.items()}
        if not args.preset:  # a model of one's own takes the text as it is
            shape["vocab_size"] = args.vocab or tokenizer.vocab_size
            shape["max_seq_len"] = args.max_seq_len or (DATA_SEQ_LEN if args.data else None)
        shape["n_kv_heads"] = args.kv_heads or args.heads
        given = {field: value for field, value in shape.items() if value is not None}
        config = replace(LlamaConfig.preset(args.preset or "tiny"), **given)
    if tokenizer.vocab_size > config.vocab_size:
        remedy = "" if args.model else ", or raise --vocab"
        raise ValueError(
            f"tokenizer {tokenizer.path} has {tokenizer.vocab_size} pieces, the model a vocabulary "
            f"of {config.vocab_size}: use the model's own tokenizer{remedy}"
        )
    return config

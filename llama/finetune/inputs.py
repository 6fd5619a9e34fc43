"""What a run reads: tokenizer, the model's shape, examples to learn from and to be measured by."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from llama import LlamaConfig, Tokenizer
from llama.chat import encode_dialog
from llama.finetune import tasks
from llama.finetune.arguments import SHAPE
from llama.finetune.data import Corpus, Example, load
from llama.finetune.evaluate import Question
from llama.generate.load import check_folder
from llama.weights import fingerprint

DATA_SEQ_LEN = 2048  # tokens
TASK_EXAMPLES, TASK_QUESTIONS = 150_000, 500


class Inputs(NamedTuple):
    """What a run reads, checked; what it was not asked for is empty."""

    tokenizer: Tokenizer
    config: LlamaConfig
    seq_len: int  # longest example, in tokens
    packed: bool  # whether a row holds several examples
    examples: Corpus | None  # to train on
    evaluation: Corpus | None
    questions: list[Question]  # with one right answer each, so of the tasks only
    samples: list[list[int]]  # prompts to answer, as token ids
    base: str | None  # fingerprint of the weights that adapters are trained for

    @property
    def pack_to(self) -> int | None:
        """Positions of a row that examples are packed into; None: a row for each example."""
        return self.seq_len if self.packed else None


def read_inputs(args: argparse.Namespace) -> Inputs:
    """Read what the flags name; ValueError or OSError for what cannot be used."""
    if args.model:
        _check_model_folder(Path(args.model))
    if args.tokenizer and Path(args.tokenizer).is_dir():
        raise ValueError(f"--tokenizer {args.tokenizer} is a folder: give a file, tokenizer.model")
    beside = Path(args.model, "tokenizer.model") if args.model else tasks.TOKENIZER_PATH
    tokenizer = Tokenizer(args.tokenizer or beside)
    config = choose_model(args, tokenizer)
    seq_len = choose_seq_len(args, config)
    examples, evaluation, questions = None, None, []
    if args.data or args.eval_data:
        examples, evaluation = _own_data(args, tokenizer, seq_len)
    elif not args.chat:
        examples, evaluation, questions = _made_up_tasks(args, tokenizer)
    if args.sample:
        samples = [_sample(prompt, tokenizer) for prompt in args.sample]
    elif questions:
        samples = [question.prompt for question in questions[:10]]
    else:
        samples = _openings(evaluation or examples or ())
    if max(map(len, samples), default=0) >= config.max_seq_len:
        raise ValueError(f"a --sample leaves no room for an answer in {config.max_seq_len} tokens")
    adapts = args.lora_rank and args.model and not args.show_sample
    return Inputs(
        tokenizer,
        config,
        seq_len,
        args.packing,
        examples,
        evaluation,
        questions,
        samples,
        fingerprint(args.model) if adapts else None,
    )


def _check_model_folder(folder: Path) -> None:
    try:
        check_folder(folder)
    except (FileNotFoundError, ValueError) as reason:
        raise type(reason)(f"--model {reason}") from None


def _own_data(
    args: argparse.Namespace, tokenizer: Tokenizer, seq_len: int
) -> tuple[Corpus | None, Corpus | None]:
    cache = Path(args.token_cache or Path(args.out).parent / ".tokens")

    def read(sources: list[str]) -> Corpus:
        return load(sources, tokenizer, seq_len, args.template, args.on_bad_line, cache)

    wanted = args.data and not (args.eval_only or args.chat)
    examples = read(args.data) if wanted else None
    evaluation = read(args.eval_data) if args.eval_data and not args.chat else None
    return examples, evaluation


def _made_up_tasks(
    args: argparse.Namespace, tokenizer: Tokenizer
) -> tuple[Corpus | None, Corpus, list[Question]]:
    def encode(dialogs: list[tuple[str, list[dict[str, str]]]]) -> Corpus:
        return Corpus([Example(*encode_dialog(tokenizer, messages)) for _, messages in dialogs])

    held_out = tasks.make_dialogs(TASK_QUESTIONS, args.seed, held_out=True)
    questions = []
    for kind, (user, assistant) in held_out:
        prompt, _ = encode_dialog(tokenizer, [user])
        questions.append(Question(kind, prompt, assistant["content"]))
    if args.eval_only:
        return None, encode(held_out), questions
    dialogs = tasks.make_dialogs(TASK_EXAMPLES, args.seed, held_out=False)
    return encode(dialogs), encode(held_out), questions


def _openings(examples: Sequence[Example]) -> list[list[int]]:
    """The first few examples up to where the loss begins, at least their first token."""
    openings = []
    for number in range(min(3, len(examples))):
        ids, loss_mask = examples[number]
        openings.append([int(i) for i in ids[: max(1, list(loss_mask).index(1))]])
    return openings


def _sample(prompt: str, tokenizer: Tokenizer) -> list[int]:
    try:
        return encode_dialog(tokenizer, [{"role": "user", "content": prompt}])[0]
    except ValueError as reason:
        raise ValueError(f"--sample {prompt!r}: {reason}") from None


def choose_seq_len(args: argparse.Namespace, config: LlamaConfig) -> int:
    """The longest sequence, in tokens; ValueError for one that the model does not take."""
    seq_len = args.seq_len or min(DATA_SEQ_LEN, config.max_seq_len)
    if seq_len > config.max_seq_len:
        raise ValueError(
            f"--seq-len {seq_len} exceeds the model's longest sequence, {config.max_seq_len} "
            "tokens: lower it, or raise --max-seq-len of a model trained from scratch"
        )
    return seq_len


def choose_model(args: argparse.Namespace, tokenizer: Tokenizer | None) -> LlamaConfig:
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
    if tokenizer and tokenizer.vocab_size > config.vocab_size:
        remedy = "" if args.model else ", or raise --vocab"
        raise ValueError(
            f"tokenizer {tokenizer.path} has {tokenizer.vocab_size} pieces, the model a vocabulary "
            f"of {config.vocab_size}: use the model's own tokenizer{remedy}"
        )
    return config

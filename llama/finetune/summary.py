"""The end of a run: its score, its answers, its summary and its report."""

import time

import torch.distributed as dist
from torch import nn

from llama.finetune.evaluate import answers, exact_match, perplexity
from llama.finetune.job import Job
from llama.finetune.metrics import describe, read_metrics, write_json
from llama.finetune.page import write_page
from llama.finetune.progress import Trained
from llama.finetune.run_folder import read_object


def sum_up(model: nn.Module, job: Job, trained: Trained, started: float) -> None:
    """Score the trained model, let it answer, and write and print the run's summary.

    `model` has a Llama's `config`; every rank calls this.
    """
    inputs = job.inputs
    score = exact_match(model, inputs.tokenizer, inputs.questions) if inputs.questions else {}
    said = answers(model, inputs.tokenizer, inputs.samples, job.args.max_new_tokens)
    if dist.get_rank() != 0:
        return
    lines = read_metrics(job.out / "metrics.jsonl")
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    trainers = read_object(job.out / "config.json")  # where no step was left to do
    refused = sum(len(corpus.refused) for corpus in (inputs.examples, inputs.evaluation) if corpus)
    summary = {
        "steps": job.steps,
        "train_loss_first": losses.get(1),
        "train_loss_last": losses.get(job.steps),
        "eval_loss": trained.eval_loss,
        "eval_perplexity": None if trained.eval_loss is None else perplexity(trained.eval_loss),
        "eval_exact_match": score.get("all"),
        "eval_exact_match_by_kind": {kind: s for kind, s in score.items() if kind != "all"},
        "steps_skipped": sum("skipped" in line for line in lines),
        "lines_refused": refused,
        "tokens_per_second": trained.tokens_per_second,
        "mfu": trained.mfu,
        "mfu_formula": trained.formula if trained.mfu is not None else None,
        "seconds": time.perf_counter() - started if trained.tokens_per_second else None,
        "world_size": trainers.get("world_size"),
        "engine": trainers.get("arguments", {}).get("engine"),
        "parameters": inputs.config.num_parameters,
        "peak_bytes": trained.peak_bytes,
    }
    write_json(job.out / "summary.json", summary)
    write_page(job.out)
    for prompt, answer in zip(inputs.samples, said, strict=True):
        print(f"{inputs.tokenizer.decode(prompt)} {answer}")
    print(f"report: {job.out / 'report.html'}")
    print(*describe(summary), sep="\n")

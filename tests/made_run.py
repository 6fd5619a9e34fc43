"""A run folder as train.py leaves it, made up, so that pages can be drawn without training."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from llama.finetune.speed import Utilisation, Work

ARGUMENTS: dict[str, Any] = {
    "name": "support-chats",
    "out": "runs/support-chats",
    "engine": "minifsdp",
    "model": "llama-2-7b",
    "data": ["data/support-2024.jsonl", "data/support-2025.jsonl"],
    "eval_data": ["data/held-out.jsonl"],
    "lr": 5e-5,
    "min_lr": 0.0,
    "warmup": 0.03,
    "weight_decay": 0.01,
    "batch_size": 64,
    "micro_batch": 2,
    "bf16": True,
    "activation_checkpointing": True,
    "seed": 0,
    "clip": 1.0,
    "seq_len": None,
    "cpu_offload": False,
}
DEFAULTS = ARGUMENTS | {
    "name": None,
    "out": None,
    "model": None,
    "data": None,
    "eval_data": None,
    "lr": None,
    "weight_decay": None,
    "batch_size": None,
    "micro_batch": None,
    "bf16": False,
    "activation_checkpointing": False,
}
MODEL = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "vocab_size": 32000}
SAMPLES = {
    "[INST] My parcel has not arrived. What now? [/INST]": [
        "The The The parcel parcel the",
        "Sorry to hear that. Please send me the number of your order.",
        "I am sorry about that. Could you give me your order number, so that I can look up where "
        "the parcel is? It begins with two letters and stands at the top of the confirmation.",
    ],
    "[INST] Can I change the address after ordering? [/INST]": [
        "address address",
        "Yes.",
        "Yes, as long as the parcel has not left our warehouse:\n1. open Orders\n2. choose Change.",
    ],
}


def make_run(
    folder: Path,
    steps: int = 1200,
    finished: bool = True,
    eval_every: int = 100,
    skipped: tuple[int, ...] = (310, 311, 742),
    **summary: Any,
) -> Path:
    """Write `config.json`, `metrics.jsonl` and, of a finished run, `summary.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    config = {"world_size": 8, "torch": "2.13.0", "steps": steps, "launch": None}
    write(folder / "config.json", config | {"arguments": ARGUMENTS, "model": MODEL})
    lines: list[dict[str, Any]] = [evaluated(0, 2.31)]
    last = steps if finished else steps * 2 // 3
    for step in range(1, last + 1):
        at = step / steps
        loss = 0.85 + 1.5 * math.exp(-9 * at) + rng.gauss(0, 0.07)
        warm = min(1.0, step / max(1, steps * 0.03))
        line = {
            "step": step,
            "loss": loss,
            "lr": 5e-5 * warm * 0.5 * (1 + math.cos(math.pi * at)),
            "grad_norm": abs(0.6 + 2 * math.exp(-20 * at) + rng.gauss(0, 0.1)),
            "tokens": rng.randint(40_000, 46_000),
            "seconds": 5.1 + rng.random() * 0.3 + (9 if step == 1 else 0),
            "mfu": 0.38 + rng.gauss(0, 0.008),
        }
        if step in skipped:
            line |= {"skipped": "loss is not finite", "loss": None, "grad_norm": None}
        lines.append(line)
        if step % eval_every == 0 or step == last:
            lines.append(evaluated(step, 0.95 + 1.36 * math.exp(-8 * at)))
    for prompt, answers in SAMPLES.items():
        for answer, step in zip(answers, (0, last // 2, last), strict=True):
            lines.append({"step": step, "prompt": prompt, "answer": answer})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    if finished:
        use = Utilisation(6_738_415_616, 0, 32, 4096, 8, 312)
        work = Work(51_600_000, 39_000_000_000, 2_252.0)
        figures = {
            "steps": steps,
            "train_loss_first": 2.3,
            "eval_loss": 0.951,
            "tokens_per_second": 8176.4,
            "mfu": use.mfu(work),
            "mfu_formula": use.formula(work),
            "seconds": 6612.0,
            "world_size": 8,
            "engine": "minifsdp",
            "parameters": 6_738_415_616,
            "peak_bytes": 41_234_567_890,
            "lines_refused": 12,
        }
        write(folder / "summary.json", figures | summary)
    return folder


def evaluated(step: int, loss: float) -> dict[str, Any]:
    """The line of an evaluation."""
    return {"step": step, "eval_loss": loss, "eval_perplexity": math.exp(loss)}


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))

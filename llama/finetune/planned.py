"""A run that is planned and not done: its shape, the batches that it would be given, and what
could be changed about it where it does not fit."""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama import LlamaConfig, Tokenizer
from llama.finetune import tasks
from llama.finetune.arguments import SHAPE
from llama.finetune.inputs import Inputs, choose_model, choose_seq_len
from llama.finetune.job import Job
from llama.lora import ATTENTION

_GIVE_SHAPE = "give --preset, such as 70b, or --model"


def planned_job(args: argparse.Namespace, device_type: str) -> Job:
    """The run that the flags describe, without its data; ValueError for a shape that cannot be."""
    if args.preset:
        tokenizer, config = None, choose_model(args, None)
    elif args.model:
        tokenizer, config = None, LlamaConfig.from_hf(args.model)
    elif args.lora_rank:
        raise ValueError(f"--lora-rank adapts a trained model: {_GIVE_SHAPE}")
    else:
        tokenizer = Tokenizer(args.tokenizer or tasks.TOKENIZER_PATH)
        config = choose_model(args, tokenizer)
    try:
        seq_len = choose_seq_len(args, config)
    except ValueError as reason:
        if args.model or any(getattr(args, flag) for flag in ("preset", *SHAPE)):
            raise
        raise ValueError(f"{reason}; or, of another model, {_GIVE_SHAPE}") from None
    inputs = Inputs(tokenizer, config, seq_len, args.packing, None, None, [], [], base=None)
    micro_batch = args.micro_batch or args.batch_size // args.world_size
    device = torch.device(device_type)
    steps, save_every = args.steps or 0, args.save_every or 0
    return Job(
        args,
        Path(args.out),
        device,
        inputs,
        None,
        steps,
        micro_batch,
        save_every,
        args.keep_last,
        finished=False,
        summarised=False,
    )


def settings_of_plan(job: Job) -> dict[str, Any]:
    """What `minifsdp.plan.plan` is to know of the run besides its model, batch and changes."""
    args = job.args
    settings = {
        "micro_batches": args.batch_size // (args.world_size * job.micro_batch),
        "no_sync": args.no_sync,
        "clip_norm": args.clip or None,
        "nodes": args.nodes,
        "steps": args.steps,
        "price": args.price,
        "host_memory_gib": args.host_memory,
    }
    return settings | ({"network_gb_s": args.network} if args.network else {})


def changed(job: Job, flags: dict[str, Any]) -> Job:
    """The run with some flags given otherwise."""
    args = argparse.Namespace(**vars(job.args) | flags)
    inputs = job.inputs._replace(seq_len=args.seq_len or job.inputs.seq_len)
    share = args.batch_size // args.world_size  # smaller on more ranks
    micro_batch = math.gcd(args.micro_batch or job.micro_batch, share)
    return job._replace(args=args, inputs=inputs, micro_batch=micro_batch)


def full_rows(job: Job) -> dict[str, Tensor]:
    """A micro-batch of full rows, all of whose tokens bear loss: none takes more."""
    shape = (job.micro_batch, job.inputs.seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64, device=job.device)
    return {"tokens": tokens, "targets": torch.zeros_like(tokens)}


def assumed(job: Job) -> str:
    """What the plan takes for granted, in a line."""
    rows, seq_len = job.micro_batch, job.inputs.seq_len
    number = settings_of_plan(job)["micro_batches"]
    return (
        f"assumed: {number} x {rows} rows of {seq_len} tokens a rank and step, all full and learnt "
        "from; nothing of --data, --device and weights is read"
    )


_OF_TOKENS = ["activations", "logits and loss", "inputs", "other"]
_OF_MESSAGES = ["unsharded units", "messages", "gradients", "staging"]
_OF_STATE = ["parameters", "gradients", "optimizer", "staging", "other"]


def _more_ranks(job: Job) -> dict[str, Any]:
    """Twice the GPUs, with the same batch by half as many micro-batches or by smaller ones."""
    args = job.args
    ranks, batch = 2 * args.world_size, 2 * args.batch_size
    change: dict[str, Any] = {"name": f"{ranks} GPUs", "world_size": ranks}
    if args.batch_size % ranks:
        change["name"] += f" with --batch-size {batch}"
        return change | {
            "keywords": {"world_size": ranks, "batch_size": batch},
            "lowers": _OF_STATE,
            "alters": True,
        }

    def halved(before: Any) -> dict[str, int]:
        number = before.micro_batches
        return {"micro_batches": number if number % 2 else number // 2}

    return change | {
        "keywords": {"world_size": ranks},
        "settings": halved,
        "lowers": [*_OF_STATE, *_OF_TOKENS],
    }


def changes(job: Job) -> list[dict[str, Any]]:
    """What to try where the run does not fit: first what costs little and changes nothing.

    Each has the fields of `minifsdp.plan.Change`; `keywords` are flags.
    """
    args, share = job.args, job.args.batch_size // job.args.world_size
    seq_len = job.inputs.seq_len
    # Rows, their gradients and moments stay float32; what LoRA freezes does not.
    lowered_by_bf16 = None if args.lora_rank else [*_OF_TOKENS, *_OF_MESSAGES]
    tried: list[tuple[bool, dict[str, Any]]] = [
        (
            not args.activation_checkpointing,
            {
                "name": "--activation-checkpointing",
                "keywords": {"activation_checkpointing": True},
                "lowers": ["activations", "other"],
            },
        ),
        (
            job.micro_batch > 1,
            {
                "name": "--micro-batch 1",
                "keywords": {"micro_batch": 1},
                "settings": {"micro_batches": share},
                "lowers": _OF_TOKENS,
            },
        ),
        (not args.bf16, {"name": "--bf16", "keywords": {"bf16": True}, "lowers": lowered_by_bf16}),
        (True, _more_ranks(job)),
        (
            not args.cpu_offload,
            {
                "name": "--cpu-offload",
                "keywords": {"cpu_offload": True},
                "lowers": _OF_STATE,
            },
        ),
        (
            seq_len >= 1024,
            {
                "name": f"--seq-len {seq_len // 2}",
                "keywords": {"seq_len": seq_len // 2},
                "lowers": _OF_TOKENS,
                "alters": True,
            },
        ),
        (
            not args.lora_rank,
            {
                "name": "--lora-rank 16",
                "keywords": {
                    "lora_rank": 16,
                    "lora_alpha": 32.0,
                    "lora_targets": list(ATTENTION),
                },
                "alters": True,
            },
        ),
    ]
    return [change for possible, change in tried if possible]

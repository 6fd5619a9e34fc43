"""A run that is planned and not done: its shape, the batches that it would be given, and what
could be changed about it where it does not fit."""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama import LlamaConfig, Tokenizer
from llama.finetune import tasks
from llama.finetune.inputs import Inputs, choose_model, choose_seq_len
from llama.finetune.job import Job
from llama.lora import ATTENTION


def planned_job(args: argparse.Namespace, device_type: str) -> Job:
    """The run that the flags describe, without its data; ValueError for a shape that cannot be."""
    if args.preset:
        tokenizer, config = None, choose_model(args, None)
    elif args.model:
        tokenizer, config = None, LlamaConfig.from_hf(args.model)
    else:
        tokenizer = Tokenizer(args.tokenizer or tasks.TOKENIZER_PATH)
        config = choose_model(args, tokenizer)
    seq_len = choose_seq_len(args, config)
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
    }
    return settings | ({"network_gb_s": args.network} if args.network else {})


def changed(job: Job, flags: dict[str, Any]) -> Job:
    """The run with some flags given otherwise."""
    args = argparse.Namespace(**vars(job.args) | flags)
    inputs = job.inputs._replace(seq_len=args.seq_len or job.inputs.seq_len)
    return job._replace(args=args, inputs=inputs, micro_batch=args.micro_batch or job.micro_batch)


def full_rows(job: Job) -> dict[str, Tensor]:
    """A micro-batch of full rows, all of whose tokens bear loss: none takes more."""
    shape = (job.micro_batch, job.inputs.seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64, device=job.device)
    return {"tokens": tokens, "targets": torch.zeros_like(tokens)}


def changes(job: Job) -> list[dict[str, Any]]:
    """What to try where the run does not fit: first what costs little and changes nothing.

    Each is a name, and any of `keywords` (flags), `world_size`, `settings` (of a plan) and
    `alters`, whether the run then learns something else.
    """
    args, share = job.args, job.args.batch_size // job.args.world_size
    seq_len = job.inputs.seq_len
    tried: list[tuple[bool, dict[str, Any]]] = [
        (
            not args.activation_checkpointing,
            {
                "name": "--activation-checkpointing",
                "keywords": {"activation_checkpointing": True},
            },
        ),
        (
            job.micro_batch > 1,
            {
                "name": "--micro-batch 1",
                "keywords": {"micro_batch": 1},
                "settings": {"micro_batches": share},
            },
        ),
        (not args.bf16, {"name": "--bf16", "keywords": {"bf16": True}}),
        (True, {"name": f"{2 * args.world_size} GPUs", "world_size": 2 * args.world_size}),
        (not args.cpu_offload, {"name": "--cpu-offload", "keywords": {"cpu_offload": True}}),
        (
            seq_len >= 1024,
            {
                "name": f"--seq-len {seq_len // 2}",
                "keywords": {"seq_len": seq_len // 2},
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

"""What torch's first FSDP and DDP need done differently, for runs that compare engines."""

import contextlib
import warnings

import torch
import torch.distributed.checkpoint.state_dict as torch_state
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import CustomPolicy

from llama import Llama
from llama.finetune.job import Job


def shard_flat(model: Llama, job: Job) -> nn.Module:
    """The units that `train.py` makes, for torch's first FSDP."""
    whole, half = torch.float32, torch.bfloat16
    tied = job.config.tie_embeddings
    untied = set() if tied else {model.tok_embeddings, model.output}
    keep = job.args.reshard_after_forward is False
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.fsdp")  # it is deprecated
    return fsdp.FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: module in {*model.layers, *untied}),
        sharding_strategy=fsdp.ShardingStrategy["SHARD_GRAD_OP" if keep else "FULL_SHARD"],
        mixed_precision=fsdp.MixedPrecision(half, whole) if job.args.bf16 else None,
        device_id=job.device,
        use_orig_params=True,
    )


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager:
    """Within it, gradients are not reduced; nothing to do for a plain model."""
    return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()


def llama_in(model: nn.Module, job: Job) -> nn.Module:
    """The model that runs as a Llama does: with its `config`, and its output."""
    return model.module if job.args.engine == "ddp" else model


def bare(model: nn.Module, job: Job) -> nn.Module:
    """The model as `llama` takes it: a Llama, plain or with DTensor parameters."""
    if job.args.engine == "ddp":
        return model.module
    if job.args.engine != "fsdp1":
        return model
    # Not offloaded to the CPU as it is gathered: where it lies there already, torch crashes.
    options = torch_state.StateDictOptions(full_state_dict=True)
    gathered = Llama(job.config)
    gathered.load_state_dict(torch_state.get_model_state_dict(model, options=options))
    return gathered

"""Train a Llama 2 on one process or, through torchrun, on many.

    python train.py
    torchrun --standalone --nproc-per-node 2 train.py

Without arguments a tiny Llama learns the chat tasks of `llama.finetune.tasks` from scratch and is
scored on prompts it never saw. `--data` trains on your own JSONL, `--model` starts from a Llama in
Hugging Face layout, and `--engine` runs the same job on another way to share it among the ranks.
The run folder gets `config.json`, `metrics.jsonl`, `checkpoints/` and, at the end, the model in
Hugging Face layout in `export/`, and `summary.json`.
"""

import argparse
import contextlib
import functools
import gc
import math
import os
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler writes to stderr

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_state
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.utils.checkpoint import checkpoint as recompute
from tqdm import tqdm

import minifsdp
from llama import Llama
from llama.finetune.data import NO_LOSS
from llama.finetune.evaluate import answers, exact_match, mean_loss, summed_loss
from llama.finetune.job import Job, prepare
from llama.finetune.processes import Termination, connect, everywhere, leave
from llama.finetune.report import PeakMemory, describe, read_metrics, write_json
from llama.finetune.run_folder import read_object
from llama.finetune.schedule import lr_at
from llama.weights import load_hf, save_hf
from minifsdp import checkpoint

# ---- The model, sharded ---------------------------------------------------------------------


def build(job: Job) -> nn.Module:
    """The model on this rank's device, shared out by the engine, with its first weights."""
    args = job.args
    with torch.device("meta"):
        model = Llama(job.config)
    if args.activation_checkpointing:  # before sharding, so that recomputation finds full weights
        for block in model.layers:
            block.forward = functools.partial(
                recompute, block.forward, use_reentrant=False, preserve_rng_state=False
            )
    if args.engine in ("minifsdp", "fsdp2"):
        shard(model, job)
    model.to_empty(device="cpu" if args.cpu_offload else job.device)
    if args.model:
        load_hf(model, args.model)
    else:  # the same weights on every device, engine and number of ranks
        model.init_weights(torch.Generator().manual_seed(args.seed))
    if args.engine == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    return shard_flat(model, job) if args.engine == "fsdp1" else model


def shard(model: Llama, job: Job) -> None:
    """Make a unit of each block, of the embedding and of the head; the root holds the rest."""
    args, engine = job.args, minifsdp if job.args.engine == "minifsdp" else fsdp
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(job.device.type, (dist.get_world_size(),)),
        "reshard_after_forward": args.reshard_after_forward,
    }
    if args.bf16:
        settings["mp_policy"] = engine.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if args.cpu_offload:
        pin = job.device.type == "cuda"
        settings["offload_policy"] = engine.CPUOffloadPolicy(pin_memory=pin)
    for block in model.layers:
        engine.fully_shard(block, **settings)
    if not job.config.tie_embeddings:  # a tied matrix belongs to one unit: to the root
        engine.fully_shard(model.tok_embeddings, **settings)
        engine.fully_shard(model.output, **settings)
    engine.fully_shard(model, **settings)


def shard_flat(model: Llama, job: Job) -> nn.Module:
    """The same units for torch's first FSDP."""
    whole, half = torch.float32, torch.bfloat16
    untied = set() if job.config.tie_embeddings else {model.tok_embeddings, model.output}
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


# ---- Training -------------------------------------------------------------------------------


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.AdamW:
    """Fused AdamW, without decay of the norms."""
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        (others if "norm" in name else decayed).append(parameter)
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    betas = (0.9, 0.95)  # Llama 2's (arXiv:2307.09288)
    return torch.optim.AdamW(
        groups, lr=0.0, betas=betas, weight_decay=args.weight_decay, fused=True
    )


def micro_step(model: nn.Module, job: Job, last: bool) -> contextlib.AbstractContextManager:
    """Around one micro-batch: with --no-sync, gradients are reduced in the last one alone."""
    if not job.args.no_sync:
        return contextlib.nullcontext()
    if job.args.engine in ("minifsdp", "fsdp2"):
        model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()
    return contextlib.nullcontext() if last else model.no_sync()


def clip(model: nn.Module, job: Job) -> float:
    """Clip the gradients to --clip and return their norm before."""
    limit = job.args.clip or float("inf")
    if job.args.engine == "fsdp1":
        return model.clip_grad_norm_(limit).item()
    engine = minifsdp if job.args.engine == "minifsdp" else nn.utils
    norm = engine.clip_grad_norm_(model.parameters(), limit)
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, job: Job, step: int, asked_to_end: bool
) -> tuple[dict[str, float], bool]:
    """Do optimizer step `step`, counted from 0.

    Returns what there is to log, and whether any rank was asked to end.
    """
    batch, world_size = job.batches.batch(step), dist.get_world_size()
    targets_in_step = job.batches.target_tokens(step)
    sums = torch.zeros(3, dtype=torch.float64, device=job.device)  # losses, tokens, ranks to end
    sums[2] = asked_to_end
    parts = list(zip(*(part.split(job.micro_batch) for part in batch), strict=True))
    for number, (tokens, targets) in enumerate(parts, start=1):
        tokens, targets = tokens.to(job.device), targets.to(job.device)
        with micro_step(model, job, last=number == len(parts)):
            loss_sum = summed_loss(model, tokens, targets)
            # Engines average over ranks; the mean is over the targets of all ranks and parts.
            (loss_sum * (world_size / targets_in_step)).backward()
        # What follows a row's last target is padding.
        tokens_sum = (targets != NO_LOSS).flip(1).cumsum(1).count_nonzero()
        sums[:2] += torch.stack([loss_sum.detach(), tokens_sum.to(loss_sum)])
    dist.all_reduce(sums)
    total_loss, tokens_in_step, ranks_to_end = sums.tolist()
    loss, norm = total_loss / targets_in_step, clip(model, job)
    if not math.isfinite(loss + norm):
        where = f"step {step + 1}: loss {loss}, gradient norm {norm}"
        raise FloatingPointError(f"{where}: try a lower --lr")
    args, warmup = job.args, int(job.args.warmup * job.steps)
    lr = lr_at(step, total_steps=job.steps, warmup_steps=warmup, lr=args.lr, min_lr=args.min_lr)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    logged = {"loss": loss, "lr": lr, "grad_norm": norm, "tokens": int(tokens_in_step)}
    return logged, ranks_to_end > 0


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, job: Job, step: int
) -> dict[str, Any]:
    """What a checkpoint holds; `step` counts the steps done.

    Learning rate and data follow from it: what else is said of them is which curve and which order.
    """
    args = job.args
    return job.identity() | {
        "model": torch_state.get_model_state_dict(model),
        "optimizer": torch_state.get_optimizer_state_dict(model, optimizer),
        "scheduler": {"steps": job.steps, "warmup": args.warmup, "lr": args.lr, "min": args.min_lr},
        "rng": checkpoint.rng_states(),
        "step": step,
        "next_example": step * args.batch_size,
    }


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, job: Job) -> int:
    """Load the last checkpoint that is whole and return the number of steps done."""

    def tell(damaged: checkpoint.DamagedError) -> None:
        if dist.get_rank() == 0:
            about = f"checkpoint {damaged.path} is damaged ({damaged.reason})"
            print(f"train.py: {about}: going on from the one before it", file=sys.stderr)

    decays = [group["weight_decay"] for group in optimizer.param_groups]
    state = state_of(model, optimizer, job, 0)
    path = checkpoint.load(job.out / "checkpoints", state, on_damaged=tell)
    job.check_identity(state, path)
    torch_state.set_model_state_dict(model, state["model"])
    torch_state.set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay  # the flag's, which may have been given anew
    checkpoint.restore_rng(state["rng"])
    return state["step"]


def steps_saved(out: Path) -> int | None:
    """The steps up to the last checkpoint of the run in `out`; None where there is none."""
    last = checkpoint.latest(out / "checkpoints")
    return None if last is None else checkpoint.step_of(last)


class Trained(NamedTuple):
    """What training measured; None where no step ran."""

    steps: int  # done so far, in all
    eval_loss: float | None
    tokens_per_second: float | None  # of all ranks, padding left out
    peak_bytes: int | None  # of the rank that took most


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    job: Job,
    steps_done: int,
    termination: Termination,
) -> Trained:
    """Train on from `steps_done`, logging, evaluating and saving as the flags say.

    Once a rank is asked to end, all save and stop after the step that they are in.
    """
    args, memory = job.args, PeakMemory(job.device)
    first, world_size = dist.get_rank() == 0, dist.get_world_size()
    metrics = everywhere(lambda: job.open_folder(steps_done, world_size) if first else None)

    def log(step: int, **values: Any) -> None:
        if metrics:
            metrics.write(step, **values)

    def evaluate(step: int) -> float | None:
        if not job.evaluation:
            return None
        pad_id = job.tokenizer.pad_id
        loss = mean_loss(model, job.evaluation, job.micro_batch, pad_id, job.device)
        log(step, eval_loss=loss)
        return loss

    end = min(args.stop_at or job.steps, job.steps)
    eval_loss = evaluate(steps_done)
    measured = min(steps_done + 2, end)
    moments = [t for state in optimizer.state.values() for t in state.values()]
    memory.start([*model.parameters(), *moments])
    speeds: list[tuple[int, float]] = []  # tokens and seconds of each step
    often = 0.5 if sys.stderr.isatty() else 10.0  # seconds between two states of the bar
    look = {"unit": "step", "disable": not first, "mininterval": often}
    bar = tqdm(total=job.steps, initial=steps_done, **look)
    with bar, contextlib.closing(memory):
        for step in range(steps_done, end):
            began = time.perf_counter()
            logged, stop = train_step(model, optimizer, job, step, termination.asked)
            steps_done = step + 1
            speeds.append((logged["tokens"], time.perf_counter() - began))
            log(steps_done, **logged, seconds=speeds[-1][1])
            bar.set_postfix(loss=f"{logged['loss']:.4f}", refresh=False)
            bar.update()
            if steps_done == measured:
                memory.close()
            if stop or steps_done == end or steps_done % job.save_every == 0:
                state, behind = state_of(model, optimizer, job, steps_done), args.async_checkpoint
                folder = job.out / "checkpoints"
                checkpoint.save(folder, steps_done, state, behind, job.keep_last)
            if stop and steps_done < end:
                break
            if steps_done == end or (args.eval_every and steps_done % args.eval_every == 0):
                eval_loss = evaluate(steps_done)
    checkpoint.wait()
    if not speeds:
        return Trained(steps_done, eval_loss, None, None)
    tokens, seconds = map(sum, zip(*(speeds[2:] or speeds), strict=True))
    peak_bytes = torch.tensor(memory.peak_bytes)
    dist.all_reduce(peak_bytes, dist.ReduceOp.MAX)
    return Trained(steps_done, eval_loss, tokens / seconds, int(peak_bytes))


# ---- The end --------------------------------------------------------------------------------


def plain(model: nn.Module, job: Job) -> nn.Module:
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


def export(model: nn.Module, job: Job) -> None:
    """Write the model in Hugging Face layout."""
    folder, first = job.out / "export", dist.get_rank() == 0
    if first:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was trained on after its end
    dist.barrier()
    exported = plain(model, job)
    if first or job.args.engine in ("minifsdp", "fsdp2"):
        dtype = getattr(torch, job.args.export_dtype)
        save_hf(exported, folder, dtype=dtype, tokenizer_path=job.tokenizer.path)


def sum_up(model: nn.Module, job: Job, trained: Trained, started: float) -> None:
    """Score the trained model, let it answer, and write and print the run's summary."""
    args = job.args
    llama = model.module if args.engine == "ddp" else model
    score = exact_match(llama, job.tokenizer, job.questions) if job.questions else {}
    said = answers(llama, job.tokenizer, job.samples, args.max_new_tokens)
    if dist.get_rank() != 0:
        return
    for prompt, answer in zip(job.samples, said, strict=True):
        print(f"{job.tokenizer.decode(prompt)} {answer}")
    losses = {
        line["step"]: line["loss"]
        for line in read_metrics(job.out / "metrics.jsonl")
        if "loss" in line
    }
    trainers = read_object(job.out / "config.json")  # where no step was left to do
    summary = {
        "steps": job.steps,
        "train_loss_first": losses.get(1),
        "train_loss_last": losses.get(job.steps),
        "eval_loss": trained.eval_loss,
        "eval_exact_match": score.get("all"),
        "eval_exact_match_by_kind": {kind: s for kind, s in score.items() if kind != "all"},
        "tokens_per_second": trained.tokens_per_second,
        "seconds": time.perf_counter() - started if trained.tokens_per_second else None,
        "world_size": trainers.get("world_size"),
        "engine": trainers.get("arguments", {}).get("engine"),
        "parameters": job.config.num_parameters,
        "peak_bytes": trained.peak_bytes,
    }
    write_json(job.out / "summary.json", summary)
    print(*describe(summary), sep="\n")


def run(started: float, termination: Termination) -> None:
    """Do the job that the flags describe."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    job = everywhere(lambda: prepare(sys.argv[1:], rank, world_size, steps_saved))
    model = everywhere(lambda: build(job))
    optimizer = make_optimizer(model, job.args)
    steps_done = everywhere(lambda: resume(model, optimizer, job)) if job.args.resume else 0
    job = job._replace(summarised=job.summarised and steps_done == job.steps)
    trained = train(model, optimizer, job, steps_done, termination)
    if trained.steps == job.steps:
        export(model, job)
        if not job.summarised:
            sum_up(model, job, trained, started)
        if rank == 0:
            print(f"export: {job.out / 'export'}")
    elif rank == 0:
        print(f"stopped after step {trained.steps} of {job.steps}: --resume goes on from there")


def main() -> None:
    started = time.perf_counter()
    connect()
    try:
        with Termination() as termination:
            run(started, termination)
    except (FloatingPointError, checkpoint.SaveError) as reason:  # which every rank met
        leave(1, str(reason))
    finally:
        with contextlib.suppress(checkpoint.SaveError):
            checkpoint.wait()  # a thread may be writing one still
        gc.collect()  # the model holds process groups, whose threads must end before Python does
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

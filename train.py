"""Train a Llama 2 on one process or, through torchrun, on many.

    python train.py
    torchrun --standalone --nproc-per-node 2 train.py

Without arguments a tiny Llama learns the chat tasks of `llama.finetune.tasks` from scratch and is
scored on prompts it never saw. `--data` trains on your own files, `--model` starts from a Llama in
Hugging Face layout, `--lora-rank` trains adapters of it, and `--engine` runs the same job on
another way to share it among the ranks. The run folder gets `config.json`, `metrics.jsonl`,
`checkpoints/` and, at the end, the model in Hugging Face layout in `export/`, `summary.json` and
`report.html`.
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
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler writes to stderr

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_state
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint as recompute

import minifsdp
from llama import Llama
from llama.finetune.arguments import plans, trains
from llama.finetune.evaluate import answers, exact_match, mean_loss, perplexity, summed_loss
from llama.finetune.guard import Guard
from llama.finetune.job import Job, prepare, read_flags
from llama.finetune.memory import PeakMemory
from llama.finetune.metrics import describe
from llama.finetune.older_engines import bare, llama_in, no_sync, shard_flat
from llama.finetune.planned import (
    assumed,
    changed,
    changes,
    full_rows,
    planned_job,
    settings_of_plan,
)
from llama.finetune.processes import Termination, connect, everywhere, leave
from llama.finetune.progress import Progress, Trained, announce
from llama.finetune.run_folder import TRACES
from llama.finetune.schedule import lr_at
from llama.finetune.speed import WARM_UP_STEPS, Work
from llama.finetune.summary import sum_up
from llama.generate import Settings, answer_all, converse
from llama.lora import add_lora, init_lora
from llama.weights import load_hf, save_hf, save_peft, stored_dtype
from minifsdp import checkpoint
from minifsdp.plan import GPU, Change
from minifsdp.plan.shown import MISTAKE, show
from minifsdp.trace import record
from minifsdp.watchdog import Watchdog

# ---- The model, sharded ---------------------------------------------------------------------


def build(job: Job) -> nn.Module:
    """The model on this rank's device, shared out by the engine, with its first weights."""
    args, model = job.args, outline(job)
    model.to_empty(device="cpu" if args.cpu_offload else job.device)
    if args.model:
        load_hf(model, args.model)
    else:  # the same weights on every device, engine and number of ranks
        model.init_weights(torch.Generator().manual_seed(args.seed))
    if args.lora_rank:
        init_lora(model, torch.Generator().manual_seed(args.seed))
        torch.manual_seed(args.seed + dist.get_rank())  # of dropout
    if args.engine == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    return shard_flat(model, job) if args.engine == "fsdp1" else model


def outline(job: Job) -> Llama:
    """The model on the meta device: with its adapters, recomputing and sharded if so asked."""
    args = job.args
    with torch.device("meta"):
        model = Llama(job.config)
    if args.lora_rank:  # frozen weights stay as their files have them: what is computed is the same
        stored = stored_dtype(args.model) if args.model else torch.bfloat16
        chosen = args.lora_rank, args.lora_alpha, args.lora_dropout, args.lora_targets
        add_lora(model, *chosen, base_dtype=stored if args.bf16 else None)
    if args.activation_checkpointing:  # before sharding, so that recomputation finds full weights
        for block in model.layers:
            block.forward = functools.partial(
                recompute,
                block.forward,
                use_reentrant=False,
                preserve_rng_state=args.lora_dropout > 0,
            )
    if args.engine in ("minifsdp", "fsdp2"):
        shard(model, job)
    return model


def shard(model: Llama, job: Job) -> None:
    """Make a unit of each block, of the embedding and of the head; the root holds the rest."""
    args, engine = job.args, minifsdp if job.args.engine == "minifsdp" else fsdp
    settings: dict[str, Any] = {
        "mesh": ranks_that_share(job),
        "reshard_after_forward": args.reshard_after_forward,
    }
    if args.bf16:
        settings["mp_policy"] = engine.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if args.cpu_offload:
        pin = job.device.type != "cpu"  # a plan pretends to have a GPU
        settings["offload_policy"] = engine.CPUOffloadPolicy(pin_memory=pin)
    for block in model.layers:
        engine.fully_shard(block, **settings)
    if not job.config.tie_embeddings:  # a tied matrix belongs to one unit: to the root
        engine.fully_shard(model.tok_embeddings, **settings)
        engine.fully_shard(model.output, **settings)
    engine.fully_shard(model, **settings)


def ranks_that_share(job: Job) -> DeviceMesh:
    """All ranks in a row; with --hsdp, replicas of so many ranks, which shard among themselves."""
    world_size, sharing = dist.get_world_size(), job.args.hsdp
    if not sharing:
        return init_device_mesh(job.device.type, (world_size,))
    names = ("replicate", "shard")
    return init_device_mesh(job.device.type, (world_size // sharing, sharing), mesh_dim_names=names)


# ---- Training -------------------------------------------------------------------------------


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.AdamW:
    """Fused AdamW over what is trained, without decay of the norms."""
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
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
    return contextlib.nullcontext() if last else no_sync(model)


def clip(model: nn.Module, job: Job) -> float:
    """Clip the gradients to --clip and return their norm before."""
    limit = job.args.clip or float("inf")
    if job.args.engine == "fsdp1":
        return model.clip_grad_norm_(limit).item()
    engine = minifsdp if job.args.engine == "minifsdp" else nn.utils
    norm = engine.clip_grad_norm_(model.parameters(), limit)
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()


class Run(NamedTuple):
    """What takes part in every step."""

    job: Job
    model: nn.Module
    optimizer: torch.optim.Optimizer
    guard: Guard
    watchdog: Watchdog


class Wishes(NamedTuple):
    """What a rank would have all do after a step; all do what any wishes."""

    end: bool  # it was sent SIGTERM
    save: bool  # --save-minutes went by


def train_step(run: Run, step: int, wishes: Wishes) -> tuple[dict[str, Any], Wishes]:
    """Do optimizer step `step`, counted from 0, unless the guard finds it unfit.

    Returns what there is to log, and what any rank wishes.
    """
    job, args, world_size = run.job, run.job.args, dist.get_world_size()
    run.watchdog.at(step + 1, "reading data")
    targets_in_step = job.batches.size(step).targets
    sums = torch.tensor([0.0, *wishes], dtype=torch.float64, device=job.device)
    parts = job.batches.batch(step).split(job.micro_batch)
    for number, part in enumerate(parts, start=1):
        tokens, targets = part.tokens.to(job.device), part.targets.to(job.device)
        with micro_step(run.model, job, last=number == len(parts)):
            run.watchdog.at(step + 1, "forward")
            loss_sum = summed_loss(run.model, tokens, targets, part.documents)
            run.watchdog.at(step + 1, "backward")
            # Engines average over ranks; the mean is over the targets of all ranks and parts.
            (loss_sum * (world_size / targets_in_step)).backward()
        sums[0] += loss_sum.detach()
    run.watchdog.at(step + 1, "adding losses up")
    dist.all_reduce(sums)
    loss_total, *wished = sums.tolist()
    run.watchdog.at(step + 1, "clipping")
    loss, norm = loss_total / targets_in_step, clip(run.model, job)
    unfit = run.guard.judge(step + 1, loss, norm)
    run.watchdog.at(step + 1, "stepping")
    lr = lr_at(
        step,
        total_steps=job.steps,
        warmup_steps=int(args.warmup * job.steps),
        lr=args.lr,
        min_lr=args.min_lr,
        curve=args.schedule,
    )
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    if unfit is None:
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    logged = {"loss": loss, "lr": lr, "grad_norm": norm} | ({"skipped": unfit} if unfit else {})
    return logged, Wishes(*(wish > 0 for wish in wished))


def model_state(model: nn.Module, job: Job) -> dict[str, Any]:
    """The weights that a checkpoint holds: all, or the adapters, as the rest is --model's."""
    options = torch_state.StateDictOptions(ignore_frozen_params=bool(job.args.lora_rank))
    return torch_state.get_model_state_dict(model, options=options)


def state_of(run: Run, step: int) -> dict[str, Any]:
    """What a checkpoint holds; `step` counts the steps done.

    Learning rate and data follow from it: what else is said of them is which curve and which order.
    """
    job, args = run.job, run.job.args
    curve = {"curve": args.schedule, "steps": job.steps, "warmup": args.warmup}
    return job.identity() | {
        "model": model_state(run.model, job),
        "optimizer": torch_state.get_optimizer_state_dict(run.model, run.optimizer),
        "scheduler": curve | {"lr": args.lr, "min": args.min_lr},
        "guard": run.guard.state(),
        "rng": checkpoint.rng_states(),
        "step": step,
    }


def resume(run: Run) -> int:
    """Load the last checkpoint that is whole and return the number of steps done."""

    def tell(damaged: checkpoint.DamagedError) -> None:
        if dist.get_rank() == 0:
            about = f"checkpoint {damaged.path} is damaged ({damaged.reason})"
            print(f"train.py: {about}: going on from the one before it", file=sys.stderr)

    decays = [group["weight_decay"] for group in run.optimizer.param_groups]
    state = state_of(run, 0)
    path = checkpoint.load(run.job.out / "checkpoints", state, on_damaged=tell)
    run.job.check_identity(state, path)
    put_weights(run.model, state["model"])
    torch_state.set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"])
    for group, decay in zip(run.optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay  # the flag's, which may have been given anew
    run.guard.restore(state["guard"])
    checkpoint.restore_rng(state["rng"])
    return state["step"]


def put_weights(model: nn.Module, weights: dict[str, Any]) -> None:
    """Give the model what `model_state` took from it, or as much."""
    torch_state.set_model_state_dict(
        model, weights, options=torch_state.StateDictOptions(strict=False)
    )


def steps_saved(out: Path) -> int | None:
    """The steps up to the last checkpoint of the run in `out`; None where there is none."""
    last = checkpoint.latest(out / "checkpoints")
    return None if last is None else checkpoint.step_of(last)


class Best:
    """The weights that evaluated best so far, kept in OUT/best."""

    def __init__(self, run: Run, steps_done: int) -> None:
        self.run, self.folder = run, run.job.out / "best"
        last = checkpoint.latest(self.folder)
        if last and checkpoint.step_of(last) > steps_done and dist.get_rank() == 0:
            shutil.rmtree(self.folder)  # of steps that are yet to be done again
        dist.barrier()
        kept = best_of(run)
        self.loss = kept["loss"] if kept else math.inf

    def offer(self, step: int, loss: float | None) -> None:
        """Keep the weights after `step` steps if none evaluated better."""
        if loss is not None and loss < self.loss:
            self.loss, weights = loss, model_state(self.run.model, self.run.job)
            checkpoint.save(self.folder, step, {"model": weights, "loss": loss}, keep_last=1)


def best_of(run: Run) -> dict[str, Any] | None:
    """What OUT/best holds: the weights, as `put_weights` takes them, and their loss; or None."""
    folder = run.job.out / "best"
    if not checkpoint.latest(folder):
        return None
    weights = model_state(run.model, run.job)
    state = {"model": {k: torch.empty_like(v) for k, v in weights.items()}, "loss": math.inf}
    checkpoint.load(folder, state)
    return state


def train(run: Run, steps_done: int, ending: Termination) -> Trained:
    """Train on from `steps_done`, logging, evaluating and saving as the flags say.

    Once a rank is asked to end, all save and stop after the step that they are in.
    """
    job, args, memory = run.job, run.job.args, PeakMemory(run.job.device)
    first, world_size = dist.get_rank() == 0, dist.get_world_size()
    metrics = everywhere(lambda: job.open_folder(steps_done, world_size) if first else None)
    best = Best(run, steps_done) if args.keep_best else None
    end, traced = job.end, job.traced(steps_done)
    measured = min(steps_done + WARM_UP_STEPS, end)
    moments = [t for state in run.optimizer.state.values() for t in state.values()]
    with (
        Progress(job, run.model, steps_done, metrics) as progress,
        contextlib.closing(memory),
        contextlib.ExitStack() as tracing,
    ):
        evaluated = evaluate(run, progress, steps_done)
        if best and steps_done:  # a run may have been stopped between saving and evaluating
            best.offer(steps_done, evaluated)
        memory.start([*run.model.parameters(), *moments])
        saved_at = time.monotonic()
        for step in range(steps_done, end):
            if traced and step == traced.start:
                tracing.enter_context(tracing_to_folder(run, traced.stop, progress))
            began = time.perf_counter()
            overdue = time.monotonic() - saved_at > 60 * (args.save_minutes or math.inf)
            wishes = Wishes(end=ending.asked, save=first and overdue)
            logged, wished = train_step(run, step, wishes)
            steps_done, size = step + 1, job.batches.size(step)
            work = Work(size.tokens, size.squares, time.perf_counter() - began)
            progress.step(steps_done, logged, work)
            if steps_done == measured:
                memory.close()
            if steps_done == traced.stop:
                tracing.close()
            due = steps_done == end or steps_done % job.save_every == 0
            if due or wished.save or wished.end:
                run.watchdog.at(steps_done, "saving", job.patience_seconds)
                folder, state = job.out / "checkpoints", state_of(run, steps_done)
                checkpoint.save(folder, steps_done, state, args.async_checkpoint, job.keep_last)
                saved_at = time.monotonic()
            if wished.end and steps_done < end:
                break
            if steps_done == end or (args.eval_every and steps_done % args.eval_every == 0):
                evaluated = evaluate(run, progress, steps_done)
                if best:
                    best.offer(steps_done, evaluated)
        run.watchdog.at(steps_done, "saving", job.patience_seconds)
        checkpoint.wait()
        return progress.measured(steps_done, evaluated, memory.peak_bytes)


@contextlib.contextmanager
def tracing_to_folder(run: Run, last_step: int, progress: Progress) -> Iterator[None]:
    """Record what every unit of all ranks does meanwhile, in OUT/trace.html and OUT/trace.json."""
    job = run.job
    with record() as trace:
        yield
        run.watchdog.at(last_step, "tracing", job.patience_seconds)
    try:
        for name in TRACES:
            trace.save(job.out / name)
    except OSError as reason:  # such as a full disk, for which no run is to end
        progress.tell(f"the trace cannot be written: {reason}")
    else:
        progress.tell(f"trace: {job.out / TRACES[0]}")


def evaluate(run: Run, progress: Progress, step: int) -> float | None:
    """Mean loss of a target token of --eval-data, logged with answers to --sample; None without."""
    job = run.job
    if job.inputs.evaluation is None:
        return None
    run.watchdog.at(step, "evaluating")
    loss = eval_loss(run.model, job)
    progress.log(step, eval_loss=loss, eval_perplexity=perplexity(loss))
    if job.args.sample:
        said = answers(run.model, job.inputs.tokenizer, job.inputs.samples, job.args.max_new_tokens)
        for prompt, answer in zip(job.args.sample, said, strict=True):
            progress.log(step, prompt=prompt, answer=answer)
    return loss


def eval_loss(model: nn.Module, job: Job) -> float:
    """Mean loss of a target token of the evaluation data."""
    inputs = job.inputs
    pad_id, pack_to = inputs.tokenizer.pad_id, inputs.pack_to
    return mean_loss(model, inputs.evaluation, job.micro_batch, pad_id, job.device, pack_to)


# ---- The end --------------------------------------------------------------------------------


def export(run: Run) -> None:
    """Write the model in Hugging Face layout, adapters merged in, and those as peft does."""
    job, first = run.job, dist.get_rank() == 0
    if job.args.export_best:
        if best := best_of(run):
            put_weights(run.model, best["model"])
        elif first:
            print("train.py: no evaluation was finite: the last weights go out", file=sys.stderr)
    folder, adapter = job.out / "export", job.out / "adapter"
    if first:  # of a run that was trained on after its end
        for old in (folder, adapter):
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
    whole = bare(run.model, job)
    if first or job.args.engine in ("minifsdp", "fsdp2"):
        if job.args.lora_rank:
            save_peft(whole, adapter, job.args.model)
        dtype = getattr(torch, job.args.export_dtype)
        save_hf(whole, folder, dtype=dtype, tokenizer_path=job.inputs.tokenizer.path)


def instead_of_training(model: nn.Module, job: Job) -> None:
    """Let people talk to the model, or evaluate it."""
    args, inputs, first = job.args, job.inputs, dist.get_rank() == 0
    if args.chat:
        settings = Settings(
            args.max_new_tokens, args.temperature, args.top_p, args.seed, args.system or ""
        )
        if args.sample:
            write = functools.partial(print, end="", flush=True)
            answer_all(model, inputs.tokenizer, args.sample, settings, write)
        else:
            converse(model, inputs.tokenizer, settings)
        return
    loss = eval_loss(model, job)
    score = {"eval_loss": loss, "eval_perplexity": perplexity(loss)}
    if inputs.questions:
        score["eval_exact_match"] = exact_match(model, inputs.tokenizer, inputs.questions)["all"]
    if first:
        print(*describe(score), sep="\n")


def plan() -> int:
    """Plan the run that the flags describe, and print it; 0 if it fits, else 1."""
    args = read_flags(sys.argv[1:], 1, steps_saved)
    job = planned_job(args, GPU)
    report = minifsdp.plan.plan(
        lambda **flags: (outline(changed(job, flags)), lambda m: make_optimizer(m, args)),
        lambda **flags: full_rows(changed(job, flags)),
        args.world_size,
        args.gpu,
        changes=[Change(**change) for change in changes(job)],
        **settings_of_plan(job),
    )
    print(assumed(job))
    return show(report, {"--json": args.json, "--page": args.page})


def do(started: float) -> None:
    """Do what the flags describe."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    args = everywhere(lambda: read_flags(sys.argv[1:], world_size, steps_saved))
    with Watchdog(args.hang_timeout) as watchdog:
        watchdog.at(0, "reading data", math.inf)  # one rank may tokenise for all
        job = everywhere(lambda: prepare(args, rank, world_size, steps_saved))
        if rank == 0:
            announce(job)
        if args.show_sample or job.finished:
            return
        watchdog.at(0, "loading", job.patience_seconds)
        model = everywhere(lambda: build(job), lambda: watchdog.at(0, "loaded"))
        guard = Guard(args.skip_bad_steps, args.spike)
        run = Run(job, model, make_optimizer(model, args), guard, watchdog)
        resumed = everywhere(lambda: resume(run)) if args.resume else 0
        if not trains(args):
            watchdog.at(resumed, "answering", math.inf)  # people may think
            instead_of_training(llama_in(model, job), job)
            return
        run = run._replace(job=job._replace(summarised=job.summarised and resumed == job.steps))
        with Termination() as ending:
            trained = train(run, resumed, ending)
        if trained.steps < job.steps:
            if rank == 0:
                done = f"stopped after step {trained.steps} of {job.steps}"
                print(f"{done}: --resume goes on from there")
            return
        watchdog.at(job.steps, "exporting", job.patience_seconds)
        export(run)
        if not run.job.summarised:
            watchdog.at(job.steps, "summing up")
            sum_up(llama_in(model, job), run.job, trained, started)
        if rank == 0:
            if args.lora_rank:
                print(f"adapter: {job.out / 'adapter'}")
            print(f"export: {job.out / 'export'}")


def main() -> None:
    started = time.perf_counter()
    if plans(sys.argv[1:]):  # in a world of its own
        try:
            sys.exit(plan())
        except Exception as reason:
            known = isinstance(reason, (ValueError, OSError))
            told = f"train.py: error: {reason}\n" if known else traceback.format_exc()
            sys.stderr.write(told)
            sys.exit(MISTAKE)  # 1 says that the run does not fit
    connect()
    try:
        do(started)
    except (FloatingPointError, checkpoint.SaveError) as reason:  # which every rank met
        leave(1, str(reason))
    finally:
        with contextlib.suppress(checkpoint.SaveError):
            checkpoint.wait()  # a thread may be writing one still
        gc.collect()  # the model holds process groups, whose threads must end before Python does
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

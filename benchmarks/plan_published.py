"""Hold plans against published runs of 70B models: `python -m benchmarks.plan_published`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from llama import LlamaConfig
from minifsdp.plan import Settings, rehearse
from minifsdp.plan.machines import GIB, Cluster, gpu_named
from minifsdp.plan.timeline import simulate
from minifsdp.plan.world import GPU

from .plan_models import MPTConfig, Options, llama, mpt, tokens_and_targets


class Published(NamedTuple):
    """A run that somebody has published."""

    source: str
    build: Callable[[str, Options], Any]
    options: Options
    gpu: str
    gpus: int
    batch: int
    seq: int
    network_gb_s: float
    tokens_per_second: float | None  # a GPU
    fitted: bool


def _mpt(device_type: str, options: Options) -> Any:
    return mpt(MPTConfig(), device_type, options)


def _llama_3(device_type: str, options: Options) -> Any:
    config = replace(LlamaConfig.preset("70b"), vocab_size=128256, max_seq_len=8192)
    return llama(config, device_type, options)


def _llama(device_type: str, options: Options) -> Any:
    return llama(LlamaConfig.preset("70b"), device_type, options)


_CHECKPOINTED = Options(activation_checkpointing=True, bf16=True)
_PURE = Options(activation_checkpointing=True, bf16=True, reduce_bf16=True)
_OFFLOADED = Options(activation_checkpointing=True, pure_bf16=True, cpu_offload=True)
_SELECTIVE = Options(selective_checkpointing=True, bf16=True)
ROWS = [
    Published("llm-foundry 64 A100-80", _mpt, _PURE, "A100-80", 64, 8, 2048, 200, 410, True),
    Published("llm-foundry 128 A100-40", _mpt, _PURE, "A100-40", 128, 4, 2048, 200, 376, True),
    Published("llm-foundry 32 H100", _mpt, _CHECKPOINTED, "H100-80", 32, 2, 2048, 400, 882, True),
    Published("torchtitan 64 A100-80", _llama, _SELECTIVE, "A100-80", 64, 1, 4096, 200, 355, True),
    Published("torchtitan, batch 2", _llama, _SELECTIVE, "A100-80", 64, 2, 4096, 200, None, False),
    Published(
        "torchtune 8 A100, 13.9 GiB", _llama_3, _OFFLOADED, "A100-80", 8, 2, 2048, 200, None, True
    ),
]


def main() -> None:
    """Print a line for each published run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="runs whose source holds this text")
    args = parser.parse_args()
    print(f"{'run':26} {'peak / usable GiB':>17} {'fits':>10} {'tokens/s':>15} {'off':>6}  MFU")
    for run in ROWS:
        if args.only in run.source:
            print(line(run), flush=True)


def line(run: Published) -> str:
    """The run as planned, beside what was published."""
    rehearsal = rehearse(
        lambda: run.build(GPU, run.options),
        lambda: tokens_and_targets(run.batch, run.seq, GPU),
        run.gpus,
        GPU,
        Settings(),
    )
    gpu = gpu_named(run.gpu)
    timing = simulate(rehearsal, Cluster(gpu, 8, run.network_gb_s))
    peak = rehearsal.peak(on_host=False)
    fits = peak.nbytes <= gpu.usable_bytes
    same = "as run" if fits == run.fitted else "NOT AS RUN"
    speed = rehearsal.tokens / timing.seconds
    known, off = "-", ""
    if run.tokens_per_second:
        known, off = f"{run.tokens_per_second:.0f}", f"{speed / run.tokens_per_second - 1:+.1%}"
    mfu = rehearsal.model_flops / timing.seconds / (gpu.half_tflops * 1e12)
    return (
        f"{run.source:26} {peak.nbytes / GIB:8.1f} / {gpu.usable_bytes / GIB:4.1f}  "
        f"{'yes' if fits else 'no':>3} {same:6} {speed:9.0f} / {known:>3} {off:>6}  {mfu:.1%} "
        f"({rehearsal.parameters:,} parameters, step {timing.seconds:.2f} s, messages "
        f"{timing.messages:.2f} s, waited for {timing.exposed:.2f} s)"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

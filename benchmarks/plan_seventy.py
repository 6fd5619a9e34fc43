"""Llama 2 70B on 8 to 64 GPUs of 24, 40 and 80 GB: `python -m benchmarks.plan_seventy`.

Sequences of 2048, one a rank and step, activation checkpointing, fused AdamW, clipping. "bf16":
computed in bfloat16 with float32 rows, gradients and moments; "pure bf16": all of them bfloat16.
"""

from __future__ import annotations

import argparse

import torch

from llama import LlamaConfig
from minifsdp.plan import GPU, Settings, rehearse
from minifsdp.plan.machines import GIB, Cluster, gpu_named
from minifsdp.plan.timeline import simulate

from .plan_models import Options, llama, tokens_and_targets

_GPUS = ("RTX4090", "A100-40", "A100-80")
_WAYS = {
    "bf16": Options(activation_checkpointing=True, bf16=True),
    "bf16, offload": Options(activation_checkpointing=True, bf16=True, cpu_offload=True),
    "pure bf16": Options(activation_checkpointing=True, pure_bf16=True),
    "pure bf16, offload": Options(activation_checkpointing=True, pure_bf16=True, cpu_offload=True),
}


def main() -> None:
    """Print a row for each number of GPUs and way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--ways", nargs="*", choices=_WAYS, default=["bf16", "bf16, offload"])
    args = parser.parse_args()
    usable = ", ".join(f"{gpu_named(n).usable_bytes / GIB:.1f}" for n in _GPUS)
    print(f"GiB at the peak; usable {usable}; tokens/s a GPU where it fits")
    head = " | ".join(f"{name:>14}" for name in _GPUS)
    print(f"| GPUs | way                | device GiB | host GiB a node | {head} |")
    for count in args.gpus:
        for way in args.ways:
            print(row(count, way), flush=True)


def row(count: int, way: str) -> str:
    """One line of the table."""
    rehearsal = rehearse(
        lambda: llama(LlamaConfig.preset("70b"), GPU, _WAYS[way]),
        lambda: tokens_and_targets(1, 2048, GPU),
        count,
        GPU,
        Settings(),
    )
    device = rehearsal.peak(on_host=False).nbytes
    host = rehearsal.peak(on_host=True).nbytes * min(8, count)
    cells = []
    for name in _GPUS:
        gpu = gpu_named(name)
        seconds = simulate(rehearsal, Cluster(gpu, 8, 200.0)).seconds
        speed = f"{rehearsal.tokens / seconds:.0f} tokens/s"
        cells.append(f"{speed if device <= gpu.usable_bytes else 'no':>14}")
    on_host = f"{host / GIB:15.0f}" if host > GIB else f"{'-':>15}"
    line = f"| {count:4} | {way:18} | {device / GIB:10.1f} | {on_host} | "
    return line + " | ".join(cells) + " |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""GPUs and the links between them: figures of makers' data sheets, and how much of them is reached.

[Note: two efficiencies] A plan multiplies every peak by what runs reach of it: one number for each
kind of GPU, for arithmetic and memory alike, and one for all links. A100's is set so that three
published runs of 70B models come out, H100's by one (see `benchmarks.plan_published`); for other
kinds nobody's figures were at hand: H200's is taken from H100, the rest from A100. The links'
decides nothing in those runs, whose messages hide behind computing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

GIB = 2**30
LINK_EFFICIENCY = 0.8
HOP_SECONDS = 3e-6  # of one step of a ring
HOST_GB_S = 25.0  # memory bandwidth of a host that one rank gets, when eight share it
RESERVE_BYTES = int(1.5 * GIB)  # CUDA context, NCCL's buffers, cuBLAS's workspace
HOST_RESERVE_BYTES = 2 * GIB  # of a rank: Python, torch and CUDA's libraries; not measured
FRAGMENTATION = 0.05  # of the peak, held by the caching allocator and not used


@dataclass(frozen=True)
class GPU:
    """One kind of GPU."""

    name: str
    memory_bytes: int  # what a process sees
    half_tflops: float  # dense products of bfloat16 (V100: float16), summed in float32
    single_tflops: float  # float32 without TF32
    memory_gb_s: float
    peer_gb_s: float  # to the GPUs of its node, one way, over NVLink or else PCIe
    pcie_gb_s: float  # to the host, one way
    efficiency: float
    timed_as: str = ""  # whose figures of time these are; empty: its own

    @property
    def description(self) -> str:
        """Its name, and whose figures of time it is given."""
        return f"{self.name} (timed as an {self.timed_as})" if self.timed_as else self.name

    @property
    def usable_bytes(self) -> int:
        """What a step may hold at its peak: the memory less context and fragmentation."""
        return int((self.memory_bytes - RESERVE_BYTES) / (1 + FRAGMENTATION))

    def flops_per_second(self, dtype: torch.dtype | None) -> float:
        """Peak for products of a dtype."""
        half = dtype in (torch.bfloat16, torch.float16)
        return 1e12 * (self.half_tflops if half else self.single_tflops)


def _gpu(name: str, gib: float, *figures: float) -> tuple[str, GPU]:
    return name, GPU(name, int(gib * GIB), *figures)


# name, GiB seen, half and single TFLOP/s, memory, peer and PCIe GB/s, efficiency
GPUS = dict(
    [
        _gpu("A100-40", 39.4, 312, 19.5, 1555, 300, 32, 0.68),
        _gpu("A100-80", 79.2, 312, 19.5, 2039, 300, 32, 0.68),
        _gpu("H100-80", 79.1, 989, 67, 3350, 450, 64, 0.53),
        _gpu("H200", 139.8, 989, 67, 4800, 450, 64, 0.53),
        _gpu("V100-32", 31.7, 125, 15.7, 900, 150, 16, 0.68),
        _gpu("RTX3090", 23.6, 71, 35.6, 936, 32, 32, 0.68),
        _gpu("RTX4090", 23.5, 165, 82.6, 1008, 32, 32, 0.68),
        _gpu("A10-24", 22.1, 125, 31.2, 600, 32, 32, 0.68),
        _gpu("L4-24", 22.0, 121, 30.3, 300, 32, 32, 0.68),
        _gpu("L40S-48", 44.4, 362, 91.6, 864, 32, 32, 0.68),
    ]
)
_SAME = {"RTX3090-24": "RTX3090", "RTX4090-24": "RTX4090", "H200-141": "H200", "H100": "H100-80"}


def gpu_named(name: str | float) -> GPU:
    """A GPU by its name, or any GPU with so many GB: then an A100 with another memory.

    Raises ValueError for a name that is not known.
    """
    text = str(name)
    folded = re.sub(r"[ _]", "", text).upper()
    for known, gpu in GPUS.items():
        if folded in (known.upper(), *(k.upper() for k, v in _SAME.items() if v == known)):
            return gpu
    try:
        gigabytes = float(re.sub(r"(?i)\s*gi?b$", "", text))
    except ValueError:
        names = ", ".join(GPUS)
        raise ValueError(f"no GPU {text!r}: give a number of GB, or one of {names}") from None
    if not 0 < gigabytes < 10_000:
        raise ValueError(f"a GPU of {text} GB cannot be planned for")
    like = GPUS["A100-80"]
    return replace(
        like,
        name=f"{gigabytes:g} GB",
        memory_bytes=int(gigabytes * GIB * 0.985),
        timed_as=like.name,
    )


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs."""

    gpu: GPU
    gpus_per_node: int
    network_gb_s: float  # of a node, one way, all its network cards together

    def seconds(self, kind: str, nbytes: int, ranks: tuple[int, ...]) -> float:
        """How long a collective takes alone: a ring, through its slowest link.

        nbytes: of all ranks' pieces together. All-gather and reduce-scatter move (n - 1) / n of
        them past every rank, an all-reduce twice that. Rings enter and leave a node through all of
        its cards; ranks of one node that belong to other groups share them at the same time.
        """
        size = len(ranks)
        if size < 2:
            return 0.0
        times = 2 if kind == "all_reduce" else 1
        moved = times * nbytes * (size - 1) / size
        nodes = {rank // self.gpus_per_node for rank in ranks}
        seconds = moved / (self.gpu.peer_gb_s * 1e9 * LINK_EFFICIENCY)
        if len(nodes) > 1:
            here = size / len(nodes)
            share = self.network_gb_s * min(1.0, here / self.gpus_per_node)
            crossing = times * nbytes * (len(nodes) - 1) / len(nodes)
            between = crossing / (share * 1e9 * LINK_EFFICIENCY)
            seconds = between if here <= 1 else max(seconds, between)
        return seconds + times * (size - 1) * HOP_SECONDS

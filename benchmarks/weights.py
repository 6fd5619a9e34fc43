"""What it takes to save and load a model as wide as Llama 2 70B on several ranks.

    python -m benchmarks.weights

Two layers of the 70B model in bfloat16 (4.5 GB) are sharded by minifsdp, saved as Hugging Face's
folder and as eight files of Meta's, and loaded from a cold disk by new processes, also with the
Hugging Face reader of torch.distributed.checkpoint. For each rank: the most bytes held at once
(tensors by the profiler's memory events, plus resident pages of mapped files), bytes it asked the
system for, bytes that came from the disk, seconds. It fails if a rank holds more than its shard and
one tensor plus a tenth, if it reads more than 1.1 times its shard from Hugging Face's files, or if
the loaded rows are not those that were saved. Takes 10 GB of disk and some minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler writes to stderr

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import checkpoint
from torch.profiler import ProfilerActivity, profile

from llama import Llama, LlamaConfig
from llama.weights import hf_name, load_hf, load_meta, save_hf, save_meta
from minifsdp import fully_shard

WIDE = replace(LlamaConfig.preset("70b"), n_layers=2)
FULL_BYTES = 2 * LlamaConfig.preset("70b").num_parameters
META_FILES = 8


class MappedPages(threading.Thread):
    """Samples how many pages of files in `folder`, or of shared memory, this process has mapped."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = self.read_bytes = 0  # what sampling itself reads from /proc
        self._marks = (str(folder), "/dev/shm")
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.02):
            self._sample()

    def _sample(self) -> None:
        text = Path("/proc/self/smaps").read_text()
        self.read_bytes += len(text)
        resident, counts = 0, False
        for line in text.splitlines():
            if line[:1].islower() or line[:1].isdigit():  # a mapping's first line: addresses, file
                counts = any(mark in line for mark in self._marks)
            elif counts and line.startswith("Rss:"):
                resident += int(line.split()[1]) * 1024
        self.peak_bytes = max(self.peak_bytes, resident)

    def close(self) -> None:
        self._done.set()
        self.join()


def io_counts() -> dict[str, int]:
    """Bytes that this process asked to read, and that the disk delivered."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {key: int(value) for key, value in (line.split(": ") for line in lines)}


class Tensors:
    """The most bytes of tensors held during a block, `peak`, and at its end, `held`."""

    def __init__(self, held: int, files: set[int]) -> None:
        self.peak = self.held = held
        self._files = files  # sizes: the profiler counts a mapped file as if it were memory
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> Tensors:
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profiler.__exit__(*error)
        events = self._profiler.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        for _, nbytes in changes:
            self.held += 0 if abs(nbytes) in self._files else nbytes
            self.peak = max(self.peak, self.held)


def measure(build: Callable[[], Llama], action: Callable[[Llama], None], folder: Path) -> dict:
    """Figures of `build`, which is about memory alone, and of `action`."""
    files = {path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    with Tensors(0, files) as building:
        model = build()
    dist.barrier()
    pages, before, started = MappedPages(folder), io_counts(), time.perf_counter()
    pages.start()
    with Tensors(building.held, files) as acting:
        action(model)
        seconds, after = time.perf_counter() - started, io_counts()
    pages.close()
    rows = [p.to_local().detach() for p in model.parameters()]
    return {
        "shard": sum(local.nbytes for local in rows),
        "built": building.peak,
        "tensors": acting.peak,
        "mapped": pages.peak_bytes,
        "held": max(building.peak, acting.peak + pages.peak_bytes),
        "asked": after["rchar"] - before["rchar"] - pages.read_bytes,
        "disk": after["read_bytes"] - before["read_bytes"],
        "seconds": seconds,
        "crc": zlib.crc32(b"".join(checksum(local) for local in rows)),
    }


def checksum(local: torch.Tensor) -> bytes:
    return zlib.crc32(local.reshape(-1).view(torch.uint8).numpy()).to_bytes(4, "little")


def on_meta() -> Llama:
    """The model without memory, a unit for each block, the embedding and the head."""
    with torch.device("meta"):
        model = Llama(WIDE).bfloat16()
    for module in (*model.layers, model.tok_embeddings, model.output, model):
        fully_shard(module)
    return model


def empty() -> Llama:
    model = on_meta()
    model.to_empty(device="cpu")
    return model


def filled() -> Llama:
    """Random rows, repeated: drawing every number would take longer than saving it."""
    model = empty()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for p in model.parameters():
        rows = p.to_local().detach().view(-1)
        block = torch.empty(1_000_003, dtype=rows.dtype).uniform_(-0.1, 0.1, generator=generator)
        for part in rows.split(len(block)):
            part.copy_(block[: len(part)])
    return model


def read_by_dcp(model: Llama, folder: Path) -> None:
    state = {hf_name(name): p.detach() for name, p in model.named_parameters()}
    checkpoint.load(state, storage_reader=checkpoint.HuggingFaceStorageReader(str(folder)))


PHASES: dict[str, tuple[Callable[[], Llama], Callable[[Llama, Path], Any]]] = {
    "save_hf": (filled, lambda model, root: save_hf(model, root / "hf")),
    "save_meta": (filled, lambda model, root: save_meta(model, root / "meta", META_FILES)),
    "load_hf": (empty, lambda model, root: load_hf(model, root / "hf")),
    "load_hf on meta": (on_meta, lambda model, root: load_hf(model, root / "hf")),
    "load_meta": (empty, lambda model, root: load_meta(model, root / "meta")),
    "DCP's HF reader": (empty, lambda model, root: read_by_dcp(model, root / "hf")),
}


def work(rank: int, world_size: int, root: str, phase: str) -> None:
    torch.set_num_threads(1)
    store = Path(root, f"store {phase}")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    build, action = PHASES[phase]
    figures = measure(build, lambda model: action(model, Path(root)), Path(root))
    Path(root, f"{phase} {rank}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def forget(folder: Path) -> None:
    """Drop files from the page cache, so that reading them reads the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def judge(phase: str, figures: dict, saved: dict | None, largest: int) -> list[str]:
    """What is not as it should be in a rank's figures."""
    wrong = []
    if phase.startswith("DCP"):
        return wrong
    held, allowed = figures["held"], 1.1 * (figures["shard"] + largest)
    if held > allowed:
        wrong.append(f"{phase}: held {held:,} bytes, more than {allowed:,.0f}")
    if phase.startswith("load_hf"):
        for kind in ("asked", "disk"):
            if figures[kind] > 1.1 * figures["shard"]:
                wrong.append(f"{phase}: {kind} {figures[kind]:,} bytes, 1.1 shards are the limit")
    if saved is not None and figures["crc"] != saved["crc"]:
        wrong.append(f"{phase}: rows differ from those that were saved")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="processes (default: 4)")
    parser.add_argument("--folder", help="where to put the files (default: the temporary folder)")
    args = parser.parse_args()
    largest = 2 * max(WIDE.vocab_size, WIDE.ffn_hidden) * WIDE.dim
    gb, wrong, saved = 1e9, [], {}
    print(f"{WIDE.num_parameters:,} parameters in bfloat16 on {args.ranks} ranks")
    print("The most of any rank, in GB. Limit: its shard and the largest tensor, and a tenth.")
    print("| | building | tensors | mapped | held | limit | asked for | from disk | seconds |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as root:
        for phase in PHASES:
            forget(Path(root))
            mp.spawn(work, args=(args.ranks, root, phase), nprocs=args.ranks)
            ranks = [
                json.loads(Path(root, f"{phase} {r}.json").read_text()) for r in range(args.ranks)
            ]
            for rank, figures in enumerate(ranks):
                wrong += judge(phase, figures, saved.get(rank), largest)
                saved.setdefault(rank, figures)
            most = {key: max(figures[key] for figures in ranks) for key in ranks[0]}
            most["limit"] = 1.1 * (most["shard"] + largest)
            keys = ("built", "tensors", "mapped", "held", "limit", "asked", "disk")
            columns = [f"{most[key] / gb:.3f}" for key in keys] + [f"{most['seconds']:.1f}"]
            print(f"| {phase} | {' | '.join(columns)} |", flush=True)
    print(f"A rank's shard is {most['shard'] / gb:.3f} GB, the largest tensor {largest / gb:.3f}.")
    for count in (8, 16):
        shard = FULL_BYTES / count / gb
        print(
            f"All of 70B on {count} ranks: {shard:.3f} GB a rank to read and to write, at most "
            f"{shard + largest / gb:.3f} GB held; seconds: {FULL_BYTES / gb:.1f} / (disk's GB/s)"
        )
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

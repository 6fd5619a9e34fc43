"""Does prefetch hide a slow network? Two ranks in network namespaces, joined by a limited link.

    python -m benchmarks.slow_network [--mbit 800] [--rounds 8] [--json FILE]

Each rank runs in a network namespace of its own; a pair of virtual Ethernet devices joins them,
limited to `--mbit` each way by a token bucket. Messages travel by *direct* collectives (shared
memory would cross the namespaces). Interleaved in one run, the same step is timed

- with prefetch: the next unit's gather, and the last one's reduction, under this one's compute;
- without: every message is waited for where it starts;
- compute only: the whole model on each rank, no messages;
- communication only: the step's messages, one after the other, no compute.

Needs Linux, root, and `ip` and `tc`; says why it is skipped where it cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from llama import Llama, LlamaConfig
from minifsdp import fully_shard
from minifsdp.collectives import use_collectives
from minifsdp.hooks import unit_of
from minifsdp.runtime import Runtime

_PORT, _DEVICE = 29_517, "link0"
_CONFIG = LlamaConfig(
    dim=512, n_layers=4, n_heads=8, n_kv_heads=8, ffn_hidden=1408, vocab_size=256, max_seq_len=512
)
_BATCH, _SEQ = 2, 512


class Skipped(Exception):
    """Why this machine cannot run it."""


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise Skipped(f"`{command}` failed: {done.stderr.strip() or done.returncode}")


@contextmanager
def joined_namespaces(mbit: float) -> Iterator[list[str]]:
    """Names of two network namespaces with 10.77.0.1 and 10.77.0.2, joined at `mbit` Mbit/s."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        raise Skipped(f"no {' or '.join(missing)}" if missing else "network namespaces need root")
    names = [f"minifsdp-{os.getpid()}-{rank}" for rank in range(2)]
    ends = [f"mf{os.getpid() % 100_000}e{rank}" for rank in range(2)]
    try:
        for name in names:
            _run(f"ip netns add {name}")
        _run(f"ip link add {ends[0]} type veth peer name {ends[1]}")
        for rank, (name, end) in enumerate(zip(names, ends, strict=True)):
            _run(f"ip link set {end} netns {name}")
            inside = f"ip netns exec {name}"
            _run(f"{inside} ip link set lo up")
            _run(f"{inside} ip link set {end} name {_DEVICE}")
            _run(f"{inside} ip addr add 10.77.0.{rank + 1}/24 dev {_DEVICE}")
            _run(f"{inside} ip link set {_DEVICE} up")
            limit = f"tbf rate {mbit}mbit burst 512kb latency 200ms"
            _run(f"{inside} tc qdisc add dev {_DEVICE} root {limit}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def launch(arguments: argparse.Namespace) -> dict:
    """Run both ranks; returns what rank 0 reports. Raises Skipped or RuntimeError."""
    with joined_namespaces(arguments.mbit) as names:
        ranks = []
        for rank, name in enumerate(names):
            inside = ["ip", "netns", "exec", name, sys.executable, "-m", "benchmarks.slow_network"]
            own = ["--rank", str(rank), "--mbit", str(arguments.mbit)]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": _DEVICE}
            ranks.append(
                subprocess.Popen(
                    [*inside, *own, "--rounds", str(arguments.rounds)],
                    env=environment,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            while all(process.poll() is None for process in ranks):
                time.sleep(0.1)
            output, _ = ranks[0].communicate(timeout=5)
            ranks[1].communicate(timeout=5)
        except subprocess.TimeoutExpired:
            pass  # the other has failed, and this one waits for it
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(process.returncode for process in ranks):
            raise RuntimeError("a rank failed; its own message is above")
        return json.loads(output.splitlines()[-1])


def _model(sharded: bool) -> nn.Module:
    model = Llama(_CONFIG)
    model.init_weights(torch.Generator().manual_seed(0))
    if sharded:
        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
    return model


def _step(model: nn.Module, tokens: torch.Tensor) -> None:
    logits = model(tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for param in model.parameters():
        param.grad = None


@contextmanager
def _no_prefetch() -> Iterator[None]:
    """No unit starts before it is waited for, and no reduction is left under way."""
    names = ("expected_after", "at", "reduce")
    usual = {name: getattr(Runtime, name) for name in names}

    def reduce(self: Runtime, unit) -> None:
        if unit.reducer.start():
            unit.reducer.finish()

    Runtime.expected_after = Runtime.at = lambda *_: []
    Runtime.reduce = reduce
    try:
        yield
    finally:
        for name, method in usual.items():
            setattr(Runtime, name, method)


def _communicate(model: nn.Module) -> None:
    """The messages of a step, with gradients of zeros."""
    units = [unit_of(module) for module in (model, *model.layers)]
    for unit in [*units, *reversed(units[1:])]:
        unit.unshard()
        unit.wait_for_unshard()
        unit.reshard()
    for unit in units:
        unit.unshard()
        unit.wait_for_unshard()
        for param in unit.params:
            param.unsharded.grad = torch.zeros_like(param.unsharded)
        unit.reshard()
        if unit.reducer.start():
            unit.reducer.finish()
    for param in model.parameters():
        param.grad = None


def _gathers(model: nn.Module) -> None:
    """The gathers that `_communicate` needs only to have somewhere for gradients."""
    for unit in [unit_of(module) for module in (model, *model.layers)]:
        unit.unshard()
        unit.wait_for_unshard()
        unit.reshard()


def work(rank: int, rounds: int, mbit: float) -> None:
    """One rank: prints the report as JSON on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://10.77.0.1:{_PORT}", rank=rank, world_size=2)
    use_collectives("direct")
    sharded, plain = _model(True), _model(False)
    tokens = torch.randint(256, (_BATCH, _SEQ + 1), generator=torch.Generator().manual_seed(rank))

    def without_prefetch() -> None:
        with _no_prefetch():
            _step(sharded, tokens)

    ways: dict[str, Callable[[], None]] = {
        "with prefetch": lambda: _step(sharded, tokens),
        "without prefetch": without_prefetch,
        "compute only": lambda: _step(plain, tokens),
        "communication only": lambda: _communicate(sharded),
        "its spare gathers": lambda: _gathers(sharded),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(2 + rounds):
        for name, way in ways.items():
            dist.barrier()
            started = time.perf_counter()
            way()
            took = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if step >= 2:
                seconds[name].append(took.item())
    # The gradients need parameters to hang on, whose gathers no step makes: they are taken off.
    spare = seconds.pop("its spare gathers")
    pairs = zip(seconds["communication only"], spare, strict=True)
    seconds["communication only"] = [whole - part for whole, part in pairs]
    if rank == 0:
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        overlap = (medians["without prefetch"] - medians["with prefetch"]) / min(
            medians["compute only"], medians["communication only"]
        )
        report = {"mbit": mbit, "rounds": rounds, "seconds": medians, "hidden": overlap}
        print(json.dumps(report | {"torch": torch.__version__}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_network")
    parser.add_argument("--mbit", type=float, default=800, help="the link's rate, each way")
    parser.add_argument("--rounds", type=int, default=8, help="timed steps of each kind")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # how it starts itself
    arguments = parser.parse_args()
    if arguments.rank is not None:
        work(arguments.rank, arguments.rounds, arguments.mbit)
        return
    try:
        report = launch(arguments)
    except Skipped as why:
        print(f"skipped: {why}")
        return
    for name, seconds in report["seconds"].items():
        print(f"{name:20} {1e3 * seconds:8.1f} ms")
    print(f"prefetch hides {report['hidden']:.0%} of what compute or communication could hide")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

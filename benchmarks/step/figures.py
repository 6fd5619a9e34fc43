"""From what the ranks saw to the figures of the report, and the comparison of losses."""

from __future__ import annotations

import statistics
from typing import Any

from .counts import SENT_BY_MACHINE
from .engines import ENGINES, LIMIT, REFERENCE, UPSTREAM, Engine
from .memory import Memory
from .timing import Timed, slowest

PHASES = ("forward", "backward", "optimizer")


def compare_losses(timed: dict[str, Timed]) -> dict[str, dict[str, Any]]:
    """For each engine where its losses first leave the reference's, as {"reference", "step"}.

    Steps count from 0, the warm-up included; None if they never do. An engine of minifsdp must not
    differ at all, another one not in step 0, whose weights no engine has touched: RuntimeError
    names engine, step and rank.
    """
    if REFERENCE not in timed:
        return {name: {"reference": None, "step": None} for name in timed}
    expected = _losses(timed[REFERENCE])
    result = {}
    for name, one in timed.items():
        differing = [
            (step, rank, ours, theirs)
            for step, pairs in enumerate(zip(_losses(one), expected, strict=True))
            for rank, (ours, theirs) in enumerate(zip(*pairs, strict=True))
            if ours != theirs
        ]
        first = min(differing, default=None)
        if first is not None and (ENGINES[name].exact or first[0] == 0):
            step, rank, ours, theirs = first
            raise RuntimeError(
                f"engine {name}: the loss of step {step} on rank {rank} is {ours}, "
                f"{REFERENCE}'s is {theirs}; they must be equal to the bit"
            )
        result[name] = {"reference": REFERENCE, "step": None if first is None else first[0]}
    return result


def _losses(one: Timed) -> list[list[str]]:
    """By step and rank, as text that differs whenever the bits do."""
    return [[rank.loss.hex() for rank in ranks] for ranks in zip(*one.steps, strict=True)]


def time_figures(timed: dict[str, Timed], warmup: int) -> dict[str, dict[str, Any]]:
    """Seconds of each engine and their ratios, of the rounds after `warmup`; see `FIGURES`."""
    walls = {
        name: {phase: slowest(one.steps, phase)[warmup:] for phase in (*PHASES, "whole", "passes")}
        for name, one in timed.items()
    }
    upstream = better_upstream({n: statistics.median(w["whole"]) for n, w in walls.items()})
    return {name: _times(ENGINES[name], timed[name], walls, upstream, warmup) for name in timed}


def _times(
    engine: Engine, one: Timed, walls: dict[str, Any], upstream: str | None, warmup: int
) -> dict[str, Any]:
    wall = walls[engine.name]
    phases = {f"{phase}_seconds": statistics.median(wall[phase]) for phase in PHASES}
    cpu = [sum(rank.cpu for rank in ranks) for ranks in zip(*one.steps, strict=True)][warmup:]
    return {
        "settings": one.settings,
        "tried": one.tried,
        "step_seconds": statistics.median(wall["whole"]),
        **phases,
        "ratio_to_upstream": _paired_ratio(wall, walls.get(upstream)),
        "ratio_to_none": _paired_ratio(wall, walls.get(LIMIT)),
        "cpu_seconds": statistics.median(cpu),
        "exposed_seconds": _exposed(wall, walls.get(LIMIT), engine.steps_in_backward),
        "rounds_seconds": wall["whole"],
    }


def better_upstream(figures: dict[str, float]) -> str | None:
    """The engine of `UPSTREAM` with the lower figure."""
    return min((n for n in UPSTREAM if n in figures), key=figures.__getitem__, default=None)


def _paired_ratio(wall: dict[str, Any], other: dict[str, Any] | None) -> float | None:
    if other is None:
        return None
    pairs = zip(wall["whole"], other["whole"], strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def _exposed(
    wall: dict[str, Any], limit: dict[str, Any] | None, steps_in_backward: bool
) -> float | None:
    """Forward and backward beyond those with no communication; of an engine whose backward holds
    the optimizer, the whole step beyond a whole step."""
    if limit is None:
        return None
    span = "whole" if steps_in_backward else "passes"
    pairs = zip(wall[span], limit[span], strict=True)
    return statistics.median(ours - theirs for ours, theirs in pairs)


def count_figures(name: str, one: Timed, gradient_bytes: int) -> dict[str, Any]:
    """Calls and messages of rank 0 in a step, and the bytes that all ranks sent."""
    if one.counts is None:
        return {}
    first = one.counts[0]
    if name.startswith("minifsdp"):
        messages, nbytes, source = first.messages, first.message_bytes, "events"
    else:
        messages, nbytes, source = sum(first.c10d_ops.values()), first.c10d_bytes, "profiler"
    if name == "ddp" and messages and not nbytes:
        # NCCL's reducer tells no shapes: every gradient travels once.
        nbytes, source = gradient_bytes, "formula"
    sent = [counts.sent_bytes for counts in one.counts]
    return {
        "aten_ops": first.aten_ops,
        "python_calls": first.python_calls,
        "messages": messages,
        "message_bytes": nbytes,
        "message_bytes_from": source,
        "c10d_ops": first.c10d_ops,
        "sent_bytes": sent[0] if SENT_BY_MACHINE else sum(sent),
        "sent_bytes_from": "loopback device" if SENT_BY_MACHINE else "bytes written, all ranks",
    }


def memory_figures(measured: dict[str, list[Memory]]) -> dict[str, dict[str, Any]]:
    """Of each engine the rank that held most."""
    worst = {name: max(ranks, key=lambda m: m.peak_bytes) for name, ranks in measured.items()}
    upstream = better_upstream({name: m.above_shards_bytes for name, m in worst.items()})
    base = worst[upstream].above_shards_bytes if upstream else None
    return {
        name: {
            "peak_above_shards_bytes": memory.above_shards_bytes,
            "peak_ratio_to_upstream": memory.above_shards_bytes / base if base else None,
            **memory._asdict(),
        }
        for name, memory in worst.items()
    }

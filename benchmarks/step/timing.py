"""The timed run: engines take turns, one step each a round, in one process group."""

from __future__ import annotations

import gc
import random
import statistics
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .built import Built, Setup, Step
from .counts import Counts, count
from .engines import Engine, Settings

_TRIAL_STEPS = 2  # per variant, after one that is not counted


class Timed(NamedTuple):
    """What all ranks saw of one engine. `steps[rank][step]` begins with the warm-up."""

    settings: Settings
    tried: list[dict[str, Any]]
    """Each variant with the seconds of its median step, where there was a choice."""
    steps: list[list[Step]]
    counts: list[Counts] | None
    """Of each rank, in steps of their own."""


class Race:
    """Engines that step in turns on the same tokens."""

    def __init__(self, setup: Setup, runners: dict[str, Built]) -> None:
        self.setup = setup
        self.runners = runners
        self.steps: dict[str, list[Step]] = {name: [] for name in runners}
        # Collections then look at what a step makes, not at all that the engines keep.
        gc.collect()
        gc.freeze()

    def step(self, name: str) -> Step:
        """One step of one engine, on the tokens of as many steps as it has made; all ranks start
        together."""
        steps = self.steps[name]
        tokens = self.tokens(len(steps))
        dist.barrier()
        try:
            steps.append(self.runners[name].step(tokens))
        except Exception as error:
            error.add_note(f"in step {len(steps)} of engine {name}")
            raise
        return steps[-1]

    def tokens(self, step: int) -> torch.Tensor:
        work, device, seed, _ = self.setup
        return work.tokens(seed, step, dist.get_rank(), device)

    def run(self, rounds: int) -> None:
        """`rounds` steps of each engine, in a new order each round, the same on all ranks."""
        order = list(self.runners)
        for _ in range(rounds):
            done = min(len(steps) for steps in self.steps.values())
            random.Random(self.setup.seed * 100_003 + done).shuffle(order)
            for name in order:
                self.step(name)


def build(engine: Engine, setup: Setup, settings: Settings) -> Built:
    """The engine's model; an error tells which engine raised it."""
    try:
        return engine.build(setup, settings)
    except Exception as error:
        error.add_note(f"while building engine {engine.name} with {settings}")
        raise


def run(
    engines: list[Engine], setup: Setup, rounds: int, warmup: int, counted: bool
) -> dict[str, Timed]:
    """Time `engines` against each other; the result is the same on all ranks."""
    choices = {engine.name: _choose(engine, setup) for engine in engines}
    race = Race(setup, {e.name: build(e, setup, choices[e.name][0]) for e in engines})
    race.run(warmup + rounds)
    result = {}
    for engine in engines:
        steps = gather(race.steps[engine.name][:])
        counts = gather(count(race, engine.name)) if counted else None
        result[engine.name] = Timed(*choices[engine.name], steps, counts)
    gc.unfreeze()
    return result


def slowest(steps: list[list[Step]], phase: str) -> list[float]:
    """Of each step, the seconds of the rank that took longest."""
    return [max(getattr(one, phase) for one in ranks) for ranks in zip(*steps, strict=True)]


def gather(value: Any) -> list[Any]:
    """`value` of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _choose(engine: Engine, setup: Setup) -> tuple[Settings, list[dict[str, Any]]]:
    """The engine's fastest variant here, and what was tried."""
    if len(engine.variants) == 1:
        return engine.variants[0], []
    runners = {str(i): build(engine, setup, v) for i, v in enumerate(engine.variants)}
    race = Race(setup, runners)
    race.run(1 + _TRIAL_STEPS)
    seconds = [
        statistics.median(slowest(gather(race.steps[name]), "whole")[1:]) for name in runners
    ]
    tried = [{**v, "step_seconds": s} for v, s in zip(engine.variants, seconds, strict=True)]
    return engine.variants[seconds.index(min(seconds))], tried

"""`compare`: the one call behind the command line and tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from .engines import engine_of
from .launch import launch
from .lockstep import Lockstep
from .named import named
from .report import Report
from .settings import Settings

_DEFAULT_RANKS = 2


def compare(
    build: Callable[[], Any] | str,
    batch: Callable[..., Any] | str,
    engines: Sequence[Any] = ("minifsdp", "fsdp2"),
    steps: int = 5,
    *,
    world_size: int | None = None,
    **settings: Any,
) -> Report:
    """Train with `engines[0]`, the tested one, and with each of the others, and compare every bit.

    build: `build() -> nn.Module`. batch: `batch(rank, step)`, or with accumulate > 1
        `batch(rank, step, micro)` -> what the model is called with: a tuple (arguments), a dict
        (keywords) or one argument.
    engines: names (minifsdp, fsdp2, fsdp1, ddp, none), functions `shard(model, units, settings)`,
        `Engine`s; these, and build and batch, may be given as "package.module:name".
    world_size: how many ranks to launch, where there is no process group; default 2.
    settings: see `Settings`.

    Inside a process group every rank calls it, and gets the same report. Raises ValueError for a
    mistake in what was given; RuntimeError for an engine that raises, and for a launched rank that
    dies or hangs.
    """
    if len(engines) < 2:
        raise ValueError(f"engines is {tuple(engines)!r}: give the tested one and another")
    wanted = Settings.of(steps=steps, **settings)
    if not dist.is_initialized():
        _check(build, batch, engines, wanted)
        args = (build, batch, tuple(engines), wanted)
        ranks = _DEFAULT_RANKS if world_size is None else world_size
        return launch(_run, args, ranks, wanted.device, wanted.timeout_seconds)
    if world_size not in (None, dist.get_world_size()):
        raise ValueError(
            f"world_size is {world_size} inside a process group of {dist.get_world_size()}: leave "
            "it out, or call compare without a group"
        )
    with torch.random.fork_rng():
        return _run(build, batch, engines, wanted, lambda where: None)


def _run(build: Any, batch: Any, engines: Any, settings: Settings, note: Any) -> Report:
    """On every rank of a group."""
    build, batch, found, settings = _check(build, batch, engines, settings)
    steps = Lockstep(build, batch, found, settings, note)
    try:
        return steps.run()
    finally:
        steps.close()


def _check(build: Any, batch: Any, engines: Sequence[Any], settings: Settings) -> Any:
    """Everything that was named, found. Raises ValueError."""
    build = named(build, "--model") if isinstance(build, str) else build
    batch = named(batch, "--batch") if isinstance(batch, str) else batch
    arguments = 3 if settings.accumulate > 1 else 2
    for function, flag, count in ((build, "--model", 0), (batch, "--batch", arguments)):
        _check_callable(function, flag, count)
    found = [engine_of(engine) for engine in engines]
    names = [engine.name for engine in found]
    for engine in found[1:]:
        if names.count(engine.name) > 1:
            raise ValueError(f"engine {engine.name} is there twice: compare it to another one")
    given = {}
    for name in ("loss", "units", "optimizer"):
        value = getattr(settings, name)
        if isinstance(value, str) and ":" in value:
            given[name] = named(value, f"--{name}")
    return build, batch, found, replace(settings, **given)


def _check_callable(function: Any, flag: str, count: int) -> None:
    called = {0: "()", 2: "(rank, step)", 3: "(rank, step, micro)"}[count]
    if not callable(function):
        raise ValueError(f"{flag} is {function!r}: give a function, called as {called}")
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError as error:
        raise ValueError(f"{flag} is called as {called}, which it does not take: {error}") from None
    except ValueError:
        return  # a builtin without a signature

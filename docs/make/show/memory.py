"""Shown on the page about memory."""

from __future__ import annotations

import itertools

import torch
from torch.profiler import ProfilerActivity, profile

from minifsdp import collectives, step_in_backward
from minifsdp.collectives import use_collectives

from ..build import drawn_from
from ..model import Block, Model, batch, shard
from ..ranks import on
from ..svg import Drawing
from ..watch import Edge, watching

DIM, HIDDEN, BLOCKS = 64, 512, 4
UNIT = 4 * sum(p.numel() for p in Block(DIM, HIDDEN).parameters())
_KIB = 1024


def unit_kib() -> str:
    return f"{UNIT / _KIB:.1f}"


def sixteen() -> str:
    lines = ["| per parameter | bytes | replicated | sharded over W ranks |", "|---|---:|---|---|"]
    for what in ("the parameter, fp32", "its gradient", "first moment of Adam", "second moment"):
        lines.append(f"| {what} | 4 | on every rank | 1/W of the rows |")
    return "\n".join(lines)


def _model() -> Model:
    torch.manual_seed(0)
    return Model(DIM, HIDDEN, BLOCKS)


def _adamw(params: list) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def _edges(micro_batches: int = 1, in_backward: bool = False, **settings: object) -> list[Edge]:
    """A second step: gradients are whole and local until the last micro-batch."""
    model = shard(_model(), **settings)
    optimizer = step_in_backward(model, _adamw) if in_backward else _adamw(list(model.parameters()))
    for step in range(2):
        with watching(model) as watch:
            for micro in range(micro_batches):
                model.set_requires_gradient_sync(micro == micro_batches - 1)
                model(batch(step, DIM)).sum().backward()
            with watch.doing("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
    return watch.edges


@on(2)
def resharding() -> list[Edge]:
    return _edges()


@on(2)
def keeping() -> list[Edge]:
    return _edges(reshard_after_forward=False)


@on(2)
def accumulating() -> list[Edge]:
    return _edges(micro_batches=2)


@on(2)
def stepping() -> list[Edge]:
    return _edges(in_backward=True)


@on(2)
def sending() -> list[Edge]:
    with use_collectives("direct"):
        return _edges()


_PARTS = [
    ("unsharded", "whole"),
    ("gradients", "gradients"),
    ("message", "message"),
    ("rows", "rows"),
]
_TALLEST = 1750  # KiB, the scale of all curves


def _curve(edges: list[Edge], title: str) -> str:
    left, top, width, height = 62, 62, 600, 190
    edges = [e for e in edges if e.edge != "moved"]
    picture = Drawing(left + width + 28, top + height + 74, title)
    picture.text(24, 28, title, "bold")

    def x(at: float) -> float:
        return left + width * at / len(edges)

    def y(nbytes: float) -> float:
        return top + height - height * nbytes / _KIB / _TALLEST

    for kib in range(0, _TALLEST, 500):
        picture.line([(left, y(kib * _KIB)), (left + width, y(kib * _KIB))], "grid")
        picture.text(left - 8, y(kib * _KIB) + 4, f"{kib:,}", "soft small", "end")
    picture.text(left - 8, top - 10, "KiB", "soft small", "end")
    below = [0] * len(edges)
    for part, colour in _PARTS:
        above = [low + getattr(edge, part) for low, edge in zip(below, edges, strict=True)]
        if above != below:
            outline = [(x(i), y(v)) for at, v in enumerate(above) for i in (at, at + 1)]
            inner = [(x(i), y(v)) for at, v in enumerate(below) for i in (at, at + 1)]
            picture.area(outline + inner[::-1], colour)
        below = above
    peak = max(range(len(edges)), key=lambda at: below[at])
    at = edges[peak]
    said = f"{below[peak] / _KIB:,.0f} KiB: {at.edge} of {at.kind}, {at.unit}"
    picture.line(
        [(x(peak), y(below[peak])), (x(peak + 1), y(below[peak]))], "wait", stroke_width=2.5
    )
    anchor = "end" if x(peak) > left + width / 2 else "start"
    picture.text(
        x(peak + 0.5) + (6 if anchor == "start" else -6), y(below[peak]) - 7, said, "small", anchor
    )
    _phases(picture, edges, x, top + height)
    names = {"unsharded": "whole parameters", "gradients": "whole gradients"}
    names |= {"message": "messages", "rows": "rows of gradients"}
    shown = [(c, names[p]) for p, c in _PARTS if any(getattr(e, p) for e in edges)]
    picture.legend(left, top + height + 52, shown)
    return picture.svg()


def _phases(picture: Drawing, edges: list[Edge], x, bottom: float) -> None:
    """Under the curve, what the edges belong to."""
    phases, phase = [], "forward"
    for at, edge in enumerate(edges):
        if edge.edge == "begin" and edge.kind == "forward" and edge.unit == "root":
            phase = "forward"
        elif edge.edge == "begin" and edge.kind == "backward" and edge.unit == "root":
            phase = "backward"
        elif edge.kind == "optimizer" and edge.unit == "optimizer":
            phase = "optimizer"
        if not phases or phases[-1][0] != phase:
            phases.append((phase, at))
    ends = [start for _, start in phases[1:]] + [len(edges)]
    for (name, start), end in zip(phases, ends, strict=True):
        picture.line(
            [(x(start) + 1, bottom + 7), (x(end) - 1, bottom + 7)], "soft", stroke_width=1.5
        )
        if x(end) - x(start) > 40:
            picture.text((x(start) + x(end)) / 2, bottom + 22, name, "soft small", "middle")


@drawn_from(resharding)
def curve_resharding(per_rank: list[list[Edge]]) -> str:
    return _curve(per_rank[0], "Units reshard after forward (the default)")


@drawn_from(keeping)
def curve_keeping(per_rank: list[list[Edge]]) -> str:
    return _curve(per_rank[0], "reshard_after_forward=False: parameters stay whole until backward")


@drawn_from(accumulating)
def curve_accumulating(per_rank: list[list[Edge]]) -> str:
    return _curve(per_rank[0], "Two micro-batches, the first one not synchronised")


@drawn_from(stepping)
def curve_stepping(per_rank: list[list[Edge]]) -> str:
    return _curve(per_rank[0], "step_in_backward: rows of gradients are stepped on at once")


@drawn_from(sending)
def curve_sending(per_rank: list[list[Edge]]) -> str:
    return _curve(per_rank[0], "The default, with messages in buffers instead of shared memory")


@on(2)
def measured() -> list[tuple[str, int, int, int]]:
    """Of three ways: the formula, the engine's own figures, the profiler's; bytes."""
    found = []
    for name, in_backward in (("step after backward", False), ("`step_in_backward`", True)):
        ranks, root = 2, 4 * (2 * DIM + 2)
        root_whole = _aligned(4 * 2 * DIM) + _aligned(4 * 2)
        rows = 0 if in_backward else (BLOCKS - 1) * UNIT // ranks
        formula = 2 * UNIT + rows + root_whole + root
        own = max(edge.held for edge in _edges(in_backward=in_backward))
        found.append((name, formula, own, _profiled(in_backward)))
    return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def _profiled(in_backward: bool) -> int:
    """The most that torch's profiler saw at once in a third step above what was there before it."""
    model = shard(_model())
    optimizer = step_in_backward(model, _adamw) if in_backward else _adamw(list(model.parameters()))
    for step in range(3):
        tokens = batch(step, DIM)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            model(tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(nbytes for _, nbytes in changes))


@drawn_from(measured)
def formula(per_rank: list[list[tuple[str, int, int, int]]]) -> str:
    activations = BLOCKS * 3 * 4 * 2 * (DIM + HIDDEN)  # in and out of each linear, of three rows
    head = (
        "| | formula, bytes | the engine's own figures | the profiler sees that and activations |"
    )
    lines = [head, "|---|---:|---:|---|"]
    for name, wanted, own, profiled in per_rank[0]:
        agrees = "yes" if wanted <= profiled <= wanted + activations else f"no: {profiled:,}"
        lines.append(f"| {name} | {wanted:,} | {own:,} | {agrees} |")
    return "\n".join(lines)


@on(2)
def mapped() -> None:
    shard(Model())(batch())  # the first message makes the mailboxes
    print(f"{collectives.mapped_nbytes():,} bytes of shared memory mapped")


def table() -> str:
    """The peak by formula of the model of this page, on more ranks."""
    lines = ["| ranks | step after backward, KiB | `step_in_backward` | whole model's gradients |"]
    lines.append("|---:|---:|---:|---:|")
    for ranks in (2, 4, 8, 64):
        after = 2 * UNIT + (BLOCKS - 1) * UNIT / ranks
        whole = BLOCKS * UNIT
        lines.append(
            f"| {ranks} | {after / _KIB:,.0f} | {2 * UNIT / _KIB:,.0f} | {whole / _KIB:,.0f} |"
        )
    return "\n".join(lines)

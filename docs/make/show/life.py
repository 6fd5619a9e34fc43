"""Shown on the page about the life of a parameter."""

from __future__ import annotations

import sys

import torch
from torch.distributed.tensor import DTensor

from minifsdp import fully_shard
from minifsdp.collectives import use_collectives
from minifsdp.unit import State, Unit

from ..build import drawn_from
from ..markers import StaleError
from ..model import batch, build
from ..ranks import on
from ..svg import Drawing
from ..watch import Edge, watching

_DRIVERS = ("unshard", "wait_for_unshard", "reshard", "reshard_near", "adopt")


@on(4)
def transitions() -> list[tuple[str, str, str]]:
    """Every change of a unit's state in some training steps, and the method that made it."""
    seen: set[tuple[str, str, str]] = set()

    def noting(unit: Unit, name: str, value: object) -> None:
        before = getattr(unit, "state", None)
        if name == "state" and isinstance(before, State) and before is not value:
            frame = sys._getframe(1)
            while frame.f_code.co_name not in _DRIVERS:
                frame = frame.f_back
            seen.add((before.name, value.name, frame.f_code.co_name))
        object.__setattr__(unit, name, value)

    Unit.__setattr__ = noting
    try:
        with use_collectives("direct"):
            for setting in (None, 2):  # 2: after forward, rows of two neighbours
                model = build(reshard_after_forward=setting)
                for _ in range(2):
                    model(batch()).sum().backward()
                model.blocks[0].unshard(async_op=True)
                model.blocks[0].reshard()  # on its way, and not wanted any more
    finally:
        del Unit.__setattr__
    return sorted(seen)


_PLACES = {
    "SHARDED": (110, 128),
    "GATHERING": (330, 128),
    "UNSHARDED": (620, 128),
    "NEAR": (475, 240),
}
_SAYS = {
    "SHARDED": "rows only",
    "GATHERING": "a message is under way",
    "UNSHARDED": "whole",
    "NEAR": "rows of a few neighbours",
}
_PATHS = {  # (path, where its words are, their anchor)
    ("SHARDED", "GATHERING"): ("M 180 122 L 254 122", (217, 112), "middle"),
    ("GATHERING", "UNSHARDED"): ("M 406 122 L 544 122", (475, 112), "middle"),
    ("UNSHARDED", "SHARDED"): ("M 620 100 C 600 40 130 40 110 98", (365, 50), "middle"),
    ("GATHERING", "SHARDED"): ("M 270 152 C 245 178 195 178 170 153", (220, 188), "middle"),
    ("UNSHARDED", "NEAR"): ("M 635 154 C 635 215 605 235 556 238", (634, 216), "start"),
    ("NEAR", "GATHERING"): ("M 397 238 C 345 232 328 190 328 155", (326, 216), "end"),
    ("NEAR", "SHARDED"): ("M 397 250 C 250 270 130 230 112 154", (190, 250), "end"),
}


@drawn_from(transitions)
def states(per_rank: list[list[tuple[str, str, str]]]) -> str:
    """A unit's states, with the changes that were seen."""
    seen: dict[tuple[str, str], set[str]] = {}
    for before, after, method in {change for changes in per_rank for change in changes}:
        seen.setdefault((before, after), set()).add(f"{method}()")
    if unknown := set(seen) - set(_PATHS):
        raise StaleError(f"units now change their state in ways not drawn yet: {sorted(unknown)}")
    picture = Drawing(760, 290, "States of a unit")
    picture.text(24, 28, "States of a unit, as seen in training", "bold")
    for (before, after), methods in sorted(seen.items()):
        path, (x, y), anchor = _PATHS[before, after]
        picture.arrow(path)
        picture.text(x, y, ", ".join(sorted(methods)), "mono small", anchor)
    for name in sorted({name for change in seen for name in change}):
        x, y = _PLACES[name]
        colour = {"GATHERING": "gather", "UNSHARDED": "whole", "NEAR": "gather"}.get(name, "gone")
        picture.box(x - 76, y - 26, 152, 52, colour, rx=8, edge="soft")
        picture.text(x, y - 2, name, "bold", "middle")
        picture.text(x, y + 15, _SAYS[name], "small", "middle")
    return picture.svg()


@on(2)
def both_forms() -> None:
    model = build()
    up = model.blocks[1].up
    whole = []  # the whole parameter, which autograd keeps too

    def look(when: str) -> None:
        here = up.weight.to_local() if isinstance(up.weight, DTensor) else up.weight
        form = "rows" if isinstance(up.weight, DTensor) else "whole"
        nbytes = whole[0].untyped_storage().nbytes() if whole else 0
        print(f"{when:<16} {form:<5} {tuple(here.shape)}, and {nbytes} bytes for whole ones")

    up.register_forward_hook(lambda module, args, output: whole.append(module.weight))
    up.register_forward_hook(lambda *_: look("in forward"))
    up.register_full_backward_pre_hook(lambda *_: look("in backward"))
    look("before")
    output = model(batch())
    look("between the two")
    output.sum().backward()
    look("after")


@on(1)
def refilled() -> None:
    buffer = torch.zeros(4)
    param = torch.empty(0).set_(buffer.untyped_storage(), 0, (2, 2))
    view = buffer.view(2, 2)
    before = param._version, view._version
    buffer.copy_(torch.arange(4.0))  # what a gather does
    print("param:", param.tolist(), "changes counted:", param._version - before[0])
    print("view: ", view.tolist(), "changes counted:", view._version - before[1])


@on(2)
def one_units_step() -> list[Edge]:
    """What happens in a second step, with messages between peers."""
    with use_collectives("direct"):
        model = build()
        model(batch()).sum().backward()
        model.zero_grad()
        with watching(model) as watch:
            model(batch()).sum().backward()
    return watch.edges


_MEANS = {
    ("end", "prefetch"): "the unit before it asks for it: its message starts",
    ("end", "wait"): "it is needed: its message is waited for and copied out",
    ("end", "forward"): "its forward ends",
    ("end", "reshard"): "reshard",
    ("end", "backward"): "its backward ends: autograd has left whole gradients",
    ("end", "reduce"): "gradients go into a message, and are freed",
    ("end", "reduce_wait"): "the next unit waits for the sum",
    ("moved", "reduced"): "rows of the mean are handed out",
}


@drawn_from(one_units_step)
def story(per_rank: list[list[Edge]]) -> str:
    """The step of one block as a table."""
    lines = [
        "| what happens | state after it | whole parameters | whole gradients | message | rows |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for edge in per_rank[0]:
        if edge.unit != "blocks.1" or (edge.edge, edge.kind) not in _MEANS:
            continue
        held = edge.units["blocks.1"]
        message = held["gathering"] + held["reducing"]
        numbers = [held["unsharded"], held["gradients"], message, held["rows"]]
        cells = " | ".join(str(number or "") for number in numbers)
        state = edge.states["blocks.1"].lower()
        lines.append(f"| {_MEANS[edge.edge, edge.kind]} | {state} | {cells} |")
    return "\n".join(lines)


@on(2)
def gradient() -> None:
    model = build()
    model(batch()).sum().backward()
    grad = model.blocks[0].up.weight.grad
    print(type(grad).__name__, tuple(grad.shape), "of which here", tuple(grad.to_local().shape))


@on(2)
def optimizer_state() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(batch()).sum().backward()
    optimizer.step()
    weight = model.blocks[0].up.weight
    print("first moment, here:", tuple(optimizer.state[weight]["exp_avg"].to_local().shape))


@on(2)
def lost_edit() -> None:
    model = build()
    model.blocks[0].unshard()
    with torch.no_grad():
        model.blocks[0].up.weight.zero_()
    try:
        model.blocks[0].reshard()
    except RuntimeError as error:
        print(error)


@on(1)
def one_rank() -> None:
    layer = fully_shard(torch.nn.Linear(4, 3))
    shard_at = layer.weight.to_local().data_ptr()
    layer.unshard()
    print("the whole parameter lies where the shard lies:", layer.weight.data_ptr() == shard_at)


def unit_bytes() -> int:
    """A block's whole parameters, each at the start of a 64-byte line, on two ranks."""
    sizes = [
        -(-rows // 2) * 2 * row_numel * 4 for rows, row_numel in [(7, 4), (7, 1), (4, 7), (4, 1)]
    ]
    return sum(-(-size // 64) * 64 for size in sizes)

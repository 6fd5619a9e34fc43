"""Shown on the page about checkpoints."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from minifsdp import checkpoint, full_state_dict
from minifsdp.checkpoint import saving

from ..build import drawn_from
from ..model import Model, batch, build
from ..ranks import kept_folder, on
from ..svg import Drawing


def _state(model: Model, optimizer: torch.optim.Optimizer, step: int) -> dict:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "progress": {"step": step},
    }


def _trained(seed: int = 0) -> tuple[Model, torch.optim.Optimizer]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(batch(seed)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _listed(directory: Path) -> list[str]:
    """Folders and files in it, by name."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@on(2)
def saved() -> dict[str, list[str]]:
    """Two saves, the second of which keeps the last one only: what lies there, and when."""
    directory = kept_folder() / "checkpoints"
    model, optimizer = _trained()
    seen: dict[str, list[str]] = {}
    publish = saving.publish

    def noting(final: Path, keep_last: int | None) -> None:
        seen["while it is written"] = _listed(directory)
        publish(final, keep_last)

    saving.publish = noting
    try:
        whole = full_state_dict(model)
        if dist.get_rank() == 0:
            torch.save(whole, kept_folder() / "whole.pt")
        checkpoint.save(directory, 1, _state(model, optimizer, 1))
        dist.barrier()
        seen["one is there"] = _listed(directory)
        checkpoint.save(directory, 2, _state(model, optimizer, 2), keep_last=1)
        dist.barrier()
        seen["after the rename"] = _listed(directory)
    finally:
        saving.publish = publish
    return seen


_WHAT = {
    "__0_0.distcp": "rows of rank 0",
    "__1_0.distcp": "rows of rank 1",
    ".metadata": "which rows lie in which file",
    "values.json": "all that is not a tensor",
    "manifest.json": "sizes and hashes, written last",
}
_ORDER = list(_WHAT)


def _tree(names: list[str]) -> list[str]:
    """Folders, each followed by its files in the order they are written."""
    folders = sorted(
        (n for n in names if "/" not in n), key=lambda n: n.lstrip(".").partition("-")[2]
    )
    lines = []
    for folder in folders:
        files = [n.split("/")[1] for n in names if n.startswith(f"{folder}/")]
        lines += [f"{folder}/", *(f"  {file}" for file in sorted(files, key=_ORDER.index))]
    return lines


_GAP = 14


def _heights(lines: list[str], row: int) -> list[int]:
    """Of the box of each folder and the gap after it."""
    starts = [at for at, line in enumerate(lines) if not line.startswith(" ")]
    ends = [*starts[1:], len(lines)]
    return [row * (end - start) + 8 + _GAP for start, end in zip(starts, ends, strict=True)]


@drawn_from(saved)
def folders(per_rank: list[dict[str, list[str]]]) -> str:
    """The directory before and after the rename, side by side."""
    seen = per_rank[0]
    sides = [(when, _tree(seen[when])) for when in ("while it is written", "after the rename")]
    left, column, row, top = 34, 350, 21, 76
    tall = {when: _heights(lines, row) for when, lines in sides}
    height = top + max(sum(heights) for heights in tall.values()) + 20
    picture = Drawing(
        2 * column + 96, height, "The directory of a run's checkpoints, saving step 2"
    )
    picture.text(24, 28, "Saving step 2 with keep_last=1", "bold")
    for side, (when, lines) in enumerate(sides):
        x, y = left + side * (column + 36), top - row
        picture.text(x - 8, top - 14, when, "soft")
        heights = iter(tall[when])
        for line in lines:
            if line.startswith(" "):
                name = line.strip()
                y += row
                picture.text(x + 16, y + 15, name, "mono")
                picture.text(x + 138, y + 15, _WHAT[name], "soft small")
                continue
            hidden, box = line.startswith("."), next(heights)
            y = top if y < top else y + row + _GAP
            edge = "soft" if hidden else "rows"
            picture.box(x - 8, y - 2, column, box - _GAP, "gone", rx=6, edge=edge)
            picture.text(x, y + 15, line, "mono" if hidden else "mono bold")
            words = "latest() passes it over" if hidden else "latest() finds it"
            picture.text(x + column - 20, y + 15, words, "soft small", "end")
            if hidden:
                from_x, to_x, middle = x + column - 4, x + column + 22, y + box / 2
                turn = f"{from_x + 14} {middle}"
                end = f"{to_x} {top + 60}"
                picture.arrow(f"M {from_x} {middle} C {turn} {from_x + 6} {top + 60} {end}", "rows")
    return picture.svg()


@on(2)
def save_and_find() -> None:
    directory = kept_folder() / "mine"
    model, optimizer = _trained()
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "progress": {"step": 7, "seen_tokens": 5000},
    }
    checkpoint.save(directory, 7, state)
    print("latest:", checkpoint.latest(directory).name)


@drawn_from(saved)
def manifest(per_rank: list[dict[str, list[str]]]) -> str:
    """The manifest of the checkpoint that is left, without what a version of torch decides."""
    content = json.loads((kept_folder() / "checkpoints/step-00000002/manifest.json").read_text())
    content["torch"] = "..."
    for file in content["files"].values():
        file["bytes"], file["sha256"] = "...", "..."
    text = json.dumps(content, indent=2).replace('"..."', "...")
    for name in content["files"]:  # a line each
        text = text.replace(
            f'"{name}": {{\n      "bytes": ...,\n      "sha256": ...\n    }}',
            f'"{name}": {{"bytes": ..., "sha256": ...}}',
        )
    return f"```text\n{text}\n```"


@drawn_from(saved)
def values(per_rank: list[dict[str, list[str]]]) -> str:
    """What of the state is no tensor, and where a tensor stood."""
    content = json.loads((kept_folder() / "checkpoints/step-00000002/values.json").read_text())
    shown = {
        "model": {"blocks.0.up.weight": content["model"]["blocks.0.up.weight"], "...": "..."},
        "progress": content["progress"],
    }
    return f"```json\n{json.dumps(shown, indent=2)}\n```"


class _Noting(pickle.Unpickler):
    """Notes the classes that a pickle names."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.named: set[str] = set()

    def find_class(self, module: str, name: str) -> object:
        self.named.add(f"{module}.{name}")
        return super().find_class(module, name)


@drawn_from(saved)
def classes(per_rank: list[dict[str, list[str]]]) -> str:
    """What of torch's checkpoints the pickle of one names."""
    with (kept_folder() / "checkpoints/step-00000002/.metadata").open("rb") as file:
        noting = _Noting(file)
        noting.load()  # our own, just written
    prefix = "torch.distributed.checkpoint."
    return "\n".join(f"- `{name}`" for name in sorted(noting.named) if name.startswith(prefix))


@on(3)
def on_three() -> None:
    model, optimizer = _trained(seed=5)  # other weights; they will be replaced
    state = _state(model, optimizer, 0)
    path = checkpoint.load(kept_folder() / "checkpoints", state)  # saved by two ranks
    print(f"{path.name}, step {state['progress']['step']}:", tuple(here(model).shape), "rows here")


@on(3)
def same_values() -> None:
    model, optimizer = _trained(seed=5)
    state = _state(model, optimizer, 0)
    checkpoint.load(kept_folder() / "checkpoints", state)
    before = torch.load(kept_folder() / "whole.pt")  # as the two ranks had it
    after = full_state_dict(model, rank0_only=False)
    equal = sum(torch.equal(before[name], after[name]) for name in before)
    print(f"{equal} of {len(before)} parameters have the bits that two ranks saved")


def here(model: Model) -> torch.Tensor:
    """This rank's rows of one parameter."""
    return model.blocks[0].up.weight.to_local()


@on(2)
def damaged() -> None:
    directory = kept_folder() / "damaged"
    model, optimizer = _trained()
    for step in (1, 2):
        checkpoint.save(directory, step, _state(model, optimizer, step))
    dist.barrier()
    if dist.get_rank() == 0:  # one bit of one file of the newest
        file = directory / "step-00000002" / "__1_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    dist.barrier()
    state = _state(model, optimizer, 0)
    path = checkpoint.load(directory, state, on_damaged=lambda error: print(error.reason))
    print("read instead:", path.name)


@on(2)
def behind() -> None:
    directory = kept_folder() / "behind"
    model, optimizer = _trained()
    before = model.head.weight.full_tensor().clone()
    checkpoint.save(directory, 1, _state(model, optimizer, 1), asynchronous=True)
    with torch.no_grad():
        model.head.weight.to_local().zero_()  # training goes on
    checkpoint.wait()
    checkpoint.load(directory, state := _state(model, optimizer, 0))
    print(
        "the state at the save:", torch.equal(state["model"]["head.weight"].full_tensor(), before)
    )

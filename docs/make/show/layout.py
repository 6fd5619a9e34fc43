"""Shown on the page about layout."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import fully_shard
from minifsdp.hooks import unit_of
from minifsdp.layout import PieceLayout, RowLayout

from ..build import drawn_from
from ..model import Block, Model, build, shard
from ..ranks import on
from ..svg import Drawing

_RANKS = 3


def parameters() -> int:
    return sum(p.numel() for p in Model().parameters())


def block_parameters() -> int:
    return sum(p.numel() for p in Block(4, 7).parameters())


def shares() -> str:
    """What a rank keeps of a model with 7 billion parameters, at 16 bytes each."""
    count, lines = 6_738_415_616, ["| ranks | replicated, GiB a rank | sharded, GiB a rank |"]
    lines.append("|---:|---:|---:|")
    for ranks in (1, 2, 4, 8, 16):
        whole = 16 * count / 2**30
        lines.append(f"| {ranks} | {whole:.1f} | {whole / ranks:.1f} |")
    return "\n".join(lines)


@on(3)
def rows_here() -> None:
    model = build()
    for name, param in model.blocks[0].named_parameters():
        here = param.to_local()
        print(
            f"{name:<11} {tuple(param.shape)!s:<6} {param.placements[0]}, here {tuple(here.shape)}"
        )


def rows_by_rank() -> str:
    lines = ["| rows | on 2 ranks | on 3 | on 4 |", "|---:|---|---|---|"]
    for rows in (7, 4, 2, 1):
        counts = []
        for ranks in (2, 3, 4):
            layout = RowLayout(rows, 1, ranks)
            counts.append(", ".join(str(len(layout.rows_of(rank))) for rank in range(ranks)))
        lines.append(f"| {rows} | {' | '.join(counts)} |")
    return "\n".join(lines)


@on(3)
def chunk() -> None:
    model = build()
    weight = model.blocks[0].up.weight
    whole = weight.full_tensor()
    mine = whole.chunk(3)[dist.get_rank()]
    print("torch.chunk's rows, bit for bit:", torch.equal(mine, weight.to_local()))


def _numbered() -> Model:
    """The guide's model, each element the number of its row, a hundred more for each parameter."""
    model = Model()
    with torch.no_grad():
        for block in model.blocks:
            for index, param in enumerate(block.parameters()):
                rows = torch.arange(param.shape[0], dtype=torch.float32)
                param.copy_((rows + 100 * (index + 1)).view(-1, *[1] * (param.ndim - 1)))
    return model


@on(3)
def flat_shard() -> None:
    model = shard(_numbered())  # up.weight holds 100, 101 ..., up.bias 200 ..., by row
    flat = unit_of(model.blocks[0]).rows()[0]
    print(*(int(value) for value in flat.tolist()))


@on(3)
def own_rows() -> None:
    layer = nn.Linear(1, 3, bias=False)
    nn.init.constant_(layer.weight, 10.0 * dist.get_rank())  # another value on each rank
    fully_shard(layer)
    print(layer.weight.full_tensor().flatten().tolist())


@on(3)
def held() -> dict[str, tuple[tuple[int, ...], list[int]]]:
    """Of each parameter of a block its shape and, by the engine's tensors, this rank's rows."""
    model = shard(_numbered())
    found = {}
    for index, (name, param) in enumerate(model.blocks[0].named_parameters()):
        local = param.to_local()
        first = local if local.ndim == 1 else local[:, 0]
        rows = [int(value) - 100 * (index + 1) for value in first.tolist()]
        found[name] = (tuple(param.shape), rows)
    return found


@drawn_from(held)
def rows(per_rank: list[dict]) -> str:
    """The parameters of a block, their rows in the colour of the rank that keeps them."""
    cell, gap, top = 19, 48, 62
    names = list(per_rank[0])
    width = 40
    columns = {}
    for name in names:
        shape = per_rank[0][name][0]
        wide = cell * (shape[1] if len(shape) > 1 else 1)
        columns[name] = (width, wide)
        width += max(wide, 62) + gap
    picture = Drawing(width - 12, 262, "Rows of a block's parameters by the rank that keeps them")
    picture.text(24, 28, "One block on three ranks: who keeps which row", "bold")
    for name in names:
        x, wide = columns[name]
        shape = per_rank[0][name][0]
        picture.text(x, top - 8, name, "mono small")
        for rank, found in enumerate(per_rank):
            for row in found[name][1]:
                for at in range(wide // cell):
                    picture.box(
                        x + at * cell,
                        top + row * cell,
                        cell - 1.5,
                        cell - 1.5,
                        f"rank{rank}",
                        f"{name}, row {row}: rank {rank}",
                        rx=2,
                    )
        for row in range(shape[0]):
            picture.text(x - 8, top + row * cell + 13, str(row), "soft small", "end")
        counts = " + ".join(str(len(found[name][1])) for found in per_rank)
        picture.text(x, top + 7 * cell + 20, f"{counts} rows", "soft small")
    picture.legend(24, 242, [(f"rank{rank}", f"rank {rank}") for rank in range(len(per_rank))])
    return picture.svg()


@on(3)
def pieces() -> dict[str, list]:
    """Slots of a block's message, and how much of each this rank fills."""
    model = build()
    unit = unit_of(model.blocks[0])
    piece = PieceLayout.of([param.layout for param in unit.params])
    return {
        "names": [param.name for param in unit.params],
        "offsets": list(piece.offsets),
        "slots": list(piece.slots),
        "filled": [param.rows_numel for param in unit.params],
        "numel": [piece.numel],
    }


@drawn_from(pieces)
def message(per_rank: list[dict]) -> str:
    """The message of a block: a piece from each rank, slots of equal size, padding."""
    scale, left, top, height = 21.0, 84, 66, 34
    numel = per_rank[0]["numel"][0]
    picture = Drawing(left + numel * scale + 28, 262, "The message of one block on three ranks")
    title = f"The message of one block: {len(per_rank)} pieces of {numel} elements"
    picture.text(24, 28, title, "bold")
    for name, start, slot in zip(
        *(per_rank[0][k] for k in ("names", "offsets", "slots")), strict=True
    ):
        label = name if slot * scale > 70 else name.replace(".", ".\u200b")
        picture.text(left + (start + slot / 2) * scale, top - 10, label, "mono small", "middle")
    for rank, found in enumerate(per_rank):
        y = top + rank * (height + 8)
        picture.text(left - 12, y + 21, f"rank {rank}", "soft", "end")
        for name, start, slot, filled in zip(
            *(found[k] for k in ("names", "offsets", "slots", "filled")), strict=True
        ):
            x = left + start * scale
            if filled < slot:
                picture.hatch(x + filled * scale, y, (slot - filled) * scale - 1.5, height, "soft")
            if filled:
                hint = f"{name} of rank {rank}: {filled} of {slot} elements"
                picture.box(x, y, filled * scale - 1.5, height, f"rank{rank}", hint, rx=2)
                picture.text(x + filled * scale / 2, y + 21, str(filled), "on", "middle")
    y = top + len(per_rank) * (height + 8) + 10
    for start in [*per_rank[0]["offsets"], numel]:
        picture.line([(left + start * scale - 0.8, y - 6), (left + start * scale - 0.8, y)], "soft")
        picture.text(left + start * scale - 0.8, y + 13, str(start), "soft small", "middle")
    picture.legend(left, y + 40, [("rank0", "rows"), ("/soft", "padding, zeros")])
    return picture.svg()


def padding() -> str:
    """What padding costs a block at several numbers of ranks, here and at Llama's sizes."""
    lines = [
        "| parameters | ranks | elements in a message | of them padding |",
        "|---|---:|---:|---:|",
    ]
    small = [(7, 4), (7, 1), (4, 7), (4, 1)]
    large = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008), (4096, 1), (4096, 1)]
    for name, shapes in (("a block of the guide's model", small), ("a block of Llama 2 7B", large)):
        for ranks in (2, 3, 8):
            layouts = [RowLayout(rows, numel, ranks) for rows, numel in shapes]
            sent = sum(layout.padded_numel for layout in layouts)
            kept = sum(layout.numel for layout in layouts)
            lines.append(
                f"| {name} | {ranks} | {sent:,} | {sent - kept:,} ({1 - kept / sent:.2%}) |"
            )
    return "\n".join(lines)


def piece_numel() -> int:
    return PieceLayout.of(
        [RowLayout(r, n, _RANKS) for r, n in [(7, 4), (7, 1), (4, 7), (4, 1)]]
    ).numel

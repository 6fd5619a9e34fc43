"""The parity matrix: which settings meet, and the command that runs them and prints the table.

python tests/parity_matrix.py             each pair of settings meets at least once
python tests/parity_matrix.py --strength 3     each three settings (hours)
python tests/parity_matrix.py --all       every combination (days; --part I/N for a share)
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import NamedTuple

from parity import Case

AXES: dict[str, list[str]] = {
    "world_size": ["1", "2", "3", "4"],
    "precision": ["fp32", "bf16/fp32", "bf16", "fp16", "fp32/bf16"],
    "accumulation": ["plain", "synced", "unsynced", "mixed"],
    "reshard": ["auto", "True", "False", "int"],
    "clip": ["none", "clip"],
    "offload": ["none", "offload"],
    "checkpointing": ["none", "inside", "inside reentrant", "outside", "outside reentrant"],
    "parameters": [
        "all",
        "some frozen",
        "frozen, then not",
        "tied",
        "module used twice",
        "module unused",
        "unused on a rank",
    ],
    "mesh": ["1-D", "HSDP"],
    "rows": ["uneven", "few"],
    "collectives": ["shared", "direct", "backend"],
}
# Pairs that cannot meet, and why. Upstream's defects have tests of their own.
IMPOSSIBLE: list[tuple[dict[str, set[str]], str]] = [
    (
        {"reshard": {"int"}, "world_size": {"1", "2", "3"}},
        "an int needs a divisor of the ranks other than 1 and all of them",
    ),
    ({"mesh": {"HSDP"}, "world_size": {"1", "2", "3"}}, "2 x 2 needs four ranks"),
    ({"mesh": {"HSDP"}, "reshard": {"int"}}, "two shard ranks have no such divisor"),
    (
        {"parameters": {"unused on a rank"}, "world_size": {"1"}},
        "one rank cannot differ from the others",
    ),
    (
        {"parameters": {"module used twice"}, "checkpointing": {"outside reentrant"}},
        "upstream is wrong: it loses the gradient of one of the two uses",
    ),
    (
        {"parameters": {"module unused"}, "accumulation": {"unsynced", "mixed"}},
        "upstream fails: AttributeError for a unit that never ran",
    ),
    (
        {
            "parameters": {"unused on a rank"},
            "accumulation": {"unsynced", "mixed"},
            "precision": {"bf16/fp32", "fp32/bf16"},
        },
        "upstream fails: gradients of two dtypes in one unit",
    ),
]


class Cell(NamedTuple):
    """One cell of the matrix."""

    world_size: int
    case: Case


Setting = tuple[str, str]


def impossible(settings: dict[str, str]) -> str | None:
    """Why settings cannot meet, if they cannot."""
    for rule, why in IMPOSSIBLE:
        if all(settings.get(axis) in values for axis, values in rule.items()):
            return why
    return None


def wanted(strength: int) -> Iterator[tuple[Setting, ...]]:
    """Every combination of `strength` settings of different axes that can meet."""
    for axes in itertools.combinations(AXES, strength):
        for values in itertools.product(*(AXES[a] for a in axes)):
            settings = tuple(zip(axes, values, strict=True))
            if impossible(dict(settings)) is None:
                yield settings


def cover(strength: int, tries: int = 60) -> list[Cell]:
    """Few cells in which all combinations of `strength` settings meet; the same list every time."""
    chance = random.Random(0)
    missing = dict.fromkeys(wanted(strength))
    cells: list[dict[str, str]] = []
    while missing:
        seed = dict(next(iter(missing)))
        best, gain = None, -1
        for _ in range(tries):
            settings = {a: seed.get(a) or chance.choice(v) for a, v in AXES.items()}
            if impossible(settings) is not None:
                continue
            meets = itertools.combinations(settings.items(), strength)
            new = sum(1 for m in meets if m in missing)
            if new > gain:
                best, gain = settings, new
        if best is None:
            continue
        for met in itertools.combinations(best.items(), strength):
            missing.pop(met, None)
        cells.append(best)
    return [_cell(settings) for settings in cells]


def everything() -> Iterator[Cell]:
    """Every combination of all settings."""
    for values in itertools.product(*AXES.values()):
        settings = dict(zip(AXES, values, strict=True))
        if impossible(settings) is None:
            yield _cell(settings)


def _cell(settings: dict[str, str]) -> Cell:
    rest = {axis: value for axis, value in settings.items() if axis != "world_size"}
    return Cell(int(settings["world_size"]), Case(**rest))


def table(results: dict[Cell, list[str]]) -> str:
    """Cells that were equal in every bit, of those run, by setting and world size, as Markdown."""
    sizes = AXES["world_size"]
    lines = ["| setting | " + " | ".join(f"W={w}" for w in sizes) + " |"]
    lines.append("|---|" + "---|" * len(sizes))
    for axis, values in AXES.items():
        if axis == "world_size":
            continue
        for value in values:
            row = []
            for size in sizes:
                cells = [
                    found
                    for cell, found in results.items()
                    if cell.world_size == int(size) and asdict(cell.case)[axis] == value
                ]
                equal = sum(not found for found in cells)
                row.append(f"{equal}/{len(cells)}" if cells else "-")
            lines.append(f"| {axis}: {value} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> int:
    """Run a matrix in pools of real processes; 0 if every cell is equal."""
    from pool import Pool, RanksFailed

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strength", type=int, default=2, help="settings that must meet (2)")
    parser.add_argument("--all", action="store_true", help="every combination")
    parser.add_argument("--part", default="1/1", help="run share I of N of the cells, as I/N")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    cells = list(everything()) if args.all else cover(args.strength)
    cells = sorted(cells[part - 1 :: parts], key=lambda cell: cell.world_size)
    from parity import differences

    started, pool, results = time.monotonic(), None, {}
    for number, cell in enumerate(cells, start=1):
        if pool is None or pool.world_size != cell.world_size or not pool.alive:
            if pool is not None:
                pool.stop()
            pool = Pool(cell.world_size)
        try:
            found = sorted({name for names in pool.run(differences, cell.case) for name in names})
        except RanksFailed as error:
            found = [str(error)]
        results[cell] = found
        if found:
            first = found[0].strip().splitlines()
            print(f"W={cell.world_size} {cell.case}: {len(found)} differ: {first[0]} {first[-1]}")
        print(f"\r{number}/{len(cells)}", end="", file=sys.stderr, flush=True)
    if pool is not None:
        pool.stop()
    print(f"\n\n{table(results)}\n")
    met = {m for c in cells for m in itertools.combinations(_settings(c).items(), 2)}
    pairs = set(wanted(2))
    print(f"{len(cells)} cells, {len(met & pairs)} of {len(pairs)} possible pairs of settings met")
    print("skipped:", "; ".join(f"{_rule(rule)}: {why}" for rule, why in IMPOSSIBLE))
    bad = sum(bool(found) for found in results.values())
    print(f"{len(cells) - bad} equal in every bit, {bad} not, {time.monotonic() - started:.0f} s")
    return 1 if bad else 0


def _settings(cell: Cell) -> dict[str, str]:
    return {"world_size": str(cell.world_size), **asdict(cell.case)}


def _rule(rule: dict[str, set[str]]) -> str:
    return " with ".join(f"{axis} {'/'.join(sorted(values))}" for axis, values in rule.items())


if __name__ == "__main__":
    sys.exit(main())

"""Reports as Markdown tables: one for each work and setting, a row an engine."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_NEEDED = ("machine", "torch", "world_size", "work", "seed", "rounds", "engines", "skipped")


class Column(NamedTuple):
    """One figure: its heading, its key in a row of the report, how to write it."""

    heading: str
    key: str
    write: Callable[[float], str]
    each: bool = False
    """Show every run's figure before their median."""


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.1f}"


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:.1f}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


COLUMNS = (
    Column("wall / better FSDP", "ratio_to_upstream", _ratio, each=True),
    Column("wall / none", "ratio_to_none", _ratio, each=True),
    Column("step ms", "step_seconds", _milliseconds),
    Column("forward", "forward_seconds", _milliseconds),
    Column("backward", "backward_seconds", _milliseconds),
    Column("optimizer", "optimizer_seconds", _milliseconds),
    Column("exposed ms", "exposed_seconds", _milliseconds),
    Column("CPU ms, all ranks", "cpu_seconds", _milliseconds),
    Column("peak above shards, MiB", "peak_above_shards_bytes", _mebibytes),
    Column("peak / better FSDP", "peak_ratio_to_upstream", _ratio),
    Column("allocations", "allocations", _count),
    Column("refills", "refills", _count),
    Column("aten ops", "aten_ops", _count),
    Column("Python calls", "python_calls", _count),
    Column("messages", "messages", _count),
    Column("message MiB", "message_bytes", _mebibytes),
    Column("MiB sent, all ranks", "sent_bytes", _mebibytes),
)


def read_reports(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """What `--json` wrote; ValueError names a file that is something else."""
    reports = []
    for path in paths:
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: not JSON: {error}") from None
        missing = [k for k in _NEEDED if k not in report] if isinstance(report, dict) else _NEEDED
        if missing:
            raise ValueError(
                f"{path}: not a report of benchmarks.step, which has {', '.join(missing)}: "
                "pass files that --json wrote"
            )
        reports.append(report)
    return reports


def table(reports: Sequence[dict[str, Any]]) -> str:
    """A Markdown table for each work and setting among `reports`, whose other runs are repeats."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for report in reports:
        groups.setdefault(_setting(report), []).append(report)
    return "\n\n".join(_group(runs) for runs in groups.values())


def summary(reports: Sequence[dict[str, Any]]) -> str:
    """Two tables for all `reports`: wall ratios, a row for each work and world size; and peaks.

    A cell is the median over runs of the ratio to the better of FSDP1 and FSDP2 in the same run.
    """
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for report in sorted(reports, key=lambda r: (r["work"]["dim"] * r["work"]["seq"], _ranks(r))):
        groups.setdefault((_shape(report["work"]), report["world_size"]), []).append(report)
    timed = {key: runs for key, runs in groups.items() if _medians(runs, "ratio_to_upstream")}
    names = _in_order(name for runs in timed.values() for r in runs for name in r["engines"])
    lines = [
        "| work | ranks | runs | " + " | ".join(names) + " | minifsdp-shared / none |",
        "|---|---:|---:|" + "---:|" * (len(names) + 1),
    ]
    for (shape, ranks), runs in timed.items():
        ratios = _medians(runs, "ratio_to_upstream")
        cells = [_ratio(ratios[name]) if name in ratios else "" for name in names]
        limit = _medians(runs, "ratio_to_none").get("minifsdp-shared")
        cells.append("" if limit is None else _ratio(limit))
        lines.append(f"| {shape} | {ranks} | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *_peaks(groups)])


def _peaks(groups: dict[tuple[str, int], list[dict[str, Any]]]) -> Iterator[str]:
    for (shape, ranks), runs in groups.items():
        peaks = _medians(runs, "peak_above_shards_bytes")
        if not peaks:
            continue
        upstream = [name for name in ("fsdp2", "fsdp1") if name in peaks]
        yield (
            f"\n| {shape}, {ranks} ranks | peak above the shards, MiB | "
            + " | ".join(f"/ {name}" for name in upstream)
            + " |"
        )
        yield "|---|---:|" + "---:|" * len(upstream)
        for name in _in_order(peaks):
            ratios = " | ".join(_ratio(peaks[name] / peaks[other]) for other in upstream)
            yield f"| {name} | {_mebibytes(peaks[name])} | {ratios} |"


def _ranks(report: dict[str, Any]) -> int:
    return report["world_size"]


def _in_order(names: Iterable[str]) -> list[str]:
    """Each name once: ours, upstream's, others', the limit."""
    groups = ("minifsdp-shared", "minifsdp", "fsdp", "ddp", "deepspeed", "none")
    return sorted(set(names), key=lambda n: (next(i for i, g in enumerate(groups) if g in n), n))


def _medians(runs: Sequence[dict[str, Any]], key: str) -> dict[str, float]:
    """The median of a figure over runs, for each engine that has it."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for name, row in run["engines"].items():
            if row.get(key) is not None:
                found.setdefault(name, []).append(row[key])
    return {name: statistics.median(values) for name, values in found.items()}


def _shape(work: dict[str, Any]) -> str:
    return f"dim {work['dim']}, {work['n_layers']} layers, {work['batch']} x {work['seq']} tokens"


def _setting(report: dict[str, Any]) -> tuple[Any, ...]:
    settings = [report.get(key) for key in ("torch", "device", "world_size", "offload")]
    return (json.dumps([report["work"], report["machine"]]), *settings)


def _group(runs: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run["engines"]))
    rows = {name: [r["engines"][name] for r in runs if name in r["engines"]] for name in names}
    shown = [
        column
        for column in COLUMNS
        if any(row.get(column.key) is not None for found in rows.values() for row in found)
    ]
    lines = [
        _caption(runs),
        "",
        "| engine | " + " | ".join(column.heading for column in shown) + " |",
        "|---|" + "---:|" * len(shown),
    ]
    for name, found in rows.items():
        lines.append(f"| {name} | " + " | ".join(_cell(column, found) for column in shown) + " |")
    notes = [*_settings_notes(rows), *_loss_notes(rows), *_skipped_notes(runs)]
    return "\n".join([*lines, *([""] if notes else []), *(f"- {note}" for note in notes)])


def _caption(runs: list[dict[str, Any]]) -> str:
    first = runs[0]
    work, machine = first["work"], first["machine"]
    hardware = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
    seeds = ", ".join(str(run["seed"]) for run in runs)
    return (
        f"**{work['name']}**: dim {work['dim']}, {work['n_layers']} layers, {work['batch']} x "
        f"{work['seq']} tokens, {work['parameters']:,} parameters; {first['world_size']} ranks"
        + (", CPU offload" if first.get("offload") else "")
        + f", {first.get('backend')}, float32; torch {first['torch']}, {hardware}; seeds {seeds}, "
        f"{first['rounds']} rounds each."
    )


def _cell(column: Column, rows: list[dict[str, Any]]) -> str:
    values = [row[column.key] for row in rows if row.get(column.key) is not None]
    if not values:
        return ""
    middle = column.write(statistics.median(values))
    if not column.each or len(values) == 1:
        return middle
    return " ".join(column.write(value) for value in values) + f" → **{middle}**"


def _settings_notes(rows: dict[str, list[dict[str, Any]]]) -> list[str]:
    notes = []
    for name, found in rows.items():
        settings = [row["settings"] for row in found if row.get("settings")]
        written = {", ".join(f"{k}={v}" for k, v in one.items()) for one in settings}
        if written:
            notes.append(f"{name}: {'; or '.join(sorted(written))}")
    return notes


def _loss_notes(rows: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Which losses were equal to the bit throughout, and where the others first differ."""
    equal, differing, reference = [], [], None
    for name, found in rows.items():
        compared = [row for row in found if row.get("loss_differs_from")]
        if not compared:
            continue
        reference = compared[0]["loss_differs_from"]
        steps = [row["loss_first_difference"] for row in compared]
        steps = [step for step in steps if step is not None]
        if steps:
            differing.append(f"{name} from step {min(steps)}")
        elif name != reference:
            equal.append(name)
    notes = []
    if equal:
        notes.append(f"losses equal to {reference}'s to the bit in every step: {', '.join(equal)}")
    if differing:
        notes.append(f"losses that leave {reference}'s: {', '.join(differing)}")
    return notes


def _skipped_notes(runs: list[dict[str, Any]]) -> list[str]:
    skipped = {name: reason for run in runs for name, reason in run["skipped"].items()}
    return [f"skipped: {name}: {reason}" for name, reason in skipped.items()]

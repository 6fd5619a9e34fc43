"""A plan as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from .machines import FRAGMENTATION, GIB, HOST_RESERVE_BYTES, LINK_EFFICIENCY, RESERVE_BYTES

if TYPE_CHECKING:
    from .books import Peak
    from .remedies import Remedy
    from .report import Report

_NOT_SEEN = (
    "not seen: memory of libraries beyond the reserve, kernels' own beyond minifsdp/plan/workspaces"
    ".py, launch overhead, ranks that differ, data loading, evaluation and checkpoints"
)


def text(report: Report) -> str:
    """The report, a line for each figure, and what was tried to make it fit."""
    tried = [remedy_line(remedy) for remedy in report.remedies]
    return "\n".join([plan_text(report), *around(report, tried)])


def plan_text(report: Report) -> str:
    """The report without what was tried to make it fit."""
    gpu, timing, rehearsal = report.cluster.gpu, report.timing, report.rehearsal
    nodes = -(-report.world_size // report.cluster.gpus_per_node)
    lines = [
        f"{rehearsal.parameters:,} parameters ({rehearsal.trained:,} trained) on "
        f"{report.world_size} x {gpu.description}, {counted(nodes, 'node')}; {rehearsal.tokens:,} "
        "tokens a rank and step",
        *verdict(report),
        "",
        *peak_lines("device", report.device),
    ]
    if report.host is not None:
        lines += peak_lines("host, a rank", report.host)
    if rehearsal.messages:
        lines += ["", "messages a step (bytes of all ranks' pieces together)"]
        lines += [
            f"  {kind:15} {volume.count:5}  {volume.nbytes / 1e9:10.2f} GB"
            for kind, volume in rehearsal.messages.items()
        ]
    if flops := rehearsal.flops_by_operator():
        lines += ["", "arithmetic a step and rank"]
        lines += [f"  {name:50} {n / 1e12:10.2f} TFLOP" for name, n in flops.items()]
    lines += [
        "",
        f"a step takes {duration(timing.seconds)}: computing {duration(timing.compute)}, messages "
        f"{duration(timing.messages)} (waited for: {duration(timing.exposed)}), PCIe "
        f"{duration(timing.pcie)}, host {duration(timing.host)}",
        "  "
        + ", ".join(
            f"{name} {duration(s)}"
            for name, s in timing.by_phase.items()
            if s >= 0.001 * timing.seconds
        ),
        f"  at {gpu.efficiency:.0%} of {gpu.timed_as or gpu.name}'s peaks ({gpu.half_tflops:g} "
        f"TFLOP/s half, {gpu.single_tflops:g} single, {gpu.memory_gb_s:g} GB/s) and "
        f"{LINK_EFFICIENCY:.0%} of its links ({gpu.peer_gb_s:g} GB/s in a node, "
        f"{report.cluster.network_gb_s:g} a node, {gpu.pcie_gb_s:g} PCIe)",
        f"{report.tokens_per_second:,.0f} tokens/s, "
        f"{report.tokens_per_second / report.world_size:,.0f} a GPU, MFU {report.mfu:.1%} "
        "((6 N tokens + 12 L d T^2 a sequence) / seconds / peak)",
    ]
    if report.hours is not None:
        cost = "" if report.cost is None else f", cost {brief(report.cost)}"
        steps = counted(report.settings.steps or 0, "step")
        lines.append(f"{steps}: {brief(report.hours)} hours{cost}")
    return "\n".join([*lines, "", _NOT_SEEN])


def verdict(report: Report) -> list[str]:
    """Whether it fits, on the device and on the host."""
    gpu, device = report.cluster.gpu, report.device
    word = "fits" if report.fits else "DOES NOT FIT"
    lines = [
        f"{word}: at most {gib(device.nbytes)} of {gib(gpu.usable_bytes)} GiB usable "
        f"({gib(gpu.memory_bytes)} less {gib(RESERVE_BYTES)} for context, NCCL and cuBLAS, and "
        f"{FRAGMENTATION:.0%} for fragmentation)"
    ]
    if report.host is not None:
        given = report.settings.host_memory_gib
        needs = f"each node needs {gib(report.host_node_bytes)} GiB of host memory"
        if given is None:
            ending = ""
        elif report.fits_host:
            ending = f", of {given:,g} GiB"
        else:
            ending = f", and has {given:,g} GiB: too little"
        ranks = counted(report.cluster.gpus_per_node, "rank")
        lines.append(
            f"{needs} ({ranks}, each {gib(report.host.nbytes)} and "
            f"{gib(HOST_RESERVE_BYTES)} for its process){ending}"
        )
    return lines


def remedy_line(remedy: Remedy) -> str:
    """What changes come to."""
    host = f"  (host: {gib(remedy.host_node_bytes)} GiB a node)" if remedy.host_node_bytes else ""
    alters = "  (learns something else)" if remedy.alters else ""
    return (
        f"  {'fits   ' if remedy.fits else 'too big'}  {gib(remedy.peak_bytes):>7} GiB  "
        f"{remedy.tokens_per_second / remedy.world_size:6,.0f} tokens/s a GPU  "
        f"{' + '.join(remedy.names)}{host}{alters}"
    )


def around(report: Report, tried: Iterable[str]) -> Iterator[str]:
    """The lines of what was tried, between what introduces them and what became of the others."""
    search = report.search
    if search is None:
        return
    yield "\nchanges that were planned"
    yield from tried
    fitting = [remedy for remedy in report.remedies if remedy.fits]
    plans = counted(len(search.tried), "plan")
    if fitting:
        best = fitting[0]
        names = " + ".join(best.names)
        price = f"{brief(1e6 * best.cost[2] / 3600)} GPU hours for a million tokens"
        yield f"  of {plans}, the cheapest that fits: {names} ({price})"
    else:
        yield f"  of {plans}, none fits"
    alone = [name for name in search.cannot_be_enough if " + " not in name]
    if alone:
        yield f"  cannot be enough, by what they do not make smaller: {', '.join(alone)}"
    for reason in search.refused:
        yield f"  cannot be planned: {reason}"
    if search.not_tried:
        seconds = report.settings.remedy_seconds
        yield f"  not tried, after {seconds:g} s: {', '.join(search.not_tried)}"


def peak_lines(where: str, peak: Peak) -> list[str]:
    """What is held at the peak, and each category's own."""
    at = f"{peak.phase} of {peak.unit}" if peak.unit else peak.phase
    lines = [f"{where}: {gib(peak.nbytes)} GiB in {at}", f"  {'':18} {'then':>9} {'at most':>9}"]
    for category, most in sorted(peak.own_peaks.items(), key=lambda item: -item[1]):
        if most:
            then = peak.by_category.get(category, 0)
            lines.append(f"  {category.value:18} {gib(then):>9} {gib(most):>9}")
    return lines


def gib(nbytes: float) -> str:
    """Bytes in GiB; small ones with more digits."""
    value = nbytes / GIB
    if value >= 0.1 or not value:
        return f"{value:,.2f}"
    return f"{value:.4f}" if value >= 5e-5 else "<0.0001"


def duration(seconds: float) -> str:
    """Seconds, in a unit that leaves something to read."""
    if seconds >= 0.1 or not seconds:
        return f"{seconds:,.2f} s" if seconds else "0"
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-4 else f"{1e6 * seconds:.2f} us"


def brief(number: float) -> str:
    """A number, to three digits if it is small."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def counted(number: int, name: str) -> str:
    """So many of what `name` is one of."""
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"

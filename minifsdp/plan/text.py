"""A plan as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .machines import FRAGMENTATION, GIB, LINK_EFFICIENCY, RESERVE_BYTES

if TYPE_CHECKING:
    from .books import Peak
    from .report import Report

_NOT_SEEN = (
    "not seen: memory of libraries beyond the reserve, kernels' own beyond minifsdp/plan/workspaces"
    ".py, launch overhead, ranks that differ, data loading, evaluation and checkpoints"
)


def text(report: Report) -> str:
    """The report, a line for each figure."""
    gpu, timing, rehearsal = report.cluster.gpu, report.timing, report.rehearsal
    device = report.device
    nodes = -(-report.world_size // report.cluster.gpus_per_node)
    lines = [
        f"{rehearsal.parameters:,} parameters ({rehearsal.trained:,} trained) on "
        f"{report.world_size} x {gpu.name}, {nodes} nodes; {rehearsal.tokens:,} tokens a rank and "
        "step",
        f"{'fits' if report.fits else 'DOES NOT FIT'}: at most {gib(device.nbytes)} of "
        f"{gib(gpu.usable_bytes)} GiB usable ({gib(gpu.memory_bytes)} less "
        f"{gib(RESERVE_BYTES)} for context, NCCL and cuBLAS, and {FRAGMENTATION:.0%} for "
        "fragmentation)",
        "",
        *peak_lines("device", device),
    ]
    if report.host is not None:
        ranks = report.cluster.gpus_per_node
        lines += peak_lines("host, a rank", report.host)
        lines.append(f"  a node of {ranks} ranks holds {gib(report.host.nbytes * ranks)} GiB")
    lines += ["", "messages a step (bytes of all ranks' pieces together)"]
    lines += [
        f"  {kind:15} {volume.count:5}  {volume.nbytes / 1e9:10.2f} GB"
        for kind, volume in rehearsal.messages.items()
    ]
    lines += ["", "arithmetic a step and rank"]
    lines += [
        f"  {name:50} {flops / 1e12:10.2f} TFLOP"
        for name, flops in rehearsal.flops_by_operator().items()
    ]
    lines += [
        "",
        f"a step takes {timing.seconds:.2f} s: computing {timing.compute:.2f}, messages "
        f"{timing.messages:.2f} (waited for: {timing.exposed:.2f}), PCIe {timing.pcie:.2f}, host "
        f"{timing.host:.2f}",
        "  " + ", ".join(f"{name} {s:.2f}" for name, s in timing.by_phase.items() if s >= 0.005),
        f"  at {gpu.efficiency:.0%} of {gpu.name}'s peaks ({gpu.half_tflops:g} TFLOP/s half, "
        f"{gpu.single_tflops:g} single, {gpu.memory_gb_s:g} GB/s) and {LINK_EFFICIENCY:.0%} of its "
        f"links ({gpu.peer_gb_s:g} GB/s in a node, {report.cluster.network_gb_s:g} a node, "
        f"{gpu.pcie_gb_s:g} PCIe)",
        f"{report.tokens_per_second:,.0f} tokens/s, "
        f"{report.tokens_per_second / report.world_size:,.0f} a GPU, MFU {report.mfu:.1%} "
        "((6 N tokens + 12 L d T^2 a sequence) / seconds / peak)",
    ]
    if report.hours is not None:
        cost = "" if report.cost is None else f", cost {report.cost:,.0f}"
        lines.append(f"{report.settings.steps:,} steps: {report.hours:,.1f} hours{cost}")
    if report.remedies:
        lines += ["", "changes that were planned; first what fits, learns the same and costs least"]
        lines += [
            f"  {'fits   ' if r.fits else 'too big'}  {gib(r.peak_bytes):>7} GiB  "
            f"{r.tokens_per_second / r.world_size:6,.0f} tokens/s a GPU  {' + '.join(r.names)}"
            for r in report.remedies
        ]
    return "\n".join([*lines, "", _NOT_SEEN])


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
    return f"{value:.2f}" if value >= 0.1 or not value else f"{value:.4f}"

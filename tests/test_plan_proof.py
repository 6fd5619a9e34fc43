"""Plans against runs: peaks of real ranks by the profiler, messages by the engine's events."""

from __future__ import annotations

import pytest

from benchmarks.plan_models import Options
from benchmarks.plan_proof import CASES, TOLERANCE, Case, measure

QUICK = [
    Case("bf16, checkpointing", Options(True, bf16=True), batch=1, seq=64),
    Case("LoRA, offload", Options(lora_rank=8, cpu_offload=True), batch=2, seq=64),
    Case("accumulation", settings={"micro_batches": 2, "no_sync": True}, batch=2, seq=64),
]


def _hold(run_ranks, case: Case) -> None:
    planned = case.planned()
    measured = run_ranks(case.world_size, measure, case)[0]
    assert planned.peak(on_host=False).nbytes == pytest.approx(measured.peak_bytes, rel=TOLERANCE)
    assert planned.messages == measured.messages


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_the_planned_peak_is_the_measured_one(run_ranks, case):
    _hold(run_ranks, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in CASES if "gloo" not in case.name], ids=lambda case: case.name
)
def test_the_planned_peak_is_the_measured_one_in_every_setting(run_ranks, case):
    _hold(run_ranks, case)

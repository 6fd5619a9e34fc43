"""Changes that make a run fit: told as they are found, and no more planned than it takes."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import minifsdp
from minifsdp.plan import GPU, Change, plan, report
from minifsdp.plan.shown import show

OFFLOADED = {"offload_policy": minifsdp.CPUOffloadPolicy()}


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), fused=True)


def _sharded(model: nn.Module, **settings) -> nn.Module:
    mesh = init_device_mesh(GPU, (dist.get_world_size(),))
    return minifsdp.fully_shard(model, mesh=mesh, **settings)


def _wide(bf16: bool = False, **sharded):
    with torch.device("meta"):
        model = nn.Linear(2**16, 2**15, bias=False)
    if bf16:
        model.bfloat16()
    return _sharded(model, **sharded), _adamw


def _wide_batch(bf16: bool = False, **_):
    dtype = torch.bfloat16 if bf16 else torch.float32
    return (torch.zeros(1, 2**16, device=GPU, dtype=dtype),)


def test_what_does_not_fit_gets_changes_that_were_planned_too():
    twice = Change("two micro-batches", settings={"micro_batches": 2})
    changes = [twice, Change("bf16", {"bf16": True})]
    # 8 GiB whole in float32, 16 in backward, 8 more of messages, a quarter of 32 GiB of shards.
    report = plan(_wide, _wide_batch, 4, 24, changes=changes)
    assert not report.fits
    assert [(r.names, r.fits) for r in report.remedies] == [
        (("bf16",), True),
        (("two micro-batches",), False),
    ]
    alone = plan(lambda: _wide(True), lambda: _wide_batch(True), 4, 24)
    assert report.remedies[0].peak_bytes == alone.device.nbytes
    assert "too big" in str(report) and "DOES NOT FIT" in str(report)


def test_a_change_of_what_is_learnt_comes_after_those_that_keep_it():
    half = {"bf16": True}
    changes = [Change("other", half, alters=True), Change("same", half, world_size=8)]
    report = plan(_wide, _wide_batch, 4, 24, changes=changes)
    assert [(r.names, r.alters, r.fits) for r in report.remedies] == [
        (("same",), False, True),
        (("other",), True, True),
    ]


def test_changes_add_up_where_none_is_enough():
    changes = [Change("bf16", {"bf16": True}), Change("8 ranks", {}, world_size=8)]
    report = plan(_wide, _wide_batch, 4, 12, changes=changes)
    assert report.remedies[0].names == ("bf16", "8 ranks")
    assert report.remedies[0].fits and report.remedies[0].world_size == 8


@pytest.fixture
def rehearsals(monkeypatch) -> list[int]:
    """World sizes of what was rehearsed so far."""
    done: list[int] = []
    rehearse = report.rehearse

    def counted(build, batch, world_size, *rest):
        done.append(world_size)
        return rehearse(build, batch, world_size, *rest)

    monkeypatch.setattr(report, "rehearse", counted)
    return done


def test_the_plan_is_told_before_any_change_is_planned(rehearsals, monkeypatch):
    told = []
    monkeypatch.setattr("builtins.print", lambda line, **_: told.append((len(rehearsals), line)))
    changes = [Change("too little", world_size=5), Change("bf16", {"bf16": True})]
    assert show(plan(_wide, _wide_batch, 4, 24, nodes=1, changes=changes), {}) == 1
    assert [done for done, _ in told] == [1, 1, 2, 3, 3]
    assert "DOES NOT FIT" in told[0][1] and "too little" in told[2][1]
    assert "of 2 plans, the cheapest that fits: bf16 (" in told[-1][1]


def test_no_change_is_planned_twice_or_after_enough_fit(rehearsals):
    changes = [Change(f"{n}", {"bf16": True}) for n in range(5)]
    found = plan(_wide, _wide_batch, 4, 24, changes=changes)
    assert len(rehearsals) == 1
    assert len(found.remedies) == len(found.remedies) == 3
    assert str(found).count("fits   ") == 3
    assert len(rehearsals) == 4


def test_what_fits_together_is_tried_without_what_takes_more_gpus():
    more = Change("8 ranks", world_size=8)
    changes = [more, Change("offload", OFFLOADED), Change("bf16", {"bf16": True})]
    found = plan(_wide, _wide_batch, 4, 12, changes=changes)
    assert found.remedies[0].fits
    fitting = [remedy.names for remedy in found.search.tried if remedy.fits]
    assert fitting == [("8 ranks", "offload", "bf16"), ("offload", "bf16")]
    assert len(found.search.tried) == 3 + 2 + 1


def test_what_a_change_does_not_make_smaller_is_not_rehearsed_in_vain(rehearsals):
    changes = [
        Change("less text", lowers=["activations", "inputs"]),
        Change("bf16", {"bf16": True}, lowers=["parameters", "gradients", "unsharded units"]),
    ]
    found = plan(_wide, _wide_batch, 4, 12, changes=changes)
    assert found.remedies == []
    assert found.search.cannot_be_enough == ["less text", "bf16", "less text + bf16"]
    assert len(rehearsals) == 1
    assert "cannot be enough, by what they do not make smaller: less text, bf16" in str(found)


def test_what_there_was_no_time_for_is_named(rehearsals):
    changes = [Change("bf16", {"bf16": True}), Change("8 ranks", world_size=8)]
    found = plan(_wide, _wide_batch, 4, 12, changes=changes, remedy_seconds=0)
    assert "of 0 plans, none fits" in str(found)
    assert "not tried, after 0 s: bf16, 8 ranks, bf16 + 8 ranks" in str(found)
    assert found.as_dict()["remedies_not_tried"] == ["bf16", "8 ranks", "bf16 + 8 ranks"]
    assert len(rehearsals) == 1


def test_a_change_that_cannot_be_planned_is_told_and_the_others_are_planned():
    def build(odd: bool = False, **keywords):
        if odd:
            raise ValueError("--seq-len 3 is odd")
        return _wide(**keywords)

    changes = [Change("odd", {"odd": True}), Change("bf16", {"bf16": True})]
    found = plan(build, _wide_batch, 4, 24, changes=changes)
    assert [remedy.names for remedy in found.remedies] == [("bf16",)]
    assert "cannot be planned: odd: --seq-len 3 is odd" in str(found)


def test_settings_of_a_change_may_follow_from_those_before_it(monkeypatch):
    seen = []
    rehearse = report.rehearse

    def noted(build, batch, world_size, device_type, settings):
        seen.append(settings.micro_batches)
        return rehearse(build, batch, world_size, device_type, dataclasses.replace(settings))

    monkeypatch.setattr(report, "rehearse", noted)
    changes = [
        Change("smaller", settings={"micro_batches": 8}),
        Change("halved", settings=lambda before: {"micro_batches": before.micro_batches // 2}),
    ]
    _ = plan(_wide, _wide_batch, 4, 12, micro_batches=2, changes=changes).remedies
    assert seen == [2, 8, 1, 4]


def _offloaded(**sharded):
    return _wide(bf16=True, **OFFLOADED | sharded)


def _offloaded_batch(**_):
    return _wide_batch(bf16=True)


def test_host_memory_a_node_is_told_and_decides_where_it_is_known():
    found = plan(_offloaded, _offloaded_batch, 4, 80)
    rows, moments, staging = 1, 2, 2  # GiB a rank: 4 GiB in bfloat16, on 4 ranks
    assert found.fits
    needs = found.host_node_bytes / 2**30
    assert needs == pytest.approx(4 * (rows + moments + rows + staging + 2), abs=0.01)
    assert f"each node needs {needs:.2f} GiB of host memory (4 ranks, each 6.00" in str(found)
    two_nodes = plan(_offloaded, _offloaded_batch, 4, 80, nodes=2, host_memory_gib=needs / 2)
    assert two_nodes.fits and ", of 16 GiB" in str(two_nodes)
    assert two_nodes.host_node_bytes == found.host_node_bytes / 2
    short = plan(_offloaded, _offloaded_batch, 4, 80, host_memory_gib=31.9)
    assert short.fits_device and not short.fits
    assert "DOES NOT FIT" in str(short) and "and has 31.9 GiB: too little" in str(short)
    assert short.as_dict()["host_node_bytes"] == found.host_node_bytes


def test_a_change_that_offloads_says_what_the_host_needs():
    changes = [Change("offload", {"bf16": True} | OFFLOADED)]

    def batch(bf16: bool = False, **_):
        return _wide_batch(bf16)

    found = plan(_wide, batch, 4, 24, changes=changes, host_memory_gib=20)
    assert "too big" in str(found) and "offload  (host: 32.00 GiB a node)" in str(found)
    assert found.remedies[0].host_node_bytes == pytest.approx(32 * 2**30)
    assert not found.remedies[0].fits


def test_a_search_that_takes_long_keeps_to_its_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now.append(now[-1] + 25) or now[-1])
    changes = [Change(f"{n}", {}, world_size=4) for n in range(5)]
    found = plan(_wide, _wide_batch, 4, 24, changes=changes)
    assert [remedy.names for remedy in found.remedies] == [("0",), ("1",)]
    assert found.search.not_tried[:3] == ["2", "3", "4"]


def test_what_leaves_the_host_too_full_is_not_rehearsed(rehearsals):
    changes = [Change("less text", lowers=["activations"]), Change("more", world_size=8)]
    found = plan(_offloaded, _offloaded_batch, 4, 80, host_memory_gib=20, changes=changes)
    assert found.fits_device and found.search.tried == []
    assert [remedy.names for remedy in found.remedies[:1]] == [("more",)]
    assert "less text" in found.search.cannot_be_enough

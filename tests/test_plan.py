"""Plans: bytes counted by hand, messages as real ranks record them, nothing left behind."""

from __future__ import annotations

import json
import math

import pytest
import stack
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import minifsdp
from minifsdp import offload
from minifsdp.plan import GPU, Change, Settings, plan, rehearse, world
from minifsdp.plan.books import Volume
from minifsdp.plan.categories import Category
from minifsdp.plan.rehearsal import counting, train_step

ONE_UNIT_SHARD = (6 * 8 + 6) // 2 * 4  # bytes of a rank of two: half the rows of Linear(8, 6)
PINNED_SHARD = 128  # 108 bytes, rounded up


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), fused=True)


def _sharded(model: nn.Module, device_type: str, **settings) -> nn.Module:
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    return minifsdp.fully_shard(model, mesh=mesh, **settings)


def _linear(device_type: str = "cpu", **settings):
    def build():
        with torch.device("meta"):
            model = nn.Linear(8, 6)
        return _sharded(model, device_type, **settings), _adamw

    return build


def _rows(device_type: str = "cpu"):
    return lambda: (torch.zeros(5, 8, device=device_type),)


def _stack(device_type: str, **settings):
    def build():
        with torch.device("meta"):
            model = stack.Stack()
        mesh = init_device_mesh(device_type, (dist.get_world_size(),))
        return stack.shard(model, mesh=mesh, **settings), _adamw

    return build


def _stack_batch(device_type: str):
    return lambda: (torch.zeros(5, 3, device=device_type),)


def test_one_linear_unit_on_two_ranks_holds_the_bytes_counted_by_hand():
    rehearsal = rehearse(_linear(), _rows(), 2, "cpu", Settings(clip_norm=None))
    most = rehearsal.peak(on_host=False).own_peaks
    assert most[Category.PARAMETERS] == ONE_UNIT_SHARD
    assert most[Category.OPTIMIZER] == 2 * ONE_UNIT_SHARD + 2 * 4  # two moments, two step counts
    assert most[Category.UNSHARDED] == 192 + 64  # 48 and 6 floats, each from a multiple of 64 bytes
    # The whole gradients of weight and bias; the reduced rows come after them.
    assert most[Category.GRADIENTS] == (6 * 8 + 6) * 4
    assert most[Category.INPUTS] == 5 * 8 * 4
    message = 2 * ONE_UNIT_SHARD
    assert most[Category.MESSAGES] == 2 * message  # a buffer that is kept, and gloo's copy of it
    assert not rehearsal.held[False, Category.UNSHARDED]  # between steps
    assert rehearsal.parameters == rehearsal.trained == 54
    assert rehearsal.messages == {
        "all_gather": Volume(1, message),
        "reduce_scatter": Volume(1, message),
    }


def test_on_a_gpu_sizes_are_those_of_its_allocator():
    rehearsal = rehearse(_linear(GPU), _rows(GPU), 2, GPU, Settings(clip_norm=None))
    most = rehearsal.peak(on_host=False).own_peaks
    assert most[Category.PARAMETERS] == most[Category.UNSHARDED] == 512
    assert most[Category.OPTIMIZER] == 6 * 512  # four moments and two step counts
    assert most[Category.MESSAGES] == 512  # buffers come from the allocator and go back to it


def test_what_is_offloaded_is_held_by_the_host():
    build = _linear(GPU, offload_policy=minifsdp.CPUOffloadPolicy())
    rehearsal = rehearse(build, _rows(GPU), 2, GPU, Settings(clip_norm=None))
    device = rehearsal.peak(on_host=False).own_peaks
    host = rehearsal.peak(on_host=True).own_peaks
    assert not device.get(Category.PARAMETERS) and not device.get(Category.OPTIMIZER)
    # Page-locked memory comes in powers of two; gradients are not.
    assert host[Category.PARAMETERS] == PINNED_SHARD
    assert host[Category.GRADIENTS] == ONE_UNIT_SHARD
    assert host[Category.OPTIMIZER] == 2 * ONE_UNIT_SHARD + 2 * 4
    assert host[Category.STAGING] == 2 * PINNED_SHARD  # two buffers on the way down


def test_pinned_rows_that_travel_as_they_are_need_no_buffer_on_the_way_up():
    def staged(mp_policy):
        offloaded = minifsdp.CPUOffloadPolicy()
        build = _linear(GPU, offload_policy=offloaded, mp_policy=mp_policy)
        settings = Settings(clip_norm=None)
        return rehearse(build, _rows(GPU), 2, GPU, settings).peak(True).own_peaks[Category.STAGING]

    down = 2 * PINNED_SHARD
    assert staged(minifsdp.MixedPrecisionPolicy()) == down
    half = minifsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    assert staged(half) == down + 2 * PINNED_SHARD // 2


def recorded_messages() -> dict[str, Volume]:
    """What two steps' second one sends, on real ranks."""
    model = stack.shard(stack.build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_step(model, optimizer, lambda: (stack.batch(),), Settings())
    with counting() as messages:
        train_step(model, optimizer, lambda: (stack.batch(),), Settings())
    return messages


def test_messages_are_those_that_real_ranks_record(run_ranks):
    recorded = run_ranks(2, recorded_messages)
    for device_type in ("cpu", GPU):
        build, batch = _stack(device_type), _stack_batch(device_type)
        planned = rehearse(build, batch, 2, device_type, Settings())
        assert planned.messages["all_gather"].count == 7  # the root stays whole
        assert recorded == [planned.messages] * 2


@pytest.mark.parametrize("reshard", [None, 2])
def test_many_ranks_are_planned_as_few_are(monkeypatch, reshard):
    def planned():
        build = _stack(GPU, reshard_after_forward=reshard)
        return rehearse(build, _stack_batch(GPU), 4, GPU, Settings())

    plain = planned()
    monkeypatch.setattr(world, "FEW_RANKS", 1)
    short = planned()
    assert short.peak(False) == plain.peak(False)
    assert short.messages == plain.messages
    assert len(short.trace) <= len(plain.trace)


def test_a_thousand_ranks_hold_a_thousandth():
    def build():
        with torch.device("meta"):
            model = nn.Linear(1024, 2048, bias=False)
        return _sharded(model, GPU), _adamw

    rehearsal = rehearse(build, lambda: (torch.zeros(1, 1024, device=GPU),), 1024, GPU, Settings())
    assert rehearsal.peak(False).own_peaks[Category.PARAMETERS] == 2 * 1024 * 4
    assert rehearsal.messages["all_gather"] == Volume(1, 2048 * 1024 * 4)


def test_only_the_last_micro_batch_reduces_without_sync():
    settings = Settings(micro_batches=3, no_sync=True)
    messages = rehearse(_stack("cpu"), _stack_batch("cpu"), 2, "cpu", settings).messages
    assert messages["reduce_scatter"].count == 4
    each = Settings(micro_batches=3)
    messages = rehearse(_stack("cpu"), _stack_batch("cpu"), 2, "cpu", each).messages
    assert messages["reduce_scatter"].count == 12


def test_floating_point_operations_of_products_are_counted_by_shape():
    rehearsal = rehearse(_linear(), _rows(), 2, "cpu", Settings())
    forward, for_weight = 2 * 5 * 8 * 6, 2 * 5 * 8 * 6  # its input needs no gradient
    assert sum(rehearsal.flops_by_operator().values()) == forward + for_weight
    assert rehearsal.tokens == 5
    assert rehearsal.model_flops == 6 * 54 * 5


def test_nothing_is_left_of_a_plan():
    before = (
        dict(vars(torch.accelerator)), offload._up, offload._down, torch.UntypedStorage.resize_,
        nn.functional.scaled_dot_product_attention, torch.autograd.is_multithreading_enabled(),
    )  # fmt: skip
    rehearse(_linear(GPU), _rows(GPU), 2, GPU, Settings())
    after = (
        dict(vars(torch.accelerator)), offload._up, offload._down, torch.UntypedStorage.resize_,
        nn.functional.scaled_dot_product_attention, torch.autograd.is_multithreading_enabled(),
    )  # fmt: skip
    assert after == before
    assert not dist.is_initialized()
    assert not hasattr(torch, GPU)


def test_nothing_is_left_of_a_plan_that_fails():
    def build():
        raise KeyError("no such model")

    with pytest.raises(KeyError):
        plan(build, _rows(GPU), 2, "A100-80")
    assert not dist.is_initialized()
    assert not hasattr(torch, GPU)


def test_a_model_that_is_not_sharded_or_has_memory_is_refused():
    with pytest.raises(ValueError, match=r"call minifsdp\.fully_shard"):
        plan(lambda: (nn.Linear(2, 2, device="meta"), _adamw), _rows(GPU), 2, "A100-80")

    def real():
        return _sharded(nn.Linear(8, 6), "cpu"), _adamw

    with pytest.raises(ValueError, match="'weight' and 1 others real memory"):
        rehearse(real, _rows(), 2, "cpu", Settings())


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((2, "A200"), {}, "no GPU 'A200': give a number of GB, or one of A100-40"),
        ((2, -3), {}, "-3 GB"),
        ((0, 80), {}, "a world of 0 ranks"),
        ((2, 80), {"micro_batches": 0}, "micro_batches 0 must be a whole number, 1 or more"),
        ((2, 80), {"nodes": 0}, "nodes 0"),
        ((8, 80), {"nodes": 3}, r"nodes 3 .* cannot share 8 ranks .* give one of 1, 2, 4, 8"),
        ((4, 80), {"nodes": 8}, "nodes 8 .* cannot share 4 ranks"),
        ((12, 80), {}, r"12 ranks are not whole nodes of 8: say with nodes \(--nodes\)"),
        ((10**6, 80), {}, "1000000 ranks cannot be planned: give 1 to 100,000"),
        ((2, 80), {"micro_batches": 2.5}, "micro_batches 2.5 must be a whole number"),
        ((2, 80), {"clip_norm": -1.0}, "clip_norm -1.0 must be above 0"),
        ((2, 80), {"clip_norm": math.nan}, "clip_norm nan must be above 0"),
        ((2, 80), {"price": math.inf, "steps": 1}, "price inf must be above 0, and not inf"),
        ((2, 80), {"network_gb_s": math.inf}, "network_gb_s inf"),
        ((2, 80), {"host_memory_gib": 0}, "host_memory_gib 0 must be above 0"),
        ((2, 80), {"price": 2.0}, r"price 2 says .* give steps \(--steps\) too"),
        ((2, 80), {"changes": [Change("x", lowers=["weights"])]}, "x: no category 'weights'"),
        ((2, 80), {"collectives": "shared"}, "choose backend or direct"),
        ((2, 80), {"price": -1.0, "steps": 1}, "price -1.0 must be above 0"),
        ((2, 80), {"offload": True}, "plan has no setting 'offload'; it has micro_batches"),
    ],
)
def test_what_cannot_be_planned_is_named(arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        plan(_linear(GPU), _rows(GPU), *arguments, **settings)


def test_a_report_is_saved_as_json_and_as_a_page_without_links(tmp_path):
    report = plan(_stack(GPU), _stack_batch(GPU), 16, "H100-80", steps=100, price=3.0)
    report.save(tmp_path / "plan.json")
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert saved["fits"] and saved["device"]["peak_bytes"] == report.device.nbytes
    assert sum(saved["device"]["by_category"].values()) == report.device.nbytes
    assert saved["cost"] == pytest.approx(saved["hours"] * 3 * 16)
    report.save(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<svg") == 1 and "backward" in page
    assert "http" not in page and "src=" not in page
    with pytest.raises(ValueError, match=r"\.json or \.html"):
        report.save(tmp_path / "plan.pdf")


def test_the_picture_reaches_the_peak():
    from minifsdp.plan.page import curve

    report = plan(_stack(GPU), _stack_batch(GPU), 2, 80)
    samples = curve(report, on_host=False)
    assert max(sum(s.held) for s in samples) == report.device.nbytes
    assert [s.seconds for s in samples] == sorted(s.seconds for s in samples)

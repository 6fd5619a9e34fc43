"""The way between host and device, as far as a machine without a device can walk it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
import stack
import torch
import torch.distributed as dist

import minifsdp
from minifsdp import flat, offload, unit
from minifsdp.collectives import use_collectives

CPU = torch.device("cpu")


def test_a_staging_buffer_is_waited_for_before_it_is_leased_again():
    staging, log = offload.Staging(), []
    first = staging.lease(4, torch.float32)
    staging.busy_until(lambda: log.append("first"))
    second = staging.lease(4, torch.float32)
    staging.busy_until(lambda: log.append("second"))
    assert first.data_ptr() != second.data_ptr() and log == []
    third = staging.lease(4, torch.float32)
    assert third.data_ptr() == first.data_ptr() and log == ["first"]
    staging.lease(4, torch.float32)
    staging.lease(4, torch.float32)
    assert log == ["first", "second"], "each is waited for once"


def test_staging_buffers_grow_to_the_largest_lease_and_are_kept():
    staging = offload.Staging()
    for numel in (8, 2, 8):
        places = {staging.lease(numel, torch.float64).data_ptr() for _ in range(4)}
        assert len(places) == 2
    assert staging.lease(3, torch.bfloat16).shape == (3,)


def test_only_page_locked_memory_beside_a_device_is_staged():
    assert offload.is_staged(torch.device("cuda"), True)
    assert not offload.is_staged(torch.device("cuda"), False)
    assert not offload.is_staged(CPU, True)


def _copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Logs the copies that are waited for, in the order in which they were issued."""
    log: list[str] = []
    numbers = count()

    def copied(device: torch.device) -> Callable[[], None]:
        number = next(numbers)
        return lambda: log.append(f"copy {number}")

    monkeypatch.setattr(offload, "_copied", copied)
    monkeypatch.setattr(offload, "_up", offload.Staging())
    monkeypatch.setattr(offload, "_down", offload.Staging())
    return log


def test_what_goes_up_is_waited_for_before_its_buffer_is_used_again(monkeypatch):
    log, target = _copies(monkeypatch), torch.zeros(3)
    for value in range(3):
        offload.bring_up(torch.full((3,), float(value)), target)
        assert torch.equal(target, torch.full((3,), float(value)))
    assert log == ["copy 0"]


def test_what_comes_down_is_waited_for_when_it_is_read_and_before_its_buffer_is_used_again(
    monkeypatch,
):
    log = _copies(monkeypatch)
    first, second = offload.Descent(torch.ones(3)), offload.Descent(torch.zeros(3))
    assert log == []
    assert torch.equal(first.wait(), torch.ones(3)) and log == ["copy 0"]
    second.wait()
    offload.Descent(torch.ones(3))
    assert log == ["copy 0", "copy 1", "copy 0"]


def _trained(staged: bool, policy: tuple, steps_in_backward: bool) -> tuple[list, list]:
    """Parameters after three steps, and what went up: dtypes of rows and of their targets."""
    went_up = []
    real = unit.is_staged, flat.bring_up

    def bring_up(rows: torch.Tensor, target: torch.Tensor) -> None:
        went_up.append((rows.dtype, target.dtype))
        real[1](rows, target)

    unit.is_staged, flat.bring_up = (lambda *_: staged), bring_up
    try:
        use_collectives("direct")  # as a device's do, it packs messages
        precision = minifsdp.MixedPrecisionPolicy(*policy)
        settings = {"mp_policy": precision, "offload_policy": minifsdp.CPUOffloadPolicy()}
        model = stack.shard(stack.build(), **settings)

        def adamw(params):
            return torch.optim.AdamW(params, lr=1e-2, fused=True)

        if steps_in_backward:
            optimizer = minifsdp.step_in_backward(model, adamw)
        else:
            optimizer = adamw(model.parameters())
        for step in range(3):
            for _ in range(2):  # the second backward adds to gradients that came down before
                model.set_is_last_backward(True)
                x = stack.batch(10 * step + dist.get_rank())
                model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        unit.is_staged, flat.bring_up = real
    return [stack.local(p).clone() for p in model.parameters()], went_up


def _staged_and_not(policy: tuple, steps_in_backward: bool) -> list[tuple]:
    staged, went_up = _trained(True, policy, steps_in_backward)
    direct, nothing = _trained(False, policy, steps_in_backward)
    assert nothing == [] and went_up != []
    assert all(torch.equal(a, b) for a, b in zip(staged, direct, strict=True))
    return sorted(set(went_up), key=str)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("steps_in_backward", [False, True])
def test_rows_go_up_in_the_dtype_they_compute_in_and_bits_do_not_change(
    run_ranks, world_size, steps_in_backward
):
    bf16 = torch.bfloat16
    for went_up in run_ranks(world_size, _staged_and_not, (bf16, torch.float32), steps_in_backward):
        assert went_up == [(torch.float32, bf16)]

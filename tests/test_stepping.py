"""Units that step in backward train to the bits of one optimizer after it, with less memory."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable

import pytest
import stack
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import minifsdp
from minifsdp import clip_grad_norm_, full_state_dict, fully_shard, step_in_backward
from minifsdp.collectives import use_collectives


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def inputs(step: int) -> torch.Tensor:
    return stack.batch(100 * step + dist.get_rank())


def backward(model: nn.Module, step: int) -> None:
    model(inputs(step)).float().square().mean().backward()


def settings_of(case: str) -> dict:
    settings: dict = {}
    if "offload" in case:
        settings["offload_policy"] = minifsdp.CPUOffloadPolicy()
    if "bf16" in case:
        settings["mp_policy"] = minifsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if "HSDP" in case:
        names = ("replicate", "shard")
        settings["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    return settings


def _trained(case: str, how: str) -> list[torch.Tensor]:
    """Parameters after four steps, one of them of two micro-batches."""
    use_collectives("direct" if "direct" in case else "auto")
    model = stack.shard(stack.build(), **settings_of(case))
    max_norm = 0.05 if "clip" in case else None
    if how == "in backward":
        optimizer = step_in_backward(model, adamw, max_norm)
    else:
        optimizer = adamw(list(model.parameters()))
    for step in range(4):
        for micro in range(2 if step == 2 else 1):
            last = step != 2 or micro == 1
            if "synced" in case:
                model.set_is_last_backward(last)
            else:
                model.set_requires_gradient_sync(last)
            backward(model, 10 * step + micro)
        if max_norm is not None and how != "in backward":
            clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    if how == "in backward":
        optimizer.wait()
    return [stack.local(p).clone() for p in model.parameters()]


def _same_bits(case: str) -> bool:
    pairs = zip(_trained(case, "in backward"), _trained(case, "after"), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


CASES = ["fp32", "bf16", "offload", "bf16 offload", "clip", "offload clip"]
CASES += ["synced", "direct synced", "HSDP", "HSDP synced"]


@pytest.mark.parametrize("case", CASES)
def test_stepping_in_backward_trains_to_the_same_bits(run_ranks, case):
    for world_size in (4,) if "HSDP" in case else (1, 2, 3):
        assert run_ranks(world_size, _same_bits, case) == [True] * world_size


def _what_is_left_after_backward() -> tuple[list[bool], list[bool]]:
    model = stack.shard(stack.build())
    before = [stack.local(p).clone() for p in model.parameters()]
    step_in_backward(model, adamw)
    backward(model, 0)
    grads = [p.grad is None for p in model.parameters()]
    model.reshard()
    pairs = zip(before, model.parameters(), strict=True)
    return grads, [not torch.equal(a, stack.local(p)) for a, p in pairs if a.numel()]


def test_after_backward_gradients_are_gone_and_parameters_have_moved(run_ranks):
    for grads, moved in run_ranks(2, _what_is_left_after_backward):
        assert all(grads) and all(moved)


def _frozen_units_get_no_optimizer() -> int:
    model = stack.build()
    model.layers[1].requires_grad_(False)
    optimizer = step_in_backward(stack.shard(model), adamw)
    backward(model, 0)
    return len(optimizer.optimizers)


def test_a_frozen_unit_gets_no_optimizer(run_ranks):
    assert run_ranks(2, _frozen_units_get_no_optimizer) == [3, 3]


def _clipping_afterwards() -> None:
    model = stack.shard(stack.build())
    step_in_backward(model, adamw)
    backward(model, 0)
    with pytest.raises(RuntimeError, match="max_norm"):
        clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ValueError, match="fully_shard"):
        step_in_backward(stack.build(), adamw)


def test_clipping_what_backward_has_stepped_is_refused(run_ranks):
    run_ranks(2, _clipping_afterwards)


def _norm() -> bool:
    model, plain = stack.shard(stack.build()), stack.shard(stack.build())
    optimizer = step_in_backward(model, adamw, max_norm=0.05)
    backward(model, 0)
    optimizer.step()
    backward(plain, 0)
    return torch.equal(optimizer.norm, clip_grad_norm_(plain.parameters(), 0.05))


def test_the_norm_before_clipping_can_be_read(run_ranks):
    assert run_ranks(2, _norm) == [True, True]


def _resumed() -> list[bool]:
    def steps(model: nn.Module, optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            backward(model, step)
            optimizer.step()

    model = stack.shard(stack.build())
    optimizer = step_in_backward(model, adamw)
    steps(model, optimizer, 0, 2)
    weights = {k: v.clone() for k, v in full_state_dict(model, rank0_only=False).items()}
    state = copy.deepcopy(optimizer.state_dict())
    steps(model, optimizer, 2, 4)

    other = stack.shard(stack.build(seed=1))
    minifsdp.load_full_state_dict(other, weights)
    again = step_in_backward(other, adamw)
    again.load_state_dict(state)
    with pytest.raises(ValueError, match="of 3 optimizers"):
        again.load_state_dict({"optimizers": state["optimizers"][:3]})
    steps(other, again, 2, 4)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return [torch.equal(stack.local(a), stack.local(b)) for a, b in pairs]


def test_saved_and_loaded_it_goes_on_to_the_same_bits(run_ranks):
    for equal in run_ranks(2, _resumed):
        assert all(equal)


class Watched(torch.optim.SGD):
    """SGD that is slow, says on which thread it steps, and can fail."""

    def __init__(self, params: list[nn.Parameter], log: list[str], fails: bool = False) -> None:
        super().__init__(params, lr=0.1)
        self._log, self._fails = log, fails

    def step(self, closure: Callable | None = None) -> None:
        time.sleep(0.05)
        self._log.append(threading.current_thread().name)
        if self._fails:
            raise ArithmeticError("no step today")
        super().step(closure)


def _threads(offload: bool, max_norm: float | None) -> list[str]:
    log: list[str] = []
    model = stack.shard(stack.build(), **settings_of("offload" if offload else ""))
    optimizer = step_in_backward(model, lambda params: Watched(params, log), max_norm)
    backward(model, 0)
    optimizer.step(wait=False)
    stepped_before = len(log)
    backward(model, 1)  # gathers units; each must have stepped
    if max_norm is not None and offload:
        assert stepped_before < 4, "step did not wait"
    optimizer.step()
    optimizer.wait()
    return log


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_offloaded_units_step_on_a_thread_of_their_own_and_others_do_not(run_ranks, max_norm):
    for log in run_ranks(2, _threads, True, max_norm):
        assert len(log) == 8 and all("minifsdp-optimizer" in name for name in log)
    for log in run_ranks(2, _threads, False, max_norm):
        assert len(log) == 8 and not any("minifsdp-optimizer" in name for name in log)


def _failing(offload: bool) -> None:
    model = stack.shard(stack.build(), **settings_of("offload" if offload else ""))
    step_in_backward(model, lambda params: Watched(params, [], fails=True))
    with pytest.raises(ArithmeticError, match="no step today"):
        backward(model, 0)


@pytest.mark.parametrize("offload", [False, True])
def test_what_a_step_raises_arrives(run_ranks, offload):
    run_ranks(2, _failing, offload)


def _state_is_at_rest() -> bool:
    """Whether a state dict taken while units step holds what they stepped to."""
    model = stack.shard(stack.build(), **settings_of("offload"))
    optimizer = step_in_backward(model, lambda params: Watched(params, []), max_norm=1.0)
    backward(model, 0)
    optimizer.step(wait=False)
    early = {name: stack.local(p).clone() for name, p in model.state_dict().items()}
    optimizer.wait()
    return all(torch.equal(early[name], stack.local(p)) for name, p in model.state_dict().items())


def test_a_state_dict_waits_for_the_steps_under_way(run_ranks):
    assert run_ranks(2, _state_is_at_rest) == [True, True]


def _zeroed_meanwhile() -> list[bool]:
    """Whether updates arrive though the model's gradients are zeroed while they are stepped on."""
    model = stack.shard(stack.build(), **settings_of("offload"))
    before = [stack.local(p).clone() for p in model.parameters()]
    optimizer = step_in_backward(model, lambda params: Watched(params, []), max_norm=1.0)
    backward(model, 0)
    optimizer.step(wait=False)
    model.zero_grad()
    pairs = zip(before, model.parameters(), strict=True)
    return [not torch.equal(a, stack.local(p)) for a, p in pairs if a.numel()]


def test_zeroing_the_models_gradients_waits_for_the_steps_under_way(run_ranks):
    for moved in run_ranks(2, _zeroed_meanwhile):
        assert all(moved)


class Sometimes(nn.Module):
    """Two linear units, of which the second is used when it is told to be."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if both else x


def _unused_at_last(how: str, ignored: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Sometimes()
    extra = {model.second.bias} if ignored else set()
    fully_shard(model.first)
    fully_shard(model.second, ignored_params=extra)
    fully_shard(model, ignored_params=extra)

    def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:  # may mix sharded and whole ones
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False)

    if how == "in backward":
        optimizer = step_in_backward(model, sgd)
    else:
        optimizer = sgd(list(model.parameters()))
    for step in range(2):
        for both in (True, False):
            model.set_is_last_backward(not both)
            model(stack.batch(step), both).square().mean().backward()
        optimizer.step()
        model.zero_grad()
    return [stack.local(p).clone() for p in model.parameters()]


def _steps_on_everything(ignored: bool) -> bool:
    pairs = zip(
        _unused_at_last("in backward", ignored), _unused_at_last("after", ignored), strict=True
    )
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("ignored", [False, True])
def test_units_the_last_micro_batch_skips_and_ignored_parameters_step_too(run_ranks, ignored):
    assert run_ranks(2, _steps_on_everything, ignored) == [True, True]


def _twice() -> None:
    model = stack.shard(stack.build())
    step_in_backward(model, adamw)
    with pytest.raises(RuntimeError, match="already steps in backward"):
        step_in_backward(model, adamw)


def test_a_second_call_is_refused(run_ranks):
    run_ranks(1, _twice)

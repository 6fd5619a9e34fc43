"""More public reports about sharding engines, and what a right one does; each test names one."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from parity import Case, train
from small_net import Net, build, data, reference_gradients, whole_gradients
from torch import nn

import minifsdp
from minifsdp import MixedPrecisionPolicy, events, fully_shard


def _twice_before_backward() -> None:
    model = build()
    first, second = model(data()), model(data(1))
    second.square().mean().backward()
    first.square().mean().backward()
    for ours, reference in zip(whole_gradients(model), reference_gradients(2), strict=True):
        torch.testing.assert_close(ours, reference)


def test_pytorch_136861_forward_forward_backward_backward(run_ranks):
    run_ranks(2, _twice_before_backward)


def _reshard_twice() -> None:
    model = build()
    for module in [model, *model.blocks]:
        module.reshard()
        module.unshard()
        module.reshard()
        module.reshard()
    model(data()).square().mean().backward()
    for ours, reference in zip(whole_gradients(model), reference_gradients(), strict=True):
        torch.testing.assert_close(ours, reference)


def test_pytorch_117510_resharding_twice_is_harmless(run_ranks):
    run_ranks(2, _reshard_twice)


def _two_runs() -> None:
    once, again = (train(minifsdp, Case(precision="bf16/fp32", clip="clip")) for _ in range(2))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(once, again, strict=True))


def test_torchtitan_593_two_runs_are_the_same(run_ranks):
    run_ranks(3, _two_runs)


def _bf16_reduction() -> None:
    """bf16 reduction loses what fp32 reduction keeps: the policy decides, nothing else does."""
    grads = {}
    for reduce_dtype in (torch.bfloat16, torch.float32):
        model = build(mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype))
        model(data()).float().square().mean().backward()
        grads[reduce_dtype] = whole_gradients(model)
    for low, high in zip(grads[torch.bfloat16], grads[torch.float32], strict=True):
        assert torch.equal(low, low.bfloat16().float())
        assert low.dtype == high.dtype == torch.float32
    assert any(not torch.equal(h, h.bfloat16().float()) for h in grads[torch.float32])


def test_pytorch_106395_reduction_has_the_precision_asked_for(run_ranks):
    run_ranks(3, _bf16_reduction)


def _master_weights() -> None:
    model = build(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model(data()).float().square().mean().backward()
    optimizer.step()
    tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
    tensors += [t for state in optimizer.state.values() for t in state.values()]
    assert {t.dtype for t in tensors} == {torch.float32}


def test_accelerate_3979_master_weights_stay_fp32(run_ranks):
    run_ranks(2, _master_weights)


def _frozen_and_trained_bytes() -> None:
    sizes = []
    for frozen in (True, False):
        torch.manual_seed(0)
        model = Net(dim=64)
        for block in model.blocks:
            block.requires_grad_(not frozen)
        fully_shard(model)
        messages = []
        with events.listening(
            lambda e, m=messages: m.append(e) if e.kind == "reduce_scatter" else 0
        ):
            model(torch.randn(2, 64)).sum().backward()
        sizes.append(sum(e.nbytes for e in messages))
    head = (-(-3 // dist.get_world_size()) * 65) * dist.get_world_size() * 4
    assert sizes[0] == head < sizes[1]


def test_litgpt_1417_frozen_parameters_cost_no_gradient_memory(run_ranks):
    run_ranks(2, _frozen_and_trained_bytes)


def _ignored() -> None:
    torch.manual_seed(dist.get_rank())
    model = Net()
    fully_shard(model, ignored_params=set(model.head.parameters()))
    model(data()).square().mean().backward()
    grads: list = [None] * dist.get_world_size()
    dist.all_gather_object(grads, model.head.weight.grad.sum().item())
    assert len(set(grads)) == dist.get_world_size()
    assert type(model.head.weight) is nn.Parameter


def test_pytorch_98281_ignored_parameters_are_never_synchronised(run_ranks):
    run_ranks(2, _ignored)


def test_deepcopy_is_refused_rather_than_sharing_shards(run_ranks):
    run_ranks(1, _deepcopy)


def _deepcopy() -> None:
    model = build()
    with pytest.raises(RuntimeError, match="deep-copied"):
        copy.deepcopy(model)
    del model
    gc.collect()

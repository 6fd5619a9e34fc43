"""What upstream gets wrong, and the engine must not: each test names the report it answers.

Where upstream fails, the same code is seen failing on upstream's engine, so that a later fix there
is noticed here.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as upstream
from parity import Case, train
from small_net import Net, build, data, reference_gradients, whole_gradients
from torch import nn

import minifsdp
from minifsdp import MixedPrecisionPolicy, fully_shard

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def fails_upstream(run, mended_in: str = "") -> None:
    """`run` raises on upstream's engine, on every rank, in torch before `mended_in`."""
    if mended_in and torch.__version__ >= mended_in:  # compared as versions
        run(upstream)
        return
    with pytest.raises((RuntimeError, AssertionError, AttributeError)):
        run(upstream)


# --- all parameters frozen at the first forward, then unfrozen, in mixed precision


def _frozen_then_trained(engine: ModuleType) -> list[torch.Tensor]:
    model = build(engine, mp_policy=engine.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model.requires_grad_(False)
    with torch.no_grad():
        model(data())
    model.reshard()
    model.requires_grad_(True)
    model(data()).float().square().mean().backward()
    return whole_gradients(model)


def _all_frozen_then_unfrozen() -> None:
    ours = _frozen_then_trained(minifsdp)
    plain = build(mp_policy=BF16)
    plain(data()).float().square().mean().backward()
    assert all(torch.equal(a, b) for a, b in zip(ours, whole_gradients(plain), strict=True))
    fails_upstream(_frozen_then_trained, mended_in="2.14")


def test_all_frozen_then_unfrozen_in_mixed_precision(run_ranks):
    run_ranks(2, _all_frozen_then_unfrozen)


# --- pytorch#196996: a fresh bf16 gradient beside an accumulated fp32 one


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.use_b = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x) if self.use_b else self.a(x)


def _fresh_beside_accumulated(engine: ModuleType) -> list[torch.Tensor]:
    torch.manual_seed(0)
    policy = engine.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = engine.fully_shard(Either(), mp_policy=policy)
    model.set_requires_gradient_sync(False)
    model(data()).float().square().mean().backward()
    model.set_requires_gradient_sync(True)
    model.use_b = True
    model(data(1)).float().square().mean().backward()
    return whole_gradients(model)


def _issue_196996() -> None:
    grads = _fresh_beside_accumulated(minifsdp)
    torch.manual_seed(0)
    model = Either()
    model(data()).square().mean().backward()
    model.use_b = True
    model(data(1)).square().mean().backward()
    for ours, p in zip(grads, model.parameters(), strict=True):
        dist.all_reduce(p.grad)
        torch.testing.assert_close(ours, p.grad / dist.get_world_size(), rtol=0.05, atol=0.02)
    fails_upstream(_fresh_beside_accumulated)


def test_pytorch_196996_fresh_gradient_beside_an_accumulated_one(run_ranks):
    run_ranks(2, _issue_196996)


# --- gradients of gradients are refused, not silently cut


def _create_graph() -> None:
    model = build()
    with pytest.raises(RuntimeError, match="create_graph=True reached unit 'root'"):
        model(data()).square().mean().backward(create_graph=True)
    model.reset_iter_state()
    x = data().requires_grad_()
    with pytest.raises(RuntimeError, match="gradients of gradients are not supported"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    model.reset_iter_state()
    model(data()).square().mean().backward()
    for ours, reference in zip(whole_gradients(model), reference_gradients(), strict=True):
        torch.testing.assert_close(ours, reference)


def test_create_graph_is_refused_by_name_and_training_goes_on(run_ranks):
    run_ranks(2, _create_graph)


# --- pytorch#105371, pytorch#149029: state after steps without gradients


def _state_after_no_grad() -> None:
    model = build()
    before = {k: v.to_local().clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        model(data())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for name, rows in model.state_dict().items():
        assert torch.equal(rows.to_local(), before[name])
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().fill_(0.5)
    with torch.no_grad():
        first = model(data())
    model(data()).sum().backward()
    optimizer.step()
    assert torch.equal(first, model(data()) * 0 + first)
    assert all(not torch.equal(v.to_local(), before[k]) for k, v in model.state_dict().items())


def test_pytorch_105371_149029_rows_are_the_state_after_no_grad_steps(run_ranks):
    run_ranks(1, _state_after_no_grad)
    run_ranks(2, _state_after_no_grad)


def _root_edit() -> None:
    model = build()
    with torch.no_grad():
        model(data())
        model.head.weight.to_local().zero_()  # rows again: the root resharded without gradients
        model.head.bias.to_local().zero_()
        assert not model(data()).any()


def test_editing_the_roots_parameters_after_a_forward_is_kept(run_ranks):
    run_ranks(2, _root_edit)


# --- accelerate#3154, accelerate#4171: tied weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def _tied() -> None:
    with torch.device("meta"):
        model = Tied()
    fully_shard(model)
    model.to_empty(device="cpu")
    assert model.head.weight is model.embed.weight
    with torch.no_grad():
        model.embed.weight.to_local().fill_(0.1)
    assert len(list(model.parameters())) == 1
    model(torch.arange(5)[None]).sum().backward()
    assert model.embed.weight.grad.full_tensor().shape == (7, 6)


def test_accelerate_3154_4171_to_empty_keeps_weights_tied_and_they_train(run_ranks):
    run_ranks(2, _tied)


# --- world size 1 copies nothing


def _no_copy() -> None:
    model = build()
    rows = [p.to_local().data_ptr() for p in model.parameters()]
    model.unshard()
    for block in model.blocks:
        block.unshard()
    assert [p.data_ptr() for p in model.parameters()] == rows


def test_world_size_1_computes_with_the_rows_themselves(run_ranks):
    run_ranks(1, _no_copy)


# --- found while testing parity


def _unused_unit(engine: ModuleType) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    model.spare = engine.fully_shard(
        nn.Linear(6, 6), mp_policy=engine.MixedPrecisionPolicy(None, torch.bfloat16)
    )
    engine.fully_shard(model)
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        model(data()).square().mean().backward()
    return [p.grad.full_tensor() for n, p in model.named_parameters() if "spare" not in n]


def _unused_unit_unsynced() -> None:
    for ours, reference in zip(_unused_unit(minifsdp), reference_gradients(), strict=True):
        torch.testing.assert_close(ours, 2 * reference)
    fails_upstream(_unused_unit)


def test_a_unit_that_never_runs_does_no_harm_to_unsynced_accumulation(run_ranks):
    run_ranks(2, _unused_unit_unsynced)


def _used_twice_and_recomputed() -> None:
    name = "step 0 gradient layers.1.block.attention.wq.weight"
    case = Case(checkpointing="outside", parameters="module used twice")
    right = dict(train(minifsdp, case, steps=1))[name]
    case = Case(checkpointing="outside reentrant", parameters="module used twice")
    torch.testing.assert_close(dict(train(minifsdp, case, steps=1))[name], right)
    wrong = dict(train(upstream, case, steps=1))[name]
    assert (wrong - right).norm() > 0.1 * right.norm()  # upstream loses one use's gradient


def test_a_module_used_twice_under_reentrant_checkpointing_gets_both_gradients(run_ranks):
    run_ranks(2, _used_twice_and_recomputed)


def _divide_factor() -> None:
    model = build()
    for unit in [model, *model.blocks]:
        unit.set_gradient_divide_factor(5.0)
    model(data()).square().mean().backward()
    scale = dist.get_world_size() / 5.0
    for ours, reference in zip(whole_gradients(model), reference_gradients(), strict=True):
        torch.testing.assert_close(ours, reference * scale)


def _divide_factor_upstream() -> None:
    model = build(upstream)
    for unit in [model, *model.blocks]:
        unit.set_gradient_divide_factor(5.0)
    with pytest.raises(RuntimeError):
        model(data()).square().mean().backward()


def test_a_gradient_divide_factor_works_on_gloo(run_ranks):
    for world_size in (1, 2, 3):
        run_ranks(world_size, _divide_factor)
    run_ranks(2, _divide_factor_upstream)

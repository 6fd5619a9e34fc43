"""clip_grad_norm_ is torch's, bit for bit, and right where torch's fails on sharded gradients."""

from __future__ import annotations

import math

import pytest
import stack
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from minifsdp import clip_grad_norm_, fully_shard

INF = float("inf")


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _restore(model: nn.Module, rows: list[torch.Tensor]) -> None:
    for grad, saved in zip(_gradients(model), rows, strict=True):
        stack.local(grad).copy_(saved)


def _differs_from_torchs(model: nn.Module, norm_types: list[float]) -> list[str]:
    """For each norm: what differs between ours and torch's when both clip the same gradients."""
    found = []
    rows = [stack.local(g).clone() for g in _gradients(model)]
    for norm_type in norm_types:
        for max_norm in (1e-3, 1e3):
            results = []
            for clip in (torch.nn.utils.clip_grad_norm_, clip_grad_norm_):
                _restore(model, rows)
                norm = stack.whole(clip(model.parameters(), max_norm, norm_type))
                results.append([norm] + [stack.local(g).clone() for g in _gradients(model)])
            if not stack.same_bits(*results):
                found.append(f"norm {norm_type} clipped to {max_norm}: {results}")
            moved = not stack.same_bits(results[0][1:], rows)
            if moved != (max_norm < 1):
                found.append(f"norm {norm_type}: clipping to {max_norm} was no test")
    return found


def _sharded(**settings) -> nn.Module:
    """A stack with gradients that differ from rank to rank."""
    model = stack.shard(stack.build(), **settings)
    stack.step(model, seed=dist.get_rank())
    return model


def _on_a_sharded_model() -> list[str]:
    return _differs_from_torchs(_sharded(), [1, 2, 3, INF])


def _on_ranks_without_rows() -> list[str]:
    return _differs_from_torchs(_sharded(), [1, 2, 3])


def _on_replicas() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2))
    return _differs_from_torchs(_sharded(mesh=mesh), [1, 2, 3, INF])


@pytest.mark.parametrize("world_size", [1, 2])
def test_bits_are_torchs_where_every_rank_has_rows(run_ranks, world_size):
    assert run_ranks(world_size, _on_a_sharded_model) == [[]] * world_size


def test_bits_are_torchs_where_some_ranks_have_no_rows(run_ranks):
    assert run_ranks(4, _on_ranks_without_rows) == [[]] * 4


def test_bits_are_torchs_on_replicas_which_count_once(run_ranks):
    assert run_ranks(4, _on_replicas) == [[]] * 4


def _infinity_norm_without_rows() -> tuple[float, float, bool]:
    """The largest gradient, as clip_grad_norm_ and as all ranks together see it."""
    model = _sharded()
    largest = max(float(stack.whole(g).abs().max()) for g in _gradients(model))
    holds_all = all(stack.local(g).numel() for g in _gradients(model))
    norm = clip_grad_norm_(model.parameters(), largest / 2, INF)
    clipped = max(float(stack.whole(g).abs().max()) for g in _gradients(model))
    assert clipped == pytest.approx(largest / 2, rel=1e-5)
    return float(norm), largest, holds_all


def test_infinity_norm_is_right_on_ranks_without_rows(run_ranks):
    answers = run_ranks(4, _infinity_norm_without_rows)
    assert all(norm == largest for norm, largest, _ in answers)
    assert len({norm for norm, _, _ in answers}) == 1
    assert not all(holds_all for *_, holds_all in answers)


def _plain_beside_sharded(norm_type: float) -> tuple[float, float, float]:
    """The norm over an ignored parameter's gradient and sharded ones, and what it should be."""
    model = stack.build()
    ignored = {model.back.weight}
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, ignored_params=ignored)
    stack.step(model)
    assert not hasattr(model.back.weight.grad, "to_local")
    everything = torch.cat([stack.whole(g).flatten() for g in _gradients(model)])
    expected = torch.linalg.vector_norm(everything.double(), norm_type)
    norm = clip_grad_norm_(model.parameters(), float(expected) / 4, norm_type)
    clipped = torch.cat([stack.whole(g).flatten() for g in _gradients(model)])
    after = torch.linalg.vector_norm(clipped.double(), norm_type)
    return float(norm), float(expected), float(after)


@pytest.mark.parametrize("norm_type", [1, 2, 3, INF])
def test_plain_gradients_beside_sharded_ones_count_once(run_ranks, norm_type):
    answers = run_ranks(2, _plain_beside_sharded, norm_type)
    assert answers[0] == answers[1]
    norm, expected, after = answers[0]
    assert norm == pytest.approx(expected, rel=1e-6)
    assert after == pytest.approx(expected / 4, rel=1e-4)


def _replicated_beside_sharded() -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(nn.Linear(2, 2, bias=False))
    model.weight.grad = torch.zeros_like(model.weight)
    replicated = nn.Parameter(distribute_tensor(torch.zeros(1), mesh, [Replicate()]))
    replicated.grad = distribute_tensor(torch.full((1,), 3.0), mesh, [Replicate()])
    return float(clip_grad_norm_([*model.parameters(), replicated], 10.0))


def test_a_replicated_gradient_counts_once(run_ranks):
    assert run_ranks(2, _replicated_beside_sharded) == [3.0] * 2


def _with_a_bad_number(number: float, error_if_nonfinite: bool) -> tuple[str, float, bool]:
    """The error, the norm, and whether gradients stayed, with one bad number on the last rank."""
    model = _sharded()
    if dist.get_rank() == dist.get_world_size() - 1:
        stack.local(model.layers[0].up.weight.grad)[0, 0] = number
    before = [stack.local(g).clone() for g in _gradients(model)]
    norm, error = 0.0, ""
    try:
        norm = float(clip_grad_norm_(model.parameters(), 1.0, 2.0, error_if_nonfinite))
    except RuntimeError as refusal:
        error = str(refusal)
    after = [stack.local(g).clone() for g in _gradients(model)]
    kept = all(torch.equal(a, b) for a, b in zip(before, after, strict=True) if not a.isnan().any())
    return error, norm, kept


@pytest.mark.parametrize("number", [INF, -INF, math.nan])
def test_a_bad_gradient_on_one_rank_is_refused_on_all_and_nothing_is_scaled(run_ranks, number):
    for error, _, kept in run_ranks(2, _with_a_bad_number, number, True):
        assert "norm" in error
        assert "error_if_nonfinite=False" in error
        assert kept


def test_a_bad_gradient_passes_unless_it_is_an_error(run_ranks):
    answers = run_ranks(2, _with_a_bad_number, INF, False)
    assert [(error, norm) for error, norm, _ in answers] == [("", INF)] * 2


def test_without_gradients_the_norm_is_zero():
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0) == 0
    assert clip_grad_norm_([], 1.0) == 0


@pytest.mark.parametrize("norm_type", [1, 2, 3, INF])
def test_plain_models_are_clipped_as_torch_does(norm_type):
    model = stack.build()
    stack.step(model)
    assert _differs_from_torchs(model, [norm_type]) == []


def test_one_tensor_and_a_generator_are_parameters_too():
    param = nn.Parameter(torch.ones(4))
    for parameters in (param, (p for p in [param])):
        param.grad = torch.full((4,), 2.0)
        assert clip_grad_norm_(parameters, 2.0) == 4
        assert param.grad.tolist() == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_gradients_of_two_dtypes_lose_no_precision_to_the_narrower(dtypes):
    generator, norms = torch.Generator().manual_seed(0), []
    values = [torch.rand(101, generator=generator).to(getattr(torch, name)) for name in dtypes]
    for clip in (torch.nn.utils.clip_grad_norm_, clip_grad_norm_):
        params = [nn.Parameter(torch.zeros_like(v)) for v in values]
        for param, value in zip(params, values, strict=True):
            param.grad = value.clone()
        norms.append(clip(params, 1e9))
    assert norms[1].dtype == norms[0].dtype
    assert float(norms[1]) == pytest.approx(float(norms[0]), rel=1e-6)


def test_a_norm_may_be_given_as_a_string_as_for_torchs():
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.tensor([1.0, -4.0, 2.0])
    assert clip_grad_norm_(param, 1.0, norm_type="inf") == 4
    torch.testing.assert_close(param.grad, torch.tensor([0.25, -1.0, 0.5]))

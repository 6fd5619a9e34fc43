"""Mistakes that would train nothing, or lose an edit, are loud and name the remedy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minifsdp import fully_shard


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()


def _optimizer_before_sharding() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"'0\.weight' as it was before sharding"):
        step(model, optimizer)


def test_pytorch_107843_an_optimizer_built_before_sharding_is_refused_at_its_first_step(run_ranks):
    for world_size in (1, 2):
        run_ranks(world_size, _optimizer_before_sharding)


def _optimizer_after_forward() -> None:
    model = build()
    fully_shard(model)
    model(torch.ones(2, 6))  # the root stays whole for its backward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"'0\.weight' in its unsharded form.*after model\.resh"):
        step(model, optimizer)
    model.reshard()
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_pytorch_149205_an_optimizer_built_while_the_model_is_whole_is_refused(run_ranks):
    for world_size in (1, 2):
        run_ranks(world_size, _optimizer_after_forward)


def _one_of_several() -> None:
    model = build()
    lost = model[1].bias
    fully_shard(model)
    optimizer = torch.optim.SGD([*model.parameters(), lost], lr=0.1, foreach=False)
    with pytest.raises(RuntimeError, match=r"'1\.bias' as it was before sharding"):
        step(model, optimizer)


def test_every_parameter_of_an_optimizer_is_looked_at(run_ranks):
    run_ranks(1, _one_of_several)


def _parameters_added_later() -> None:
    model = build()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    model.unshard()
    optimizer.add_param_group({"params": list(model.parameters())})
    model.reshard()
    with pytest.raises(RuntimeError, match="unsharded form"):
        step(model, optimizer)


def test_whole_parameters_added_to_an_optimizer_later_are_refused_too(run_ranks):
    run_ranks(2, _parameters_added_later)


def _other_optimizers() -> None:
    fully_shard(build())
    plain = build()
    step(plain, torch.optim.SGD(plain.parameters(), lr=0.1))


def test_optimizers_of_plain_models_are_left_alone(run_ranks):
    run_ranks(1, _other_optimizers)


def _lost_edit() -> None:
    model = build()
    fully_shard(model)
    model.unshard()
    with torch.no_grad():
        model[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"'1\.weight' was changed in place while it was whole"):
        model.reshard()
    model.reshard()
    model(torch.ones(2, 6)).sum().backward()


def test_an_edit_that_resharding_would_lose_is_refused(run_ranks):
    run_ranks(2, _lost_edit)


def _kept_edit() -> None:
    model = build()
    fully_shard(model)
    model.unshard()
    with torch.no_grad():
        model[1].weight.fill_(3)
    model.reshard()
    assert (model[1].weight.to_local() == 3).all()


def test_on_one_rank_the_same_edit_is_an_edit_of_the_rows(run_ranks):
    run_ranks(1, _kept_edit)


def _several_dtypes() -> None:
    model = build()
    model[1].to(torch.float64)
    fully_shard(model)
    with pytest.raises(ValueError, match=r"several dtypes.*1\.weight torch\.float64"):
        model(torch.ones(2, 6))


def test_trainable_parameters_of_two_dtypes_in_a_unit_are_named(run_ranks):
    run_ranks(2, _several_dtypes)

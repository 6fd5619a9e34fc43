"""What fully_shard and a first forward refuse: by name, with the remedy, and without traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import stack
import torch
from torch import nn
from torch.distributed.tensor import Shard

import minifsdp
from minifsdp import fully_shard


class WithScalar(nn.Module):
    """A layer, and a parameter that has no rows to shard."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.temperature


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.tail = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.tail.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.head(x))


def _zero_dimensional() -> None:
    fully_shard(WithScalar())


def _not_contiguous() -> None:
    layer = nn.Linear(2, 3)
    layer.weight = nn.Parameter(torch.ones(2, 3).t())
    fully_shard(layer)


def _module_list() -> None:
    fully_shard(stack.build().layers)


def _module_dict() -> None:
    fully_shard(nn.ModuleDict({"a": nn.Linear(2, 2)}))


def _no_module() -> None:
    fully_shard(torch.ones(2))


def _twice() -> None:
    fully_shard(fully_shard(nn.Linear(2, 2)))


def _twice_in_a_list() -> None:
    layer = fully_shard(nn.Linear(2, 2))
    fully_shard([nn.Linear(2, 2), layer])


def _parent_before_child() -> None:
    model = fully_shard(stack.build())
    fully_shard(model.layers[1])


def _tied_across_units() -> None:
    model = Tied()
    fully_shard(model.head)
    fully_shard(model)


def _dp_mesh_dims() -> None:
    fully_shard(nn.Linear(2, 2), dp_mesh_dims=object())


def _placement_of_columns() -> None:
    fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)


def _precision_of_another_type() -> None:
    fully_shard(nn.Linear(2, 2), mp_policy=torch.bfloat16)


def _offload_of_another_type() -> None:
    fully_shard(nn.Linear(2, 2), offload_policy=True)


def _mixed_dtypes() -> None:
    model = stack.build()
    model.back.to(torch.bfloat16)
    stack.shard(model)(stack.batch())


def _child_before_root() -> None:
    model = stack.shard(stack.build())
    model.layers[1](torch.ones(2, stack.DIM))
    model(stack.batch())


def _copied() -> None:
    import copy

    copy.deepcopy(stack.shard(stack.build()))


def _prefetch_of_a_plain_module() -> None:
    model = stack.shard(stack.build())
    model.set_modules_to_forward_prefetch([model.front])


def _no_such_method() -> None:
    minifsdp.register_fsdp_forward_method(stack.shard(stack.build()), "genrate")


def _reset_of_a_child() -> None:
    model = stack.shard(stack.build())
    model(stack.batch())
    model.layers[0].reset_iter_state()


CASES: list[tuple[Callable[[], None], type[Exception], list[str]]] = [
    (_zero_dimensional, ValueError, ["temperature", "(1,)"]),
    (_not_contiguous, NotImplementedError, ["weight", "contiguous"]),
    (_module_list, ValueError, ["ModuleList", "forward"]),
    (_module_dict, ValueError, ["ModuleDict", "forward"]),
    (_no_module, ValueError, ["Tensor", "modules"]),
    (_twice, ValueError, ["Linear", "already sharded"]),
    (_twice_in_a_list, ValueError, ["Linear", "already sharded"]),
    (_parent_before_child, ValueError, ["up.weight", "inner modules first"]),
    (_tied_across_units, ValueError, ["tail.weight", "tied", "one unit"]),
    (_dp_mesh_dims, NotImplementedError, ["dp_mesh_dims", "mesh="]),
    (_placement_of_columns, NotImplementedError, ["shard_placement_fn", "weight", "Shard(0)"]),
    (_precision_of_another_type, ValueError, ["mp_policy", "bfloat16"]),
    (_offload_of_another_type, ValueError, ["offload_policy", "True"]),
    (_mixed_dtypes, ValueError, ["front.weight", "back.weight", "bfloat16"]),
    (_child_before_root, RuntimeError, ["layers.1", "root"]),
    (_copied, RuntimeError, ["deep-copied"]),
    (_prefetch_of_a_plain_module, ValueError, ["Linear"]),
    (_no_such_method, ValueError, ["genrate"]),
    (_reset_of_a_child, RuntimeError, ["root"]),
]


def _refusals(names: list[str]) -> list[tuple[str, str]]:
    """What each of these functions raises: type and message."""
    answers = []
    for name in names:
        try:
            globals()[name]()
            answers.append(("nothing", ""))
        except Exception as error:
            answers.append((type(error).__name__, str(error)))
    return answers


@pytest.fixture(scope="module")
def refusals(run_ranks) -> dict[str, tuple[str, str]]:
    names = [case.__name__ for case, *_ in CASES]
    return dict(zip(names, run_ranks(1, _refusals, names)[0], strict=True))


@pytest.mark.parametrize(("case", "error", "words"), CASES, ids=[c.__name__ for c, *_ in CASES])
def test_refused_by_name_and_with_the_remedy(refusals, case, error, words):
    kind, message = refusals[case.__name__]
    assert kind == error.__name__, message
    for word in words:
        assert word in message


def _bad_values_of_reshard_after_forward(values: list[Any]) -> list[tuple[str, str]]:
    answers = []
    for value in values:
        try:
            fully_shard(nn.Linear(2, 2), reshard_after_forward=value)
            answers.append(("nothing", ""))
        except Exception as error:
            answers.append((type(error).__name__, str(error)))
    return answers


def test_reshard_after_forward_takes_only_divisors_of_the_ranks(run_ranks):
    values = [0, -2, 3, 4, "yes", 2.0]
    for answers in run_ranks(2, _bad_values_of_reshard_after_forward, values):
        for value, (kind, message) in zip(values, answers, strict=True):
            assert kind == "ValueError"
            assert f"reshard_after_forward={value!r}" in message
            assert "divisor" in message
            assert "2 ranks" in message


def _works_once_the_cause_is_gone() -> list[str]:
    """Refuses, is told better, and must then work on the very same module."""
    failed = []
    corrections = {
        "0-d parameter": (WithScalar(), {}, lambda m: {"ignored_params": {m.temperature}}),
        "placement": (nn.Linear(2, 2), {"shard_placement_fn": lambda p: Shard(1)}, lambda m: {}),
        "precision": (nn.Linear(2, 2), {"mp_policy": "bf16"}, lambda m: {}),
        "offload": (nn.Linear(2, 2), {"offload_policy": "cpu"}, lambda m: {}),
        "dp_mesh_dims": (nn.Linear(2, 2), {"dp_mesh_dims": object()}, lambda m: {}),
        "reshard": (nn.Linear(2, 2), {"reshard_after_forward": 7}, lambda m: {}),
    }
    for name, (module, bad, better) in corrections.items():
        try:
            fully_shard(module, **bad)
            failed.append(f"{name}: not refused")
        except (ValueError, NotImplementedError):
            pass
        if isinstance(module, minifsdp.FSDPModule):
            failed.append(f"{name}: half sharded")
        try:
            fully_shard(module, **better(module))
            module(torch.ones(1, 2)).sum().backward()
        except Exception as error:
            failed.append(f"{name}: {error}")
    return failed


def test_a_refused_module_can_be_sharded_once_the_cause_is_gone(run_ranks):
    assert run_ranks(1, _works_once_the_cause_is_gone) == [[]]


def _tied_modules_as_one_unit() -> bool:
    model, plain = Tied(), Tied()
    plain.load_state_dict(model.state_dict())
    fully_shard([model.head, model.tail])
    fully_shard(model)
    x = torch.ones(2, 3)
    model(x).sum().backward()
    plain(x).sum().backward()
    return torch.equal(model.head.weight.grad.full_tensor(), plain.head.weight.grad)


def test_the_remedy_for_tied_parameters_works(run_ranks):
    assert run_ranks(1, _tied_modules_as_one_unit) == [True]


def test_without_a_process_group_the_remedy_is_named():
    with pytest.raises(RuntimeError, match="init_process_group"):
        fully_shard(nn.Linear(2, 2))


def _second_order() -> str:
    model = stack.shard(stack.build())
    try:
        model(stack.batch()).square().sum().backward(create_graph=True)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_graph_of_gradients_is_refused_instead_of_cut(run_ranks, world_size):
    for message in run_ranks(world_size, _second_order):
        assert "create_graph" in message
        assert "'root'" in message

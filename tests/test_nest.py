"""Tensors are found and replaced wherever forwards keep them, and nothing else is touched."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minifsdp.nest import cast_floating, grad_tensors, map_tensors, replace_grad_tensors


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    value: Any
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


@dataclasses.dataclass
class Derived:
    """A dataclass with a field that its constructor does not take."""

    value: Any
    steps: Any = dataclasses.field(init=False, default=None)


class ModelOutput(OrderedDict):
    """Like the outputs of a well-known library: a dict whose `update` is forbidden."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("update is forbidden")


def ones() -> torch.Tensor:
    return torch.ones(2)


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


WRAPPERS = {
    "list": lambda t: [t, 1, "text", None],
    "tuple": lambda t: (0, t),
    "dict": lambda t: {"a": t, "b": 3},
    "ordered dict": lambda t: OrderedDict(a=t, b=3),
    "default dict": lambda t: defaultdict(list, a=t),
    "forbidding dict": lambda t: ModelOutput(a=t),
    "namedtuple": lambda t: Pair(t, "x"),
    "dataclass": lambda t: Record(t, "kept"),
    "frozen dataclass": lambda t: Frozen(t),
    "nested": lambda t: {"a": [Pair(Record((t,)), [])]},
}


def leaves(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(lambda t: found.append(t) or t, value)
    return found


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_tensors_are_mapped_and_the_container_stays_its_type(wrap):
    before = wrap(ones())
    after = map_tensors(double, before)
    assert type(after) is type(before)
    assert [t.tolist() for t in leaves(after)] == [[2, 2]]
    assert [t.tolist() for t in leaves(before)] == [[1, 1]]


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_container_in_which_nothing_changes_is_returned_itself(wrap):
    before = wrap(ones())
    assert map_tensors(lambda t: t, before) is before


def test_values_that_are_no_tensors_are_the_same_objects():
    token = object()
    after = map_tensors(double, [ones(), token, {"a": (token, ones())}])
    assert after[1] is token
    assert after[2]["a"][0] is token


def test_a_dataclass_that_is_passed_itself_is_no_container():
    assert map_tensors(double, [Record, ones()])[0] is Record


def test_a_dataclass_field_outside_the_constructor_keeps_its_value():
    before = Derived(ones())
    before.steps = 7
    after = map_tensors(double, before)
    assert after.value.tolist() == [2, 2]
    assert after.steps == 7


def test_a_tensor_in_a_dataclass_field_outside_the_constructor_is_mapped():
    before = Derived(None)
    before.steps = ones()
    assert map_tensors(double, before).steps.tolist() == [2, 2]


def test_torchs_own_named_results_are_mapped():
    after = map_tensors(double, torch.tensor([[1.0, 3.0]]).max(dim=1))
    assert (after.values.tolist(), after.indices.tolist()) == ([6], [2])


def test_packed_sequences_keep_integers_and_are_cast():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2, 3), torch.ones(1, 3)])
    cast = cast_floating(packed, torch.float64)
    assert cast.data.dtype is torch.float64
    assert cast.batch_sizes.dtype is torch.int64


def test_only_floating_point_tensors_are_cast():
    value = {"x": ones(), "ids": torch.tensor([1]), "mask": torch.tensor([True])}
    cast = cast_floating(value, torch.bfloat16)
    assert [t.dtype for t in cast.values()] == [torch.bfloat16, torch.int64, torch.bool]
    complex_number = torch.ones(1, dtype=torch.complex64)
    assert cast_floating(complex_number, torch.bfloat16) is complex_number
    assert cast_floating(cast, torch.bfloat16) is cast


NESTS = st.recursive(
    st.sampled_from(["grad", "plain", None, 5]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Record, inner),
        st.builds(Frozen, inner),
    ),
    max_leaves=12,
)


def with_tensors(value: Any) -> Any:
    """`value` with words replaced by tensors of 0."""
    if value in ("grad", "plain"):
        return torch.zeros(1, requires_grad=value == "grad")
    if isinstance(value, dict):
        return {k: with_tensors(v) for k, v in value.items()}
    if isinstance(value, Pair):
        return Pair(*map(with_tensors, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(with_tensors, value))
    if isinstance(value, (Record, Frozen)):
        return type(value)(with_tensors(value.value))
    return value


@given(NESTS)
def test_grad_tensors_are_replaced_in_the_order_they_were_found(nest):
    value = with_tensors(nest)
    found = grad_tensors(value)
    assert all(t.requires_grad for t in found)
    numbered = [torch.tensor(float(i), requires_grad=True) for i in range(len(found))]
    replaced = replace_grad_tensors(value, numbered)
    assert [id(t) for t in grad_tensors(replaced)] == [id(t) for t in numbered]
    others = [id(t) for t in leaves(value) if not t.requires_grad]
    assert [id(t) for t in leaves(replaced) if not t.requires_grad] == others
    assert [id(t) for t in grad_tensors(value)] == [id(t) for t in found]

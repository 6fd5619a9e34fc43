"""What `minifsdp.verify` is made of, without ranks: bits, distances, units, bounds, the report."""

from __future__ import annotations

import json
import math

import planted_engines as planted
import pytest
import torch
from torch import nn

from minifsdp.verify import ulp
from minifsdp.verify.findings import Count, compare_pair, paired
from minifsdp.verify.judging import ALLOWANCE, Book, Rounding
from minifsdp.verify.observation import Kind, Observation, Place
from minifsdp.verify.report import Comparison, Difference, PhaseResult, Report
from minifsdp.verify.settings import Settings
from minifsdp.verify.units import plan_units

INF, NAN = float("inf"), float("nan")


# ---- bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_neighbouring_numbers_are_1_ulp_apart_across_zero_too(dtype):
    a = torch.tensor([1.0, -1.0, 0.0, 65504.0 if dtype == torch.float16 else 3e38], dtype=dtype)
    upward = torch.nextafter(a, torch.full_like(a, INF))
    assert ulp.distance(a, upward).tolist() == [1.0] * 4
    least = torch.nextafter(torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype))
    assert ulp.distance(least, -least).item() == 2


def test_zeros_of_two_signs_are_0_ulp_apart_and_not_the_same_bits():
    zero, minus = torch.zeros(1), -torch.zeros(1)
    assert ulp.differs(zero, minus).all() and ulp.distance(zero, minus).item() == 0


def test_nans_are_the_same_whatever_their_bits_and_infinitely_far_from_numbers():
    payload = torch.tensor([0x7FC00001, -0x400000], dtype=torch.int32).view(torch.float32)
    nans = torch.tensor([NAN, NAN])
    assert payload.isnan().all()
    assert not ulp.differs(payload, nans).any() and not ulp.distance(payload, nans).any()
    assert ulp.distance(nans, torch.tensor([1.0, INF])).tolist() == [INF, INF]


def test_the_distance_of_opposite_float64_does_not_overflow():
    big = torch.tensor([1e300], dtype=torch.float64)
    assert ulp.distance(big, -big).item() == 2 * float(big.view(torch.int64).item())


# ---- findings -----------------------------------------------------------------------------------


def seen(tensor, kind=Kind.GRADIENT, name="w", first_row=0, micro=0) -> Observation:
    return Observation(Place(kind, micro, "layers.0", name), tensor, first_row)


def compared(a, b, **place):
    (pair,) = paired([seen(a, **place)], [seen(b, **place)])
    return compare_pair(pair, step=0, position=0, rank=0)


def test_a_row_is_counted_in_the_whole_parameter():
    a, b = torch.zeros(3, 2), torch.zeros(3, 2)
    b[1, 1] = 1.0
    count, found = compared(a, b, first_row=6)
    assert count == Count(6, 1, 0)
    assert (found.rows, found.index, found.values) == ((7,), (7, 1), (0.0, 1.0))


def test_equal_nans_are_no_difference_and_are_counted():
    a = torch.tensor([1.0, NAN, INF])
    assert compared(a, a.clone()) == (Count(3, 0, 2), None)


def test_other_shapes_and_a_value_of_one_side_are_findings_not_errors():
    _, found = compared(torch.zeros(2), torch.zeros(3))
    assert found.odd == "shape (2,) against (3,)"
    _, found = compared(None, torch.zeros(3))
    assert found.odd == "only theirs has it, all zeros"
    (pair,) = paired([seen(torch.ones(1))], [])
    assert compare_pair(pair, 0, 0, 0)[1].odd == "only ours has it"


def test_the_same_numbers_in_another_dtype_are_a_finding():
    _, found = compared(torch.ones(2), torch.ones(2, dtype=torch.bfloat16))
    assert found.odd == "dtype fp32 against bf16"


def test_nothing_on_either_side_and_no_rows_are_nothing_to_tell():
    assert compared(None, None) == (Count(), None)
    assert compared(torch.zeros(0, 4), torch.zeros(0, 4)) == (Count(), None)


def test_parameters_in_forward_are_compared_where_both_engines_show_them():
    assert list(paired([seen(torch.zeros(1), Kind.GATHERED)], [])) == []


def test_each_use_of_a_module_is_compared_to_the_same_use():
    ours = [seen(torch.zeros(1), Kind.OUTPUT), seen(torch.ones(1), Kind.OUTPUT)]
    pairs = list(paired(ours, ours))
    assert [pair.theirs.tensor.item() for pair in pairs] == [0.0, 1.0]


def test_a_constant_factor_is_found_and_a_varying_one_is_not():
    b = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert compared(3 * b, b)[1].factor == pytest.approx(3)
    assert compared(b + 1, b)[1].factor is None
    assert compared(b * (1 + 1e-6), b)[1].factor is None


# ---- what rounding explains ---------------------------------------------------------------------


def off_by(relative: float, kind: Kind = Kind.GRADIENT):
    b = torch.tensor([1.0, 0.5], dtype=torch.float64)
    return compared(b * torch.tensor([1 + relative, 1.0], dtype=torch.float64), b, kind=kind)[1]


def test_an_engine_may_be_so_many_times_as_far_off_as_the_shaken_twin_and_no_more():
    for times, allowed in ((0.9 * ALLOWANCE, True), (1.1 * ALLOWANCE, False)):
        rounding, book = Rounding(), Book("ours", "theirs", exact=False)
        rounding.learn(0, [off_by(1e-6)])
        book.add(0, [off_by(times * 1e-6)], rounding)
        assert book.broken is not allowed
        assert book.phases[Kind.GRADIENT].share == pytest.approx(times / ALLOWANCE, rel=1e-3)


def test_nothing_may_differ_before_the_twin_has():
    rounding, book = Rounding(), Book("ours", "theirs", exact=False)
    rounding.learn(0, [off_by(1e-6)])
    book.add(0, [off_by(1e-15, Kind.OUTPUT)], rounding)
    assert book.broken and book.phases[Kind.OUTPUT].share == math.inf


def test_where_equal_bits_are_asked_one_ulp_is_a_difference():
    book = Book("ours", "theirs", exact=True)
    book.add(0, [off_by(1e-15)], Rounding())
    assert book.broken


# ---- units --------------------------------------------------------------------------------------


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])
        self.head = nn.Linear(4, 2)


def test_units_are_the_children_of_the_largest_list_and_the_root():
    plan = plan_units(Tower(), None)
    assert plan.units == ["blocks.0", "blocks.1"]
    units = {param.name: param.unit for param in plan.params}
    assert units["blocks.1.0.weight"] == "blocks.1" and units["head.bias"] == ""


def test_a_star_of_a_glob_is_one_part_of_a_name():
    assert plan_units(Tower(), "blocks.*").units == ["blocks.0", "blocks.1"]
    assert plan_units(Tower(), "blocks.*.0, head").units == ["blocks.0.0", "blocks.1.0", "head"]


def test_inner_units_come_before_the_ones_around_them():
    assert plan_units(Tower(), "blocks.0,blocks.0.0").units == ["blocks.0.0", "blocks.0"]


def test_a_function_may_say_which_modules_are_units():
    assert plan_units(Tower(), lambda model: [model.head]).units == ["head"]
    with pytest.raises(ValueError, match="no module of the model"):
        plan_units(Tower(), lambda model: [nn.Linear(1, 1)])


def test_a_tied_parameter_has_one_name_and_an_alias():
    tied = next(p for p in plan_units(planted.build_tied(), None).params if p.aliases)
    assert (tied.name, tied.aliases) == ("embed.weight", ("head.weight",))


# ---- settings and report ------------------------------------------------------------------------


def test_a_setting_that_is_none_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="no setting 'stepz'; it has steps, dtype"):
        Settings.of(stepz=3)
    with pytest.raises(ValueError, match="dtype is 'float': give one of fp64, fp32"):
        Settings.of(dtype="float")


def report(*, differing: int) -> Report:
    first = Difference(
        "ours", "theirs", 1, 0, "gradient", "layers.0", "layers.0.w", 3, (3, 1), 2, (2,),
        (1.0, NAN), INF, ("in that phase: all",), "something",
    )  # fmt: skip
    phase = PhaseResult("gradients", 10, differing, 3.0 * bool(differing), None, 0)
    comparison = Comparison("ours", "theirs", True, (phase,), first if differing else None)
    absent = Comparison("ours", "ddp", False, (), None, "it casts nothing")
    return Report("title", (comparison, absent), ("a note",))


def test_the_report_says_what_differs_and_what_was_not_compared():
    said = str(report(differing=2))
    assert "2 of 10, 3 ULP" in said and "DIFFERS" in said
    assert "parameter layers.0.w, row 3, element [3, 1], owned by rank 2" in said
    assert "ddp was not compared: it casts nothing" in said and "note: a note" in said
    assert report(differing=0).equal and "EQUAL BITS" in str(report(differing=0))


def test_json_has_no_bare_nan():
    told = json.loads(report(differing=2).to_json(), parse_constant=pytest.fail)
    assert told["comparisons"][0]["first"]["values"] == [1.0, "nan"]
    assert told["comparisons"][1]["verdict"] == "not compared"

"""Claims about the learning rate's curve."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama.finetune.schedule import lr_at

TOTAL, WARMUP, LR, MIN_LR = 100, 10, 2e-3, 1e-4
CURVE = {"total_steps": TOTAL, "warmup_steps": WARMUP, "lr": LR, "min_lr": MIN_LR}


def test_warm_up_is_linear_and_its_first_step_is_not_wasted():
    rates = [lr_at(step, **CURVE) for step in range(WARMUP + 1)]
    assert rates[0] > 0
    assert rates == pytest.approx([LR * (step + 1) / (WARMUP + 1) for step in range(WARMUP + 1)])


def test_the_peak_is_reached_once_at_the_end_of_the_warm_up():
    rates = [lr_at(step, **CURVE) for step in range(TOTAL)]
    assert rates.index(max(rates)) == WARMUP
    assert rates.count(LR) == 1 == rates.count(max(rates))


def test_the_fall_is_half_a_cosine():
    halfway = (TOTAL + WARMUP) // 2
    assert lr_at(halfway, **CURVE) == pytest.approx((LR + MIN_LR) / 2)
    a_third = WARMUP + (TOTAL - WARMUP) // 3
    expected = MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi / 3)) / 2
    assert lr_at(a_third, **CURVE) == pytest.approx(expected)


def test_min_lr_is_where_the_curve_ends_and_holds_afterwards():
    assert lr_at(TOTAL - 1, **CURVE) > MIN_LR
    assert all(lr_at(step, **CURVE) == MIN_LR for step in range(TOTAL, 3 * TOTAL))


def test_without_warm_up_the_first_step_has_the_peak():
    assert lr_at(0, total_steps=1, warmup_steps=0, lr=LR) == LR


@settings(deadline=None)
@given(st.integers(1, 500), st.data())
def test_every_step_has_a_rate_above_zero_and_at_most_the_peak(total_steps, data):
    warmup_steps = data.draw(st.integers(0, total_steps - 1))
    rates = [
        lr_at(step, total_steps=total_steps, warmup_steps=warmup_steps, lr=LR)
        for step in range(total_steps)
    ]
    assert all(0 < rate <= LR for rate in rates)
    assert rates[: warmup_steps + 1] == sorted(rates[: warmup_steps + 1])
    assert rates[warmup_steps:] == sorted(rates[warmup_steps:], reverse=True)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"step": -1}, "step -1 is negative"),
        ({"warmup_steps": TOTAL}, r"warmup_steps \(100\) .* below total_steps \(100\)"),
        ({"warmup_steps": -1}, r"warmup_steps \(-1\)"),
        ({"total_steps": 0, "warmup_steps": 0}, r"total_steps \(0\)"),
        ({"min_lr": 1.0}, r"min_lr \(1.0\) .* at most lr"),
        ({"min_lr": -1.0}, r"min_lr \(-1.0\)"),
    ],
)
def test_numbers_that_describe_no_curve_are_refused(changed, reason):
    with pytest.raises(ValueError, match=reason):
        lr_at(**({"step": 0} | CURVE | changed))


def test_a_line_falls_evenly_and_a_constant_stays():
    line = [lr_at(step, **CURVE, curve="linear") for step in range(TOTAL)]
    falls = [a - b for a, b in zip(line[WARMUP:], line[WARMUP + 1 :], strict=False)]
    assert falls == pytest.approx([(LR - MIN_LR) / (TOTAL - WARMUP)] * (TOTAL - WARMUP - 1))
    rest = [lr_at(step, **CURVE, curve="constant") for step in range(TOTAL)]
    assert rest[WARMUP:] == [LR] * (TOTAL - WARMUP)
    assert rest[:WARMUP] == line[:WARMUP]


def test_an_unknown_curve_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'square'.*cosine, linear, constant"):
        lr_at(0, **CURVE, curve="square")

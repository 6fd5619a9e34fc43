"""Axes, thinning, smoothing and figures of the page."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llama.finetune.page.chart import figure_text, log_axis, nice_axis, tick_texts
from llama.finetune.page.headline import bytes_text, count_text, seconds_text
from llama.finetune.page.series import Series, smooth, thin

ranges = st.floats(-1e299, 1e299)


@given(ranges, ranges)
def test_an_axis_covers_its_values_with_a_few_ticks_of_different_names(one, other):
    low, high = sorted((one, other))
    axis = nice_axis(low, high)
    slack = (axis.high - axis.low) * 1e-6
    assert axis.low - slack <= low and high <= axis.high + slack
    assert 2 <= len(axis.ticks) <= 9
    assert len(set(tick_texts(axis.ticks))) == len(axis.ticks)


def test_axes_have_round_numbers():
    assert tick_texts(nice_axis(0.61, 2.4).ticks) == ["0.5", "1", "1.5", "2", "2.5"]
    assert tick_texts(nice_axis(0, 5e-5).ticks) == ["0", "1e-5", "2e-5", "3e-5", "4e-5", "5e-5"]
    assert tick_texts(nice_axis(0, 8900).ticks) == ["0", "2k", "4k", "6k", "8k", "10k"]
    assert tick_texts(log_axis(0.02, 6).ticks) == ["0.01", "0.1", "1", "10"]
    assert tick_texts(log_axis(0.3, 6).ticks) == ["0.2", "0.5", "1", "2", "5", "10"]


@given(st.lists(st.one_of(st.floats(-9, 9), st.just(math.nan)), max_size=300))
def test_thinning_keeps_ends_and_extremes(values):
    kept = thin(np.array(values, np.float64), points=40)
    finite = [value for value in values if value == value]
    assert len(kept) <= 40
    if finite:
        drawn = [values[index] for index in kept]
        assert (drawn[0], drawn[-1]) == (finite[0], finite[-1])
        assert (min(drawn), max(drawn)) == (min(finite), max(finite))


def test_smoothing_neither_lags_nor_shrinks_and_skips_what_is_missing():
    steps = np.arange(101)
    flat = np.where(steps % 7 == 3, np.nan, 2.0)
    smoothed = smooth(Series(steps, flat), 10).values
    assert np.array_equal(np.isnan(smoothed), np.isnan(flat))
    np.testing.assert_allclose(smoothed[~np.isnan(flat)], 2.0)
    line = smooth(Series(steps, steps * 1.0), 10).values
    np.testing.assert_allclose(line[50], 50.0)
    noise = np.random.default_rng(0).normal(size=1000)
    assert smooth(Series(np.arange(1000), noise), 20).values.std() < 0.3


def test_figures_read_as_people_write_them():
    assert [figure_text(v) for v in (0.79081, 8176.4, 12.0)] == ["0.7908", "8,176", "12"]
    assert [figure_text(v) for v in (5e-5, -1.5e20, math.nan)] == ["5e-5", "-1.5e20", "\N{EN DASH}"]
    assert [seconds_text(v) for v in (0.4567, 59.96, 75, 6612)] == [
        "0.457 s",
        "60 s",
        "1 min 15 s",
        "1 h 50 min",
    ]
    assert [bytes_text(v) for v in (2**20, 41_234_567_890)] == ["1 MiB", "38.4 GiB"]
    assert [count_text(v) for v in (512, 98_816, 6_738_415_616)] == ["512", "98.8k", "6.74B"]

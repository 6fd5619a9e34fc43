"""Claims about which steps are left out."""

import math

import pytest

from llama.finetune.guard import Guard

GOOD = (2.0, 1.0)


def after(steps: int, **settings) -> Guard:
    guard = Guard(**{"patience": 3, "spike": 4.0} | settings)
    for step in range(1, steps + 1):
        assert guard.judge(step, *GOOD) is None
    return guard


@pytest.mark.parametrize("bad", [(math.nan, 1.0), (2.0, math.inf), (-math.inf, math.inf)])
def test_a_step_that_is_not_finite_is_left_out_and_named(bad):
    assert after(0).judge(1, *bad) == f"loss {bad[0]}, gradient norm {bad[1]}"


def test_a_spike_of_either_figure_is_left_out_once_there_is_enough_to_compare_with():
    assert after(9).judge(10, 100.0, 1.0) is None
    assert after(10).judge(11, 8.1, 1.0) == "loss 8.1 is a spike, over 4 times 2"
    assert after(10).judge(11, 2.0, 4.1) == "gradient norm 4.1 is a spike, over 4 times 1"
    assert after(10).judge(11, 8.0, 4.0) is None
    assert after(10, spike=0.0).judge(11, 1e9, 1e9) is None


def test_what_was_left_out_does_not_move_what_is_usual():
    guard = after(10, patience=100)
    for step in range(11, 60):
        assert guard.judge(step, 9.0, 1.0)


def test_unfit_steps_in_a_row_end_training_and_one_fit_step_between_forgives_them():
    guard = after(0, patience=2)
    assert guard.judge(1, math.nan, 1.0)
    assert guard.judge(2, *GOOD) is None
    assert guard.judge(3, math.nan, 1.0)
    with pytest.raises(FloatingPointError, match=r"step 4: loss inf.*the 2 steps up to it"):
        guard.judge(4, math.inf, 1.0)


def test_a_restored_guard_judges_as_the_one_that_was_saved():
    guard = after(12)
    assert guard.judge(13, math.nan, 1.0)
    other = Guard(3, 4.0)
    other.restore(guard.state())
    assert other.state() == guard.state()
    assert other.judge(14, 8.1, 1.0)
    with pytest.raises(FloatingPointError):
        other.judge(15, 8.1, 1.0)

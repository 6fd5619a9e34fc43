"""Who is missing, judged from made-up statuses of ranks, a second apart."""

from __future__ import annotations

import math
from itertools import count

import pytest

from minifsdp.arrivals import Arrivals, Place, Status, Verdict, names

TIMEOUT = 5.0


class Ranks:
    """Ranks that stand where they are put, and a judge that looks at them each second."""

    def __init__(self, world_size: int) -> None:
        self.arrivals = Arrivals(world_size, TIMEOUT)
        self.statuses = [Status()] * world_size
        self._beats = count(1)
        self.mute: set[int] = set()
        for rank in range(world_size):
            self.put(rank, (1, 0, 0))

    def put(self, rank: int, place: Place, **about: object) -> None:
        where = about.pop("where", f"step {place[0]}, phase {place[1]}")
        said = {"process": f"process {rank}", **about}
        self.statuses[rank] = Status(next(self._beats), place, where, **said)

    def look(self, seconds: float = 1.0) -> Verdict | None:
        for rank, status in enumerate(self.statuses):
            if rank not in self.mute:
                self.statuses[rank] = status._replace(beat=next(self._beats))
        return self.arrivals.look(self.statuses, seconds)

    def wait(self, seconds: int) -> Verdict:
        """The verdict that is due after so many seconds, and not before."""
        for _ in range(seconds - 1):
            assert self.look() is None
        verdict = self.look()
        assert verdict is not None
        return verdict

    def wait_in_vain(self, seconds: int) -> None:
        for _ in range(seconds):
            assert self.look() is None


def test_a_rank_that_others_have_passed_is_late_after_the_timeout() -> None:
    ranks = Ranks(3)
    ranks.look()
    ranks.put(0, (1, 1, 0))
    ranks.put(2, (1, 1, 0))
    ranks.look()  # the first that sees it behind
    verdict = ranks.wait(5)
    assert verdict == Verdict(
        "rank 1 has not arrived: for 6 s at step 1, phase 0 (5 s allowed); "
        "ranks 0, 2 wait at step 1, phase 1",
        missing=[1],
        stacks=[1, 0],
        living=[0, 1, 2],
    )


@pytest.mark.parametrize("place", [(1, 0, 1), (1, 1, 0), (2, 0, 0)])
def test_an_event_a_phase_or_a_step_more_is_ahead(place: Place) -> None:
    ranks = Ranks(2)
    ranks.put(1, place)
    ranks.look()
    assert ranks.wait(5).missing == [0]


def test_a_rank_is_late_from_when_others_passed_it_not_from_when_it_stopped() -> None:
    """Else the last to come out of a long phase would be taken for missing."""
    ranks = Ranks(2)
    ranks.wait_in_vain(12)
    ranks.put(0, (1, 1, 0))
    ranks.look()
    assert ranks.wait(5).missing == [1]


def test_a_rank_that_moves_is_not_late_however_far_behind() -> None:
    ranks = Ranks(2)
    ranks.put(0, (9, 0, 0))
    for event in range(6):
        ranks.put(1, (1, 0, event))
        ranks.wait_in_vain(4)


def test_those_that_are_as_late_but_for_a_look_are_named_as_well() -> None:
    ranks = Ranks(3)
    ranks.put(0, (1, 1, 0))
    ranks.put(2, (1, 0, 1))
    ranks.look()
    ranks.put(1, (1, 0, 1))  # a second after rank 2, to the same place
    ranks.look()
    verdict = ranks.wait(4)
    assert verdict.missing == [1, 2] and verdict.stacks == [1, 2, 0]


def test_those_that_are_as_silent_but_for_a_look_are_named_as_well() -> None:
    ranks = Ranks(3)
    ranks.look()
    ranks.mute = {2}
    ranks.look()
    ranks.mute = {1, 2}
    verdict = ranks.wait(4)
    assert verdict.missing == [1, 2] and verdict.stacks == [0]


def test_only_the_hindmost_is_blamed() -> None:
    """Rank 1 is behind rank 2, but may be waiting for rank 0 as well."""
    ranks = Ranks(3)
    ranks.put(1, (1, 1, 0))
    ranks.put(2, (1, 1, 3), where="further")
    ranks.look()
    verdict = ranks.wait(5)
    assert verdict.missing == [0]
    assert verdict.report.endswith("; rank 2 waits at further; rank 1 waits at step 1, phase 1")


def test_nobody_is_blamed_while_the_hindmost_has_patience_left() -> None:
    ranks = Ranks(3)
    ranks.put(0, (1, 0, 0), patience_seconds=8.0)
    ranks.put(1, (1, 1, 0))
    ranks.put(2, (1, 2, 0))
    ranks.look()
    verdict = ranks.wait(8)
    assert verdict.missing == [0] and "(8 s allowed)" in verdict.report


def test_patience_without_end_is_without_end() -> None:
    ranks = Ranks(2)
    ranks.put(0, (1, 0, 0), patience_seconds=math.inf)
    ranks.put(1, (1, 1, 0))
    ranks.wait_in_vain(200)


def test_all_may_stand_still_for_ten_times_as_long() -> None:
    ranks = Ranks(2)
    ranks.look()
    verdict = ranks.wait(50)
    assert verdict.missing == [] and verdict.stacks == [0]
    still = "no rank moves: each seems to wait for another; ranks 0-1 wait at step 1, phase 0"
    assert verdict.report == still


def test_all_may_stand_still_for_the_patience_of_their_phase() -> None:
    ranks = Ranks(2)
    for rank in (0, 1):
        ranks.put(rank, (1, 1, 0), patience_seconds=70.0)
    ranks.look()
    assert ranks.wait(70).missing == []


def test_a_silent_rank_is_told_from_a_late_one() -> None:
    ranks = Ranks(3)
    ranks.look()
    ranks.mute.add(2)
    verdict = ranks.wait(5)
    assert verdict.report.startswith(
        "rank 2 is silent: nothing heard for 5 s (5 s allowed), last at step 1, phase 0, "
        "from process 2: killed"
    )
    assert verdict.missing == [2] and verdict.living == [0, 1] and verdict.stacks == [0]


def test_while_a_rank_is_silent_no_other_is_called_late() -> None:
    ranks = Ranks(3)
    ranks.put(0, (1, 1, 0))
    ranks.look()
    ranks.mute.add(1)
    assert ranks.wait(5).missing == [1]


def test_a_rank_that_never_said_anything_is_missing() -> None:
    ranks = Ranks(2)
    ranks.mute.add(1)
    ranks.statuses[1] = Status()
    said = "rank 1 has not come to the watchdog: nothing heard for 5 s (5 s allowed)"
    assert ranks.wait(5).report == f"{said}; rank 0 waits at step 1, phase 0"


def test_a_rank_that_has_left_is_not_missing() -> None:
    ranks = Ranks(2)
    ranks.put(1, (1, 0, 0), end="")
    ranks.mute.add(1)
    for step in range(2, 20):
        ranks.put(0, (step, 0, 0))
        ranks.look()
    verdict = ranks.wait(50)
    assert verdict.report.startswith("rank 1 has left the run at step 1, phase 0; rank 0 waits at")


def test_those_who_stand_still_after_an_error_end_in_the_usual_time() -> None:
    ranks = Ranks(3)
    ranks.look()
    ranks.put(1, (1, 1, 0), end="ValueError: no")
    left = "rank 1 has left the run at step 1, phase 1 with ValueError: no; ranks 0, 2 wait at"
    assert ranks.wait(5).report.startswith(left)


def test_of_those_who_left_only_the_ones_with_an_error_are_named() -> None:
    ranks = Ranks(4)
    ranks.look()
    ranks.put(0, (1, 1, 0), end="")
    ranks.put(2, (1, 1, 0), end="ValueError: no")
    report = ranks.wait(5).report
    assert report.startswith("rank 2 has left the run at step 1, phase 1 with ValueError: no; ")


def test_nobody_judges_a_run_that_all_have_left() -> None:
    ranks = Ranks(2)
    for rank in (0, 1):
        ranks.put(rank, (1, 0, 0), end="")
    ranks.wait_in_vain(200)


def test_a_report_of_many_ranks_is_short() -> None:
    ranks = Ranks(64)
    for rank in range(1, 64):
        ranks.put(rank, (2, 0, rank // 8), where=f"unit {rank // 8}")
    ranks.look()
    assert ranks.wait(5).report == (
        "rank 0 has not arrived: for 5 s at step 1, phase 0 (5 s allowed); "
        "ranks 56-63 wait at unit 7; ranks 48-55 wait at unit 6; ranks 40-47 wait at unit 5; "
        "ranks 32-39 wait at unit 4; 31 more elsewhere"
    )


def test_names() -> None:
    assert names([3]) == "rank 3 is"
    assert names([12, 0, 1, 2], "has", "have") == "ranks 0-2, 12 have"

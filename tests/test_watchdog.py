"""Real ranks hang, freeze, die and dawdle under a watchdog of a few seconds.

Each scenario is a function of tests/watched.py. Several run at a time, in processes of their own
that no launcher looks after; tests then read how each rank ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import small_net
import torch.distributed as dist
import watched

from minifsdp import events
from minifsdp.collectives import futex
from minifsdp.watchdog import EXIT_CODE, Watchdog

TIMEOUT = watched.TIMEOUT
ROOT = Path(__file__).parents[1]
STAGE = Path(__file__).with_name("stage_watched.py")
SCENARIOS = {  # the ranks that each takes
    "hangs_in_forward backend": 3,
    "hangs_in_forward shared": 3,
    "hangs_in_backward shared": 2,
    "freezes backend": 2,
    "dies": 3,
    "hang_in_data": 3,
    "leaves_out_a_unit backend": 2,
    "leaves_out_a_unit shared": 2,
    "waits_for_each_other": 2,
    "raises": 3,
    "comes_late": 2,
    "loses_the_store": 2,
    "store_freezes": 2,
    "machine_sleeps": 2,
    "saves_for_long": 3,
    "all_load_for_long": 2,
    "moves_slowly shared": 2,
    "leaves_early": 2,
}


class Ending(NamedTuple):
    """How the ranks of a scenario ended."""

    codes: list[int]
    outputs: list[str]
    seconds: float  # from the harm, if there was any, until all that could had ended

    @property
    def output(self) -> str:
        return "\n".join(self.outputs)


EndingOf = Callable[[str], Ending]


def environment(**more: str) -> dict[str, str]:
    """That of a shell in which nothing runs."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    about = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return inherited | about | more


@pytest.fixture(scope="module")
def ending_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndingOf]:
    folder = tmp_path_factory.mktemp("watched")
    command = [sys.executable, str(STAGE), json.dumps(SCENARIOS), str(folder)]
    process = subprocess.Popen(command, env=environment(), start_new_session=True)

    def wait(scenario: str) -> Ending:
        file = folder / scenario.replace(" ", "-") / "ending.json"
        while not file.exists():
            assert process.poll() is None or file.exists()
            time.sleep(0.05)
        return Ending(**json.loads(file.read_text()))

    yield wait
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with ranks that it has started
    process.wait()


def assert_reported(ending: Ending, *parts: str, stands_in: str = "") -> None:
    """All ended in time with the watchdog's code, after one report that has `parts`."""
    assert all(code in (EXIT_CODE, -signal.SIGKILL) for code in ending.codes), ending
    assert TIMEOUT - 0.5 < ending.seconds < TIMEOUT + 3, ending
    lines = [line for line in ending.output.splitlines() if line.startswith("watchdog: ")]
    reports = [line for line in lines if "stands here" not in line and "the one" not in line]
    assert len(reports) == 1, ending.output
    assert all(part in reports[0] for part in parts), reports
    if stands_in:
        missing = parts[0].removeprefix("watchdog: rank ")[0]
        own = ending.outputs[int(missing)]
        assert f"watchdog: rank {missing}: this rank is the one" in own
        assert f", in {stands_in}\n" in own.partition("stands here")[2]


# ---- Who is missing -------------------------------------------------------------------------


@pytest.mark.parametrize("collectives", ["backend", "shared"])
def test_a_rank_that_hangs_in_a_forward_is_named_with_its_step_and_unit(
    collectives: str, ending_of: EndingOf
) -> None:
    ending = ending_of(f"hangs_in_forward {collectives}")
    missing = "watchdog: rank 2 has not arrived: for 2 s at step 2, training, forward of blocks.1"
    waiting = "; ranks 0-1 wait at step 2, training, forward of blocks."
    assert_reported(ending, missing, "(2 s allowed)", waiting, stands_in="hang")
    assert "rank 0 stands here" in ending.outputs[0]
    assert "stands here" not in ending.outputs[1]  # as rank 0 does


def test_a_rank_that_hangs_in_a_backward_is_named_with_its_unit(ending_of: EndingOf) -> None:
    missing = "watchdog: rank 1 has not arrived: for 2 s at step 2, training, backward of blocks.2"
    waiting = "rank 0 waits at step 2, training, backward of blocks."
    assert_reported(ending_of("hangs_in_backward shared"), missing, waiting, stands_in="hang")


def test_all_speak_before_one_ends_and_a_launcher_kills_the_others(ending_of: EndingOf) -> None:
    ending = ending_of("hang_in_data")
    missing = "watchdog: ranks 1-2 have not arrived: for 2 s at step 1, reading data (2 s allowed)"
    assert_reported(ending, missing, "rank 0 waits at step 1, training")
    for rank in (1, 2):
        assert f"watchdog: rank {rank}: this rank is the one" in ending.outputs[rank]
        assert ", in hang\n" in ending.outputs[rank].partition("stands here")[2]
    assert "watchdog: rank 0 stands here" in ending.outputs[0]


def test_a_frozen_rank_is_named_and_ends_once_it_thaws(ending_of: EndingOf) -> None:
    where = "at step 2, training, forward of blocks.1"
    ending = ending_of("freezes backend")
    assert ending.codes[1] in (1, EXIT_CODE)  # by the others' verdict, or as they have gone
    ending = ending._replace(codes=ending.codes[:1])
    assert_reported(ending, "watchdog: rank 1 ", where, "rank 0 waits at ")


def test_a_killed_rank_is_named_where_nothing_else_tells_of_it(ending_of: EndingOf) -> None:
    silent = "watchdog: rank 2 is silent: nothing heard for 2 s (2 s allowed), last at step 3, "
    ending = ending_of("dies")
    assert_reported(ending, silent, "training, from process ", "ranks 0-1 wait at step 3")
    assert ending.codes == [EXIT_CODE, EXIT_CODE, -signal.SIGKILL]


def test_a_rank_that_never_began_is_named_and_ends_if_it_does(ending_of: EndingOf) -> None:
    never = "watchdog: rank 1 has not come to the watchdog: nothing heard for 2 s"
    assert_reported(ending_of("comes_late"), never, "rank 0 waits at step 1, training")


def test_a_rank_that_leaves_out_a_unit_is_named_where_messages_still_match(
    ending_of: EndingOf,
) -> None:
    missing = "watchdog: rank 1 has not arrived: for 2 s at step 2, training, backward of blocks.0"
    waiting = "rank 0 waits at step 2, training, backward of blocks.1"
    ending = ending_of("leaves_out_a_unit backend")
    assert_reported(ending, missing, waiting, stands_in="leaves_out_a_unit")


def test_shared_messages_tell_sooner_of_a_unit_that_was_left_out(ending_of: EndingOf) -> None:
    ending = ending_of("leaves_out_a_unit shared")
    assert ending.codes == [1, 1] and ending.seconds < TIMEOUT
    assert "every rank must run the same units" in ending.output
    assert "watchdog: " not in ending.output


def test_ranks_that_wait_for_each_other_are_told_apart_from_a_late_one(ending_of: EndingOf) -> None:
    still = "watchdog: no rank moves: each seems to wait for another; ranks 0-1 wait at step 5, "
    ending = ending_of("waits_for_each_other")
    assert_reported(ending, still, "evaluating")
    assert ", in recv\n" in ending.output


def test_a_rank_that_raised_is_named_with_its_error(ending_of: EndingOf) -> None:
    ending = ending_of("raises")
    assert ending.codes == [EXIT_CODE, 1, EXIT_CODE]
    left = "watchdog: rank 1 has left the run at step 3, training with ValueError: no such example"
    waiting = "ranks 0, 2 wait at step 3, training"
    assert_reported(ending._replace(codes=ending.codes[::2]), left, waiting)


def test_a_run_whose_store_is_gone_ends(ending_of: EndingOf) -> None:
    lost = "watchdog: rank 1 cannot reach the run's store for 2 s (2 s allowed): "
    assert_reported(ending_of("loses_the_store"), lost, "; step 3, training")


def test_a_run_whose_store_hangs_ends(ending_of: EndingOf) -> None:
    ending = ending_of("store_freezes")
    assert ending.codes == [EXIT_CODE, EXIT_CODE]
    assert ending.seconds < TIMEOUT + 3
    for rank, output in enumerate(ending.outputs):
        assert f"watchdog: rank {rank} cannot reach the run's store" in output
        assert "it does not answer; step 3, training" in output


# ---- Who is not -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scenario",
    [
        "saves_for_long",
        "all_load_for_long",
        "moves_slowly shared",
        "leaves_early",
        "machine_sleeps",
    ],
)
def test_nobody_is_missing_while(scenario: str, ending_of: EndingOf) -> None:
    ending = ending_of(scenario)
    assert set(ending.codes) == {0}, ending.output
    assert "watchdog" not in ending.output


# ---- Under torchrun -------------------------------------------------------------------------


@pytest.mark.slow
def test_torchrun_starts_again_ranks_that_a_watchdog_ended(tmp_path: Path) -> None:
    variables = environment(STAMP=str(tmp_path / "stamp"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = [watched.__file__, "hangs_in_the_first_start"]
    command = [*launcher, "--nproc-per-node=2", "--max-restarts=1", *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=variables)
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stderr.count("watchdog: rank 1 has not arrived: for 2 s at step 2, training") == 1
    assert "watchdog: rank 1: this rank is the one" in done.stderr
    assert done.stdout.count("trained") == 2


# ---- The object -----------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_timeout_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=f"timeout_seconds is {seconds}: give seconds, or 0"):
        Watchdog(seconds)


def test_a_patience_that_is_none_is_refused() -> None:
    with Watchdog(0) as watchdog, pytest.raises(ValueError, match="patience_seconds is 0: give"):
        watchdog.at(1, "training", patience_seconds=0)


def test_a_watchdog_is_told_of_phases_only_while_it_watches() -> None:
    watchdog = Watchdog(5)
    with pytest.raises(RuntimeError, match="outside of the watchdog"):
        watchdog.at(1, "training")
    with watchdog:
        watchdog.at(1, "training")
        with pytest.raises(RuntimeError, match="entered already"):
            watchdog.__enter__()
    with pytest.raises(RuntimeError, match="outside of the watchdog"):
        watchdog.at(1, "training")


def test_ranks_without_a_store_to_meet_in_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="set MASTER_ADDR and MASTER_PORT, as torchrun does"):
        Watchdog(5).__enter__()


def test_watchdogs_of_one_store_do_not_hear_each_others_ranks() -> None:
    store, before = dist.HashStore(), list(events.listeners)
    watchdogs = [Watchdog(5, store), Watchdog(5, store)]
    for watchdog in watchdogs:
        watchdog._watch(2)
    events.listeners[:] = before
    watchdogs[0]._store.set("0", "of the first")
    assert watchdogs[0]._store.check(["0"]) and not watchdogs[1]._store.check(["0"])


def test_steps_and_the_phases_of_each_are_counted() -> None:
    with Watchdog(0) as watchdog:
        places = []
        for step, phase in [(1, "reading"), (1, "training"), (1, "saving"), (2, "reading")]:
            watchdog.at(step, phase)
            places.append((watchdog._here.steps, watchdog._here.phases))
    assert places == [(1, 0), (1, 1), (1, 2), (2, 0)]


def test_a_thread_in_a_collective_waits_and_one_that_works_does_not() -> None:
    watchdog, word = Watchdog(5), ctypes.c_int64(0)
    for work, waits in (
        (lambda: futex.wait(ctypes.addressof(word), 0, 1.0), True),
        (lambda: time.sleep(1.0), False),
    ):
        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.2)
        watchdog._watched = thread.ident
        assert watchdog._waits() is waits
        thread.join()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "watchdog" in thread.name]


@pytest.mark.parametrize(("seconds", "world_size"), [(5, 1), (0, 2)])
def test_no_thread_runs_for_one_rank_or_when_off(
    seconds: int, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    with Watchdog(seconds) as watchdog:
        watchdog.at(1, "training")
        assert not threads() and not events.listeners


def meet(path: Path, first_to_leave: int) -> list[str]:
    """Enter and leave in an order; what was heard of the other rank meanwhile."""
    heard: list[str] = []
    rank, store = dist.get_rank(), dist.FileStore(str(path), 2)
    with Watchdog(6.0, store) as watchdog:
        assert len(threads()) == 2
        model = small_net.build()
        watchdog.at(7, "training")
        model(small_net.data())
        while not heard or "step 7, training, forward of " not in heard[-1]:
            heard.append(watchdog._statuses[1 - rank].where)
            time.sleep(0.02)
        dist.barrier()
        if rank != first_to_leave:
            time.sleep(1.0)
    assert not threads() and not events.listeners
    return [heard[-1]]


@pytest.mark.parametrize("first_to_leave", [0, 1])
def test_ranks_meet_in_a_store_that_is_given_and_leave_in_any_order(
    first_to_leave: int, run_ranks: Callable[..., list], tmp_path: Path
) -> None:
    for heard in run_ranks(2, meet, tmp_path / "store", first_to_leave):
        assert heard == ["step 7, training, forward of blocks.1, then reshard of blocks.1"]

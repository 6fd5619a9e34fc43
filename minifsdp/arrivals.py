"""Which rank do the others wait for? Judged from what all ranks say of themselves, over and over.

[Note: who is missing]
A rank's place counts what it has passed: steps, then phases of that step, then the engine's events
of that phase. Each look at all ranks seeks one of these, in this order:

- A rank is silent: its heartbeat has stopped, for it was killed or frozen, or its machine has gone.
- A rank is late: none has passed less, others have passed more, and it has not moved since then.
  One that is behind but not the hindmost may itself be waiting, so it is not blamed; and nobody is
  while the hindmost has patience left for its phase, in which it may work for all.
- Nobody moves, as where ranks wait for each other. All may be in one long phase, so that takes ten
  times as long, or what patience the phase has; the usual time if a rank has left with an error.

Durations are sums of times between looks of one rank: clocks of machines are never compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_STILL_FACTOR = 10  # how much longer than one rank may be late, all may stand still
_MOST_STACKS, _MOST_PLACES = 4, 4  # in a report
Place = tuple[int, int, int, bool]


class Status(NamedTuple):
    """What a rank says of itself; by default, of one that has not said anything."""

    beat: int = 0
    """Grows with every word of it."""
    place: Place = (0, 0, 0, False)
    """Steps passed, phases of that step, events of that phase, whether it waits for others."""
    where: str = "nowhere"
    patience_seconds: float | None = None
    """How long others may wait for it in this phase; None: the usual timeout."""
    end: str | None = None
    """None while it runs, "" once it has left the run, or the error that it left with."""
    process: str = ""


class Verdict(NamedTuple):
    """Why the run must end."""

    report: str
    missing: list[int]
    stacks: list[int]
    """The ranks that are to show where in Python they stand."""
    living: list[int]
    """The ranks that will read this."""


class _Rank:
    """One rank, and for how many seconds it has done nothing, in three senses."""

    def __init__(self) -> None:
        self.status = Status()
        self.silent = self.still = self.late = 0.0
        self._was_behind = False

    def see(self, status: Status, behind: bool, elapsed: float) -> None:
        moved, spoke = status.place != self.status.place, status.beat != self.status.beat
        self.silent = 0.0 if spoke else self.silent + elapsed
        self.still = 0.0 if moved else self.still + elapsed
        self.late = self.late + elapsed if behind and self._was_behind and not moved else 0.0
        self.status, self._was_behind = status, behind


class Arrivals:
    """Follows what all ranks say, as one of them hears it."""

    def __init__(self, world_size: int, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._ranks = [_Rank() for _ in range(world_size)]

    def look(self, statuses: list[Status], elapsed_seconds: float) -> Verdict | None:
        """Take in what all ranks say, so long after the last look; a reason to end, if any."""
        places = [status.place for status in statuses if status.end is None]
        if not places:
            return None
        for rank, status in zip(self._ranks, statuses, strict=True):
            rank.see(status, status.place < max(places), elapsed_seconds)
        running = {r: rank for r, rank in enumerate(self._ranks) if rank.status.end is None}
        hindmost = [r for r, rank in running.items() if rank.status.place == min(places)]
        silent = _overdue({r: rank.silent / self._timeout for r, rank in running.items()})
        late = _overdue({r: self._ranks[r].late / self._patience(r) for r in hindmost})
        missing = silent or late
        if silent:
            report = self._why_silent(silent)
        elif missing:
            report = self._why_late(missing)
        elif all(rank.still >= self._longest_still(r) for r, rank in running.items()):
            report = self._why_still()
        else:
            return None
        living = [r for r, rank in running.items() if rank.silent < self._timeout / 2]
        waiting = [r for r in running if r not in missing]
        report = "; ".join([report, *self._places(waiting)])
        stacks = [r for r in missing if r in living][:_MOST_STACKS]
        stacks += [r for r in waiting if r in living][:1]
        return Verdict(report, missing, stacks, living)

    def _patience(self, rank: int) -> float:
        patience = self._ranks[rank].status.patience_seconds
        return self._timeout if patience is None else patience

    def _longest_still(self, rank: int) -> float:
        usual = self._ranks[rank].status.patience_seconds is None
        failed = any(other.status.end for other in self._ranks)
        return self._patience(rank) * (_STILL_FACTOR if usual and not failed else 1)

    # What a report says

    def _why_silent(self, ranks: list[int]) -> str:
        first = self._ranks[ranks[0]]
        told = f"nothing heard for {first.silent:.0f} s ({self._timeout:g} s allowed)"
        if not first.status.beat:
            return f"{names(ranks, 'has', 'have')} not come to the watchdog: {told}"
        return (
            f"{names(ranks)} silent: {told}, last at {first.status.where}, from "
            f"{first.status.process}: killed, frozen, cut off, or in a call that keeps the GIL"
        )

    def _why_late(self, ranks: list[int]) -> str:
        first = self._ranks[ranks[0]]
        told = f"for {first.still:.0f} s at {first.status.where}"
        allowed = f"({self._patience(ranks[0]):g} s allowed)"
        return f"{names(ranks, 'has', 'have')} not arrived: {told} {allowed}"

    def _why_still(self) -> str:
        left = [r for r, rank in enumerate(self._ranks) if rank.status.end is not None]
        left = [r for r in left if self._ranks[r].status.end] or left
        if not left:
            return "no rank moves: each seems to wait for another"
        status = self._ranks[left[0]].status
        error = f" with {status.end}" if status.end else ""
        return f"{names(left, 'has', 'have')} left the run at {status.where}{error}"

    def _places(self, ranks: list[int]) -> list[str]:
        """Where `ranks` stand, those that have passed most first."""
        there: dict[tuple[Place, str], list[int]] = {}
        for r in ranks:
            status = self._ranks[r].status
            there.setdefault((status.place, status.where), []).append(r)
        groups = sorted(there.items(), reverse=True)
        told = [f"{names(group, 'waits', 'wait')} at {where}" for (_, where), group in groups]
        others = sum(len(group) for _, group in groups[_MOST_PLACES:])
        return told[:_MOST_PLACES] + ([f"{others} more elsewhere"] if others else [])


def _overdue(used: dict[int, float]) -> list[int]:
    """If a rank has used up its time, that one and those that have used half: as late, but for when
    this rank looked."""
    return [r for r in used if used[r] >= 0.5] if max(used.values()) >= 1 else []


def names(ranks: Iterable[int], one: str = "is", several: str = "are") -> str:
    """As in "rank 2 is" or "ranks 0-2, 5 are"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    listed = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank {listed} {one}" if listed.isdigit() else f"ranks {listed} {several}"

"""Engines side by side in one process group: each phase run by all, compared, and forgotten."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import checking
from .engines import Engine, Whole
from .findings import Count, Finding, compare_pair, paired
from .judging import Book, Rounding
from .lane import Batches, Lane, digest_of
from .observation import BY_ROWS, PHASES, Kind, Observation, Place
from .report import Comparison, PhaseResult, Report
from .settings import Settings
from .ulp import SHORT
from .whole import Shaken, WholeLane
from .words import Norms, describe

_REMEMBERED = (Kind.START, Kind.GATHERED, Kind.GRADIENT, Kind.PARAMETER)

Note = Callable[[str], None]


class Match:
    """Two lanes, and what comparing them has found so far."""

    def __init__(self, ours: Lane, theirs: Lane, exact: bool) -> None:
        self.ours, self.theirs = ours, theirs
        self.book = Book(ours.name, theirs.name, exact)
        self.counts: dict[Kind, Count] = {}
        self.found: list[Finding] = []
        self.position = 0

    def compare(self, step: int, seen: dict[Lane, list[Observation]], stale: set[Place]) -> None:
        """Compare what one phase showed in both."""
        theirs = seen[self.theirs]
        for pair in paired(seen[self.ours], theirs):
            kind = (pair.ours or pair.theirs).place.kind
            count, found = compare_pair(pair, step, self.position, self.ours.rank)
            self.counts[kind] = self.counts.get(kind, Count()).plus(count)
            self.position += 1
            if found is not None:
                is_of = _another_with(pair.ours, theirs) if found.place.kind in BY_ROWS else None
                self.found.append(found._replace(stale=found.place in stale, is_of=is_of))


class Lockstep:
    """The lanes of a comparison, in step.

    engines: the tested one first. Raises ValueError, on all ranks, for a build or batch that is not
    the same at each call.
    """

    def __init__(
        self, build: Any, batch: Any, engines: Sequence[Engine], settings: Settings, note: Note
    ) -> None:
        self._settings, self._note = settings, note
        # The comparison's own messages must not queue with an engine's.
        self._group = dist.new_group(backend="gloo")
        self._absent = {e.name: why for e in engines[1:] if (why := e.absent(settings))}
        tested, *others = engines
        if why := tested.absent(settings):
            raise ValueError(f"engine {tested.name}: {why}")
        self._order = [e.name for e in others]
        if len(self._absent) == len(others):
            raise ValueError(f"nothing to compare to: {'; '.join(self._absent.values())}")
        batches = Batches(batch, settings.accumulate, settings.device)
        lanes = [_lane(e, settings, batches) for e in engines if e.name not in self._absent]
        self._ours, *others = lanes
        self._matches = [
            Match(self._ours, lane, _is_exact(self._ours, lane, settings)) for lane in others
        ]
        self._twin: Match | None = None
        if not all(match.book.exact for match in self._matches):
            plain = next((lane for lane in lanes if isinstance(lane, WholeLane)), None)
            if plain is None:
                plain = WholeLane(Whole(), settings, batches)
                lanes.append(plain)
            shaken = Shaken(Whole(), settings, batches)
            lanes.append(shaken)
            self._twin = Match(shaken, plain, exact=False)
        self._lanes = lanes
        self._rounding = Rounding()
        self._before: dict[Place, str] = {}
        self._norms: Norms | None = None
        self._local_norms = (0.0, 0.0, 0.0)  # sum, sum of squares, largest
        self._step = 0
        self._stale: set[Place] = set()
        self.notes = checking.batches(batches, self._group)
        self._prepare(build, batches)

    def _prepare(self, build: Any, batches: Batches) -> None:
        builds = checking.Builds(build, self._settings, self._group)
        self._note("a forward, twice")
        checking.forwards(builds, batches, self._settings, self._group)
        for lane in self._lanes:
            lane.at = functools.partial(self._at, lane.name)
            self._note(f"engine {lane.name}, building")
            model = builds.make()
            with checking.on_all_ranks(self._group), _blaming(f"engine {lane.name}, sharding"):
                lane.prepare(model)

    def _at(self, engine: str, what: str) -> None:
        self._note(f"engine {engine}, step {self._step}, {what}")

    def run(self) -> Report:
        """All steps."""
        kept: dict[Lane, list[Observation]] = {}
        for lane in self._lanes:
            self._take(lane, lane.rows(Kind.START), kept)
        del kept
        for step in range(self._settings.steps):
            self._step = step
            self._run_step()
        return self._report()

    def _run_step(self) -> None:
        running = {lane: lane.step(self._step) for lane in self._lanes}
        while True:
            kept: dict[Lane, list[Observation]] = {}
            for lane, phases in running.items():
                with _blaming(f"engine {lane.name}, step {self._step}"):
                    seen = next(phases, None)
                if seen is not None:
                    self._take(lane, seen, kept)
                del seen
            if not kept:
                break
        self._end_step()

    def _take(
        self, lane: Lane, seen: list[Observation], kept: dict[Lane, list[Observation]]
    ) -> None:
        """Compare a lane's phase to those of lanes before it; keep it only for lanes after it."""
        kept[lane] = seen
        stale = self._remember(seen) if lane is self._ours else self._stale
        self._stale = stale
        for match in self._all_matches():
            if lane in (match.ours, match.theirs) and {match.ours, match.theirs} <= kept.keys():
                match.compare(self._step, kept, stale if match is not self._twin else set())
        needed = [self._ours] + ([self._twin.theirs] if self._twin else [])
        if lane not in needed:
            kept.pop(lane)

    def _all_matches(self) -> list[Match]:
        return self._matches + ([self._twin] if self._twin else [])

    def _remember(self, seen: Sequence[Observation]) -> set[Place]:
        """Which parameters and gradients of ours are as a step ago; notes what they are now."""
        stale = set()
        for place, tensor, _ in seen:
            if tensor is None or place.micro:
                continue
            if place.kind in _REMEMBERED:
                key, now = place, digest_of(tensor)
                if place.kind == Kind.START:
                    key = place._replace(kind=Kind.PARAMETER)
                if self._before.get(key) == now:
                    stale.add(place)
                self._before[key] = now
        gradients = [o.tensor for o in seen if o.place.kind == Kind.GRADIENT]
        if gradients:
            flat = [g.double().abs().view(-1) for g in gradients if g is not None and g.numel()]
            joined = torch.cat(flat) if flat else torch.zeros(1, dtype=torch.float64)
            self._local_norms = (
                joined.sum().item(), joined.square().sum().item(), joined.max().item()
            )  # fmt: skip
        return stale

    def _end_step(self) -> None:
        """Hear what all ranks have found."""
        mine = [match.found for match in self._all_matches()], self._local_norms
        everyone: list[Any] = [None] * dist.get_world_size()
        self._note("comparing")
        dist.all_gather_object(everyone, mine, group=self._group)
        per_match = zip(*(found for found, _ in everyone), strict=True)
        gathered = [[f for of_rank in found for f in of_rank] for found in per_match]
        if self._twin is not None:
            self._refuse_chance(gathered[-1])
            self._rounding.learn(self._step, gathered[-1])
        was_broken = any(match.book.broken for match in self._matches)
        for match, found in zip(self._matches, gathered, strict=False):
            match.book.add(self._step, found, self._rounding)
        if not was_broken and any(match.book.broken for match in self._matches):
            ones, squares, largest = zip(*(norms for _, norms in everyone), strict=True)
            self._norms = Norms(sum(ones), sum(squares) ** 0.5, max(largest))
        for match in self._all_matches():
            match.found, match.position = [], 0

    def _refuse_chance(self, of_twin: Sequence[Finding]) -> None:
        """Raise ValueError if the twin, moved by nothing yet, differed before a gradient."""
        if self._step == 0:
            for found in of_twin:
                if found.place.kind < Kind.GRADIENT:
                    raise ValueError(checking.not_the_same(found.place))

    def _report(self) -> Report:
        mine = [match.counts for match in self._matches]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self._group)
        for counts in everyone:
            for match, of_match in zip(self._matches, counts, strict=True):
                match.book.count(of_match)
        compared = {m.theirs.name: self._comparison(m.book) for m in self._matches}
        for name, why in self._absent.items():
            compared[name] = Comparison(self._ours.name, name, False, (), None, why)
        notes = list(self.notes)
        lacking = Counter(
            PHASES[k] for m in self._matches for k, p in m.book.phases.items() if p.count.not_finite
        )
        if lacking:
            notes.append(
                f"infinite or NaN in both engines: {', '.join(lacking)}; equal there says nothing"
            )
        if self._settings.offload:
            plain = [x.name for x in self._lanes if x.engine.ignores_offload and x.name in compared]
            if plain:
                notes.append(f"without offload, which changes no value: {', '.join(plain)}")
        return Report(self._title(), tuple(compared[n] for n in self._order), tuple(notes))

    def _comparison(self, book: Book) -> Comparison:
        settings = self._settings
        first = None
        if book.broken:
            plan, ranks = self._ours.plan, dist.get_world_size()
            first = describe(book, plan, ranks, settings.accumulate, self._norms)
        phases = tuple(
            PhaseResult(
                PHASES[kind],
                phase.count.numel,
                phase.count.differing,
                phase.most_ulp,
                None if book.exact else phase.share,
                phase.count.not_finite,
            )
            for kind, phase in sorted(book.phases.items())
        )
        return Comparison(book.ours, book.theirs, book.exact, phases, first)

    def _title(self) -> str:
        s, ranks = self._settings, dist.get_world_size()
        said = [f"{ranks} rank{'s' * (ranks > 1)}", f"{s.steps} step{'s' * (s.steps > 1)}"]
        said.append(f"computing in {SHORT[s.dtype]}" if s.dtype else "dtypes as built")
        said += [f"reducing in {SHORT[s.reduce_dtype]}"] if s.reduce_dtype else []
        said += [f"{s.accumulate} micro-batches"] if s.accumulate > 1 else []
        said += [f"clipped to {s.clip:g}"] if s.clip is not None else []
        said += ["offloaded"] if s.offload else []
        units = len(self._ours.plan.units) + 1
        return (
            f"{self._ours.name} against {', '.join(self._order)}: {', '.join(said)}, {units} units"
        )

    def close(self) -> None:
        for lane in self._lanes:
            if hasattr(lane, "watch"):
                lane.watch.remove()
        dist.destroy_process_group(self._group)


def _another_with(ours: Observation | None, theirs: Sequence[Observation]) -> str | None:
    """Which other parameter's rows, in the other engine, have the values that ours have."""
    mine = None if ours is None else ours.tensor
    if mine is None or not mine.any():
        return None
    for place, tensor, _ in theirs:
        if place != ours.place and tensor is not None and torch.equal(tensor, mine):
            return place.name
    return None


def _lane(engine: Engine, settings: Settings, batches: Batches) -> Lane:
    kind = WholeLane if isinstance(engine, Whole) else Lane
    return kind(engine, settings, batches)


def _is_exact(ours: Lane, theirs: Lane, settings: Settings) -> bool:
    return ours.engine.exact and theirs.engine.exact and not settings.rounding


@contextlib.contextmanager
def _blaming(what: str) -> Iterator[None]:
    """Put what was under way in front of an error's words."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise RuntimeError(f"{what}: {type(error).__name__}: {said}") from error

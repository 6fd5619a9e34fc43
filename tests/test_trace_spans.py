"""From a log to events, from events to words: without running anything."""

from __future__ import annotations

import pytest
import torch

from minifsdp.trace.clock import DeviceClock, HostClock, clock
from minifsdp.trace.figures import duration, size
from minifsdp.trace.spans import Entry, RankTrace, TraceEvent, spans
from minifsdp.trace.text import timeline
from minifsdp.trace.trace import on_one_clock
from minifsdp.trace.waits import arrivals, explain, shares, waits


def log(*lines: tuple) -> list[Entry]:
    """Entries from (seconds, "+kind unit" or "-kind unit", held or bytes, thread)."""
    entries = []
    edges = {"+": "begin", "-": "end", "!": "moved", "=": "held"}
    for seconds, text, *more in lines:
        kind, unit = text[1:].split()
        held = more[0] if more and isinstance(more[0], dict) else {}
        nbytes = more[0] if more and isinstance(more[0], int) else 0
        thread = more[1] if len(more) > 1 else 7
        entries.append(Entry(seconds, edges[text[0]], kind, unit, thread, held, nbytes))
    return entries


def told(entries: list[Entry], end: float) -> list[tuple[str, str, float, float, float]]:
    return [(e.kind, e.unit, e.start, e.end, e.own) for e in spans(entries, end)[0]]


def test_time_belongs_to_the_event_begun_last():
    nested = log((0, "+forward root"), (1, "+wait a"), (3, "-wait a"), (10, "-forward root"))
    assert told(nested, 10) == [("forward", "root", 0, 10, 8), ("wait", "a", 1, 3, 2)]
    crossed = log((0, "+backward a"), (2, "+backward b"), (5, "-backward a"), (9, "-backward b"))
    assert told(crossed, 9) == [("backward", "a", 0, 5, 2), ("backward", "b", 2, 9, 7)]


def test_other_threads_have_their_own_time():
    entries = log(
        (0, "+backward a"),
        (1, "+optimizer b", {}, 8),
        (4, "-optimizer b", {}, 8),
        (6, "-backward a"),
    )
    events, _ = spans(entries, 6)
    assert [(e.kind, e.own, e.thread) for e in events] == [("backward", 6, 0), ("optimizer", 3, 1)]


def test_what_is_open_at_an_edge_of_the_trace_ends_there_or_is_left_out():
    entries = log((1, "-wait a"), (2, "+forward a"))
    assert told(entries, 5) == [("forward", "a", 2, 5, 3)]
    assert spans([], 0.0) == ([], [])


def test_a_prefetch_is_one_event_and_none_if_the_unit_was_there():
    entries = log(
        (0, "+prefetch a"), (1, "+unshard a"), (2, "!all_gather a", 80),
        (3, "-unshard a", {"gathering": 80}), (4, "-prefetch a"),
        (5, "+prefetch a"), (6, "-prefetch a"),
        (7, "+wait a"), (8, "-wait a", {"gathering": 0}),
    )  # fmt: skip
    events, _ = spans(entries, 8)
    assert [(e.kind, e.nbytes, e.own, e.deferred) for e in events] == [
        ("prefetch", 80, 4, False),
        ("wait", 80, 1, False),
    ]


def test_a_message_that_takes_no_buffer_is_deferred():
    entries = log(
        (0, "+unshard a"), (0, "!all_gather a", 80), (1, "-unshard a", {"gathering": 0}),
        (2, "+wait a"), (3, "-wait a"),
    )  # fmt: skip
    assert [e.deferred for e in spans(entries, 3)[0]] == [True, True]


def test_growth_counts_from_its_beginning_and_freeing_from_its_end():
    entries = log(
        (0, "+wait a"), (2, "-wait a", {"unsharded": 10}),
        (3, "+reshard a"), (5, "-reshard a", {"unsharded": 0}),
        (6, "=reduced a", {"rows": 4}),
    )  # fmt: skip
    events, held = spans(entries, 7)
    assert [(h.seconds, h.total) for h in held] == [(0, 10), (5, 0), (6, 4)]
    assert [e.unsharded for e in events] == [10, 0]


def test_a_buffer_that_goes_from_idle_to_leased_is_counted_once():
    entries = log(
        (0, "=x a", {"idle": 50}),
        (1, "+unshard b"), (2, "-unshard b", {"gathering": 50, "idle": 0}),
        (3, "+wait b"), (4, "-wait b", {"gathering": 0, "idle": 50}),
    )  # fmt: skip
    assert {point.message for point in spans(entries, 5)[1]} == {50}


def event(kind: str, unit: str, start: float, end: float, **more) -> TraceEvent:
    return TraceEvent(kind, unit, start, end, end - start, 0, **more)


def rank(number: int, *events: TraceEvent, host: str = "h", began: float = 0.0) -> RankTrace:
    seconds = max((e.end for e in events), default=0.0)
    units = list(dict.fromkeys(e.unit for e in events))
    return RankTrace(
        number, host, seconds, list(events), [], units, [0.0], peers=(0, 1), began=began
    )


def test_shares_are_of_the_training_thread_and_add_up():
    trace = rank(
        0,
        event("forward", "a", 0, 4),
        event("wait", "a", 4, 5, nbytes=8),
        event("reduce", "a", 5, 5.5),  # one rank's own: nothing travels
        event("optimizer", "b", 6, 8),
    )
    assert shares(trace) == (4, 1, 0.5, 2, 0.5) and sum(shares(trace)) == 8


def waited(first: str, *, deferred: bool = False, asked: float = 0.0) -> list[TraceEvent]:
    return [
        event(first, "a", asked, asked + 0.1, nbytes=1 << 20, deferred=deferred),
        event("wait", "a", 1, 3, nbytes=1 << 20, deferred=deferred),
        event("forward", "a", 3, 4),
    ]


@pytest.mark.parametrize(
    ("first", "deferred", "peer_comes_at", "reason"),
    [
        ("unshard", False, 0.5, "asked for only when it was needed"),
        ("prefetch", False, 0.5, "asked for 900 ms before, but the message took longer"),
        ("prefetch", False, 2.5, "1.5 s of it because rank 1 came later"),
        ("prefetch", True, 0.5, "through shared memory"),
        ("prefetch", True, 2.5, "because rank 1 came later"),
    ],
)
def test_the_reason_of_a_wait_is_said(first, deferred, peer_comes_at, reason):
    peer = waited(first, deferred=deferred, asked=peer_comes_at)
    if deferred:  # it gives its part when it waits
        peer[1] = event("wait", "a", peer_comes_at, 3, nbytes=1 << 20, deferred=True)
    ranks = {0: rank(0, *waited(first, deferred=deferred)), 1: rank(1, *peer)}
    assert reason in " ".join(explain(ranks[0], arrivals(ranks)))
    (wait,) = waits(ranks[0], arrivals(ranks))
    assert (wait.unit, wait.direction, wait.seconds, wait.nbytes) == ("a", "forward", 2, 1 << 20)


def test_waits_are_told_apart_by_direction_in_each_iteration():
    steps = []
    for t in (0, 10):
        steps += [event("wait", "a", t, t + 1, nbytes=8), event("forward", "a", t + 1, t + 2)]
        steps += [event("wait", "a", t + 5, t + 7, nbytes=8), event("backward", "a", t + 7, t + 8)]
    trace = RankTrace(0, "h", 20.0, steps, [], ["a", "root"], [0.0, 10.0])
    assert [(w.direction, w.seconds, w.times) for w in waits(trace, {})] == [
        ("backward", 4, 2),
        ("forward", 2, 2),
    ]


@pytest.mark.parametrize("mailboxes", [False, True])
def test_a_rank_that_reductions_wait_for_is_named(mailboxes):
    def steps(reduces_at: float) -> list[TraceEvent]:
        gather = event("wait", "a", 0, 0.1, nbytes=8, deferred=mailboxes)
        until = 3 if mailboxes else reduces_at + 0.1
        return [
            gather,
            event("reduce", "a", reduces_at, until, nbytes=8),
            event("reduce_wait", "a", 3 if mailboxes else 2, 3, nbytes=8),
        ]

    ranks = {0: rank(0, *steps(1)), 1: rank(1, *steps(2.8))}
    wait = waits(ranks[0], arrivals(ranks))[0]
    expected = 1.8 if mailboxes else 0.8
    assert (wait.unit, wait.direction, wait.late_rank) == ("a", "reduction", 1)
    assert wait.late_seconds == pytest.approx(expected)
    said = " ".join(explain(ranks[0], arrivals(ranks)))
    assert "because rank 1 came later" in said and "mostly copying" not in said


def test_ranks_that_shard_apart_are_not_blamed():
    ranks = {0: rank(0, *waited("prefetch")), 1: rank(1), 2: rank(2, *waited("prefetch", asked=2))}
    assert waits(ranks[0], arrivals(ranks))[0].late_rank is None


def test_a_forward_that_was_broken_off_ends_with_what_contains_it():
    recomputed = log(
        (0, "+backward a"),
        (1, "+forward a"),
        (4, "-backward a"),
        (9, "+forward b"),
        (9.5, "-forward b"),
    )
    assert told(recomputed, 10)[:2] == [("backward", "a", 0, 4, 1), ("forward", "a", 1, 4, 3)]
    raised = log((0, "+forward root"), (1, "+forward a"), (2, "+wait a"), (3, "-wait a"))
    raised += [
        Entry(50, "iteration", "", "root", 7),
        *log((50, "+forward root"), (60, "-forward root")),
    ]
    assert [(e[0], e[1], e[3], e[4]) for e in told(raised, 60)] == [
        ("forward", "root", 3, 1),
        ("forward", "a", 3, 1),
        ("wait", "a", 3, 1),
        ("forward", "root", 60, 10),
    ]


def test_ranks_of_one_host_share_its_clock_and_hosts_their_time_of_day():
    here = [rank(0, event("wait", "a", 0, 1), began=100.0), rank(1, began=100.5)]
    there = rank(2, event("wait", "a", 0, 1), host="other", began=7.0)
    gathered = [(here[0], 1000.0), (here[1], 1000.5001), (there, 999.0)]
    traces = on_one_clock(gathered)
    assert [round(trace.events[0].start, 3) for trace in (traces[0], traces[2])] == [1.0, 0.0]
    assert round(traces[1].seconds, 3) == 1.5


def test_a_timeline_is_as_wide_as_it_is_asked_to_be():
    trace = rank(0, event("forward", "root", 0, 4), event("wait", "block", 1, 2))
    lines = timeline({0: trace}, 0, columns=40).splitlines()
    assert lines[1].startswith("root   F") and "F" * 40 in lines[1]
    assert lines[2] == "block  " + " " * 10 + "w" * 11
    assert "empty trace" in timeline({}, 0)


def test_figures_have_three_digits():
    assert [duration(s) for s in (12.345, 0.0123, 4.2e-5)] == ["12.3 s", "12.3 ms", "42 µs"]
    assert [size(n) for n in (12, 2048, 5 << 20, 3000 << 20)] == [
        "12 bytes", "2 KiB", "5 MiB", "2.93 GiB",
    ]  # fmt: skip


class FakeEvent:
    """A device event that happens when the stream comes by."""

    now = 0.0

    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        assert device.type == "cuda" and enable_timing

    def record(self) -> None:
        FakeEvent.now += 2.0
        self.at, self.done = FakeEvent.now, False

    def synchronize(self) -> None:
        self.done = True

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


def test_a_device_clock_tells_when_the_stream_came_by(monkeypatch):
    monkeypatch.setattr(torch, "Event", FakeEvent)
    device = DeviceClock("cuda")
    stamps = [device.stamp() for _ in range(3)]
    assert device.seconds(stamps) == [0.0, 0.002, 0.004]
    assert stamps[-1].done
    with pytest.raises(ValueError, match="needs an accelerator"):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
        clock("device")
    assert isinstance(clock(None), HostClock)

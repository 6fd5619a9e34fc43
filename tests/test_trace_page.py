"""What is in a trace's page and picture, without a browser: the data, and not too much of it."""

from __future__ import annotations

import html
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import accumulate

import pytest
from made_trace import make_trace

from minifsdp.trace.page import pack as packing
from minifsdp.trace.page import page, picture
from minifsdp.trace.page.look import PARTS
from minifsdp.trace.page.moments import cells, flights, innermost
from minifsdp.trace.page.pack import LIMIT, kept, labels, packed
from minifsdp.trace.spans import KINDS, RankTrace, TraceEvent
from minifsdp.trace.waits import arrivals, explain, shares

HOSTILE = "</script><b onclick=alert(1)>{}&\ud800"


def made(blocks: int = 4, ranks: int = 2, **how) -> dict[int, RankTrace]:
    return {r: make_trace(blocks, r, gather=(2 + r % 5) * 1e-3, **how) for r in range(ranks)}


def paged(ranks: dict[int, RankTrace]) -> str:
    return page(ranks, {r: explain(ranks[r], arrivals(ranks)) for r in ranks}, "a trace")


def stored(source: str) -> dict:
    """The data that the page's script reads."""
    return json.loads(re.search(r'id="data">(.*?)</script>', source, re.S)[1])


def unpacked(data: dict, index: int) -> list[tuple]:
    """A rank's events as the page's script knows them, times in tenths of a microsecond."""
    rank = data["ranks"][index]
    events, held = rank["events"], [list(accumulate(column)) for column in rank["held"]]
    late = set(events["deferred"])
    return [
        (
            KINDS[int(events["kind"][i], 36)],
            data["names"][rank["rows"][events["row"][i]]],
            start,
            start + events["lasted"][i],
            events["lasted"][i] - events["inside"][i],
            events["thread"].get(str(i), 0),
            data["sizes"][events["size"][i]],
            i in late,
            *(column[point] for column in held[1:]),
        )
        for i, (start, point) in enumerate(
            zip(accumulate(events["start"]), accumulate(events["held"]), strict=True)
        )
    ]


@pytest.mark.parametrize("deferred", [False, True])
def test_the_page_holds_every_figure_of_every_event(deferred: bool):
    ranks = made(deferred=deferred)
    ranks[1].events[5] = replace(ranks[1].events[5], thread=1)
    data = stored(paged(ranks))
    for index, trace in enumerate(ranks.values()):
        found = unpacked(data, index)
        assert len(found) == len(trace.events) > 80
        for event, told in zip(trace.events, found, strict=True):
            kind, unit, start, end, own, thread, nbytes, late, *held = told
            assert (kind, unit, thread) == (event.kind, event.unit, event.thread)
            assert (nbytes, late) == (event.nbytes, event.deferred)
            assert held == [event.unsharded, event.message, event.gradients]
            exact = [value * 1e7 for value in (event.start, event.end, event.own)]
            assert [start, end, own] == pytest.approx(exact, abs=1.01)


def test_the_page_says_each_ranks_shares_and_words():
    ranks = made()
    source = paged(ranks)
    for rank in ranks:
        article = re.search(rf'data-rank="{rank}">(.*?)</article>', source, re.S)[1]
        for sentence in explain(ranks[rank], arrivals(ranks)):
            assert html.escape(sentence) in article
        split = shares(ranks[rank])
        told = [float(share) for share in re.findall(r"<dd>([\d.]+)%", article)]
        assert told == pytest.approx([100 * part / sum(split) for part in split], abs=0.051)
    assert stored(source)["ranks"][1]["exposed"] == round(1000 * split.exposed / sum(split))


def test_own_times_are_those_of_the_innermost_event():
    trace = make_trace(4)
    own: dict[int, float] = {}
    for start, end, event in innermost(trace.events, 0):
        own[id(event)] = own.get(id(event), 0.0) + end - start
    for event in trace.events:
        assert own.get(id(event), 0.0) == pytest.approx(event.own, abs=1e-9)


def test_an_event_that_outlives_the_one_around_it_is_innermost_until_it_ends():
    outer = TraceEvent("backward", "a", 0.0, 2.0, 1.0, 0)
    inner = TraceEvent("backward", "b", 1.0, 3.0, 2.0, 0)
    assert list(innermost([outer, inner], 0)) == [(0.0, 1.0, outer), (1.0, 3.0, inner)]


def test_a_ranks_strip_adds_up_to_its_shares():
    trace = make_trace(4)
    found = cells(trace, 0.0, trace.seconds, 57)
    split = shares(trace)
    for part in list(PARTS)[:4]:
        seconds = sum(cell.get(part, 0.0) for cell in found) * trace.seconds / 57
        assert seconds == pytest.approx(getattr(split, part), abs=1e-9)


def test_a_message_is_under_way_from_when_it_is_asked_for_until_it_is_waited_for():
    trace = make_trace(4, iterations=1)
    found = [f for f in flights(trace.events) if f.event.unit == "layers.1"]
    asked = [e for e in trace.events if e.unit == "layers.1" and e.kind in ("prefetch", "reduce")]
    waited = [e for e in trace.events if e.unit == "layers.1" and e.kind.endswith("wait")]
    assert [f.event.kind for f in found] == ["prefetch", "prefetch", "reduce"]
    assert [(f.start, f.end) for f in found] == [
        (a.end, w.start) for a, w in zip(asked, waited, strict=True)
    ]


def test_hostile_names_stay_text():
    ranks = made(name=HOSTILE)
    source = page(ranks, {0: [HOSTILE]}, HOSTILE)
    assert source.count("<script") == source.count("</script>") == 2
    assert "<b " not in source
    source.encode("utf-8")
    assert HOSTILE.format(2) in stored(source)["names"]
    ElementTree.fromstring(picture(ranks[0]))


def test_the_page_asks_for_nothing():
    source = paged(made())
    # The only address is the name of SVG's own namespace.
    assert set(re.findall(r"https?://[^\"' ]+", source)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<link|<img|@import|url\(|\bfetch\(|XMLHttp|\bsrc=", source)
    assert "default-src 'none'" in source


def test_80_units_on_64_ranks_fit_in_four_megabytes_and_the_page_says_which_are_kept():
    ranks = {r: replace(trace, rank=r) for r, trace in made(80, 3, iterations=2).items()}
    ranks |= {r: replace(ranks[r % 3], rank=r) for r in range(3, 64)}
    ranks[40] = make_trace(80, 40, 2, gather=9e-3)
    source = page(ranks, {})
    assert len(source) < 4_000_000
    data = stored(source)
    there = [rank["rank"] for rank in data["ranks"] if "events" in rank]
    assert {0, 40} <= set(there) and 15 < len(there) < 64
    assert f"events of ranks {', '.join(map(str, there))} only, {LIMIT:,} at most" in source
    assert sum(len(r["events"]["kind"]) for r in data["ranks"] if "events" in r) <= LIMIT
    assert all(len(rank["strip"]) == 4 * packing.CELLS for rank in data["ranks"])


def test_the_first_rank_is_kept_whatever_its_size():
    ranks = made(ranks=3)
    assert kept(ranks, limit=1) == [0]
    assert kept(ranks, limit=2 * len(ranks[0].events)) == [0, 2]  # 2 waited most


def test_an_event_takes_some_thirty_characters():
    ranks = made(33, ranks=1, iterations=2)
    written = json.dumps(packed(ranks, [0]), separators=(",", ":"))
    assert len(written) / len(ranks[0].events) < 40


def test_the_picture_is_small_the_same_each_time_and_well_formed():
    trace = make_trace(80, iterations=3)
    drawn = picture(trace, width=900)
    assert drawn == picture(make_trace(80, iterations=3), width=900)
    assert len(drawn) < 250_000
    root = ElementTree.fromstring(drawn)
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[texts.index("root") :][:82] == trace.units
    assert root.get("width") == "900"


def test_a_picture_of_a_stretch_shows_only_that():
    trace = make_trace(4, iterations=2)
    assert "iteration 2" in picture(trace)
    begin, end = trace.iterations[0] - 1e-3, trace.iterations[0] + 10e-3
    drawn = picture(trace, seconds=(begin, end))
    assert "iteration 1" in drawn and "iteration 2" not in drawn
    assert "s-optimizer" not in re.sub("<style>.*</style>", "", drawn)
    with pytest.raises(ValueError, match=r"seconds=\(2, 1\)"):
        picture(trace, seconds=(2, 1))


def test_of_long_names_what_all_share_is_left_out():
    long = [f"model.language_model.decoder.layers.{i}.feed_forward" for i in range(3)]
    told = labels(["root", *long, "optimizer"])
    assert told == ["root", "…layers.0…", "…layers.1…", "…layers.2…", "optimizer"]
    short = ["root", "layers.0", "layers.1", "norm"]
    assert labels(short) == short and labels(["root"]) == ["root"]
    mixed = ["encoder.layers.0.attention", "decoder.layers.0.attention.inner", "norm"]
    assert len(set(labels(mixed))) == 3 and labels(mixed)[0] == mixed[0]
    assert len(set(labels(["a.very_long_name_of_it", "a.very_long_name_of_it.a"]))) == 2


def test_traces_of_nothing_still_make_a_page():
    empty = RankTrace(0, "a-host", 0.0, [], [], [], [])
    assert "Nothing was recorded" in paged({0: empty})
    ElementTree.fromstring(picture(empty))
    with pytest.raises(ValueError, match="at least one rank"):
        page({}, {})

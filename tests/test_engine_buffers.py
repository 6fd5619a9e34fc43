"""Full parameters and messages: where they lie, and that their memory is used again."""

from __future__ import annotations

import time
import weakref

import pytest
import stack
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import MixedPrecisionPolicy, collectives, flat, fully_shard, pages
from minifsdp.collectives import Gradients, Peers, packed, use_collectives
from minifsdp.collectives.direct import DirectCollectives
from minifsdp.collectives.packed import Pool
from minifsdp.collectives.shared import SharedCollectives
from minifsdp.reduction import GradientReducer


def _places() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    unit = fully_shard(model)._unit()
    model.unshard()
    places = [p.data_ptr() for p in model.parameters()]
    (whole,) = [part.full for part in unit._parts]
    assert [(place - whole.data_ptr()) % 64 for place in places] == [0] * 4
    assert len(set(places)) == 4


def test_each_full_parameter_begins_where_an_allocation_of_its_own_would(run_ranks):
    run_ranks(2, _places)


def _asked_for_large_pages() -> None:
    asked: list[int] = []
    prefer_huge = flat.prefer_huge
    flat.prefer_huge = lambda storage: asked.append(storage.nbytes())
    try:
        model = fully_shard(nn.Linear(4, 4, bias=False), reshard_after_forward=True)
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
    finally:
        flat.prefer_huge = prefer_huge
    assert asked == [64] * 4  # each time that it was gathered


def test_large_pages_are_asked_for_each_time_a_unit_is_given_memory(run_ranks):
    run_ranks(2, _asked_for_large_pages)


def test_large_pages_are_asked_for_from_the_first_that_begins_in_a_buffer(monkeypatch):
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(pages, "_madvise", lambda: lambda *words: asked.append(words))
    storage = torch.empty(2**26, dtype=torch.uint8).untyped_storage()
    pages.prefer_huge(storage)
    (first, nbytes, advice), page = asked[0], 2**21
    begin = storage.data_ptr()
    assert first % page == 0 and begin <= first < begin + page
    assert first + nbytes == begin + storage.nbytes()
    assert advice == 14  # MADV_HUGEPAGE, of Linux's <asm-generic/mman-common.h>


def _dropped_on_its_way() -> None:
    use_collectives("direct")
    model = fully_shard(nn.Linear(300, 4, bias=False))
    unit = model._unit()
    if dist.get_rank():
        time.sleep(0.3)
    unit.unshard()
    assert unit.held()["gathering"] == 4800
    works = list(unit._gather.works)
    unit.reshard()
    assert works and all(work.is_completed() for work in works)
    kept = collectives.idle_nbytes()
    assert kept >= 4800
    unit.unshard()
    unit.reshard()
    assert collectives.idle_nbytes() == kept  # and not a buffer more


def test_a_gather_that_is_dropped_has_arrived_and_gives_its_buffer_back(run_ranks):
    run_ranks(2, _dropped_on_its_way)


def _leases(how: str) -> tuple[int, int, int]:
    """Buffers leased in two steps, given back, and made anew in the second."""
    use_collectives(how)
    pool = {"direct": collectives._DIRECT, "backend": collectives._BACKEND}[how].pool
    model = stack.shard(stack.build())
    stack.step(model)
    kept = {buffer.untyped_storage().data_ptr() for buffer in pool._free}
    leased, given_back = [], []
    lease, give_back = pool.lease, pool.give_back

    def counted(nbytes: int, device: torch.device) -> torch.Tensor:
        leased.append(lease(nbytes, device))
        return leased[-1]

    pool.lease, pool.give_back = counted, lambda b: given_back.append(give_back(b))
    try:
        stack.step(model)
    finally:
        del pool.lease, pool.give_back
    fresh = [b for b in leased if b.untyped_storage().data_ptr() not in kept]
    return len(leased), len(given_back), len(fresh)


@pytest.mark.parametrize(("how", "a_reductions"), [("direct", 2), ("backend", 1)])
def test_each_buffer_is_given_back_and_leased_again_in_the_next_step(run_ranks, how, a_reductions):
    gathers, reductions = 7, 4
    leases = gathers + a_reductions * reductions
    assert run_ranks(2, _leases, how) == [(leases, leases, 0)] * 2


def test_a_pool_leases_the_smallest_buffer_that_fits_and_none_twice_too_large():
    pool, cpu = Pool(), torch.device("cpu")
    places = {}
    for nbytes in (100, 150, 190, 500):
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        places[buffer.data_ptr()] = nbytes
        pool.give_back(buffer)
    leased = [pool.lease(100, cpu) for _ in range(4)]
    assert [buffer.numel() for buffer in leased] == [100] * 4
    assert [places.get(buffer.data_ptr()) for buffer in leased] == [100, 150, 190, None]
    assert pool.nbytes() == 500


def _alive_as_each_is_read() -> list[int]:
    """Of a block's gradients, those that are there as each goes into a message."""
    use_collectives("direct")
    model, refs, there = stack.shard(stack.build()), [], []
    collect, place_rows = GradientReducer.collect, packed.place_rows

    def collected(reducer: GradientReducer) -> dict:
        grads = collect(reducer)
        refs[:] = [weakref.ref(grad) for grad in grads.values()]
        return grads

    def placed(columns: torch.Tensor, rows: torch.Tensor) -> None:
        there.append(sum(ref() is not None for ref in refs))
        place_rows(columns, rows)

    GradientReducer.collect, packed.place_rows = collected, placed
    try:
        stack.step(model)
    finally:
        GradientReducer.collect, packed.place_rows = collect, place_rows
    return there


def test_gradients_are_freed_one_by_one_as_they_go_into_a_message(run_ranks):
    assert run_ranks(2, _alive_as_each_is_read) == [[4, 3, 2, 1] * 4] * 2


def _where_gradients_lie() -> None:
    model = stack.shard(stack.build())
    stack.step(model)
    for layer in model.layers:
        grads = [p.grad for p in layer.parameters()]
        storages = {g.to_local().untyped_storage().data_ptr() for g in grads}
        assert len(storages) == 1 and not any(g.requires_grad for g in grads)


def test_a_units_gradients_lie_in_the_buffer_that_they_were_reduced_into(run_ranks):
    run_ranks(2, _where_gradients_lie)


def _alive_as_each_is_handed_out() -> list[int]:
    """Of a block's gradients on one rank, those that are there as each is handed out, cast."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model, refs, there = stack.shard(stack.build(), mp_policy=policy), [], []
    collect, add = GradientReducer.collect, GradientReducer._add_gradient

    def collected(reducer: GradientReducer) -> dict:
        grads = collect(reducer)
        refs[:] = [weakref.ref(grad) for grad in grads.values()]
        return grads

    def added(*args: object) -> None:
        there.append(sum(ref() is not None for ref in refs))
        add(*args)

    GradientReducer.collect, GradientReducer._add_gradient = collected, added
    try:
        stack.step(model)
    finally:
        GradientReducer.collect, GradientReducer._add_gradient = collect, add
    return there


def test_one_rank_frees_each_gradient_as_it_casts_it(run_ranks):
    assert run_ranks(1, _alive_as_each_is_handed_out) == [[3, 2, 1, 0] * 4]


def _held_by_gradients() -> list[dict[str, int]]:
    """What a block's gradients hold: none, kept for later, reduced, stepped on."""
    model = stack.shard(stack.build())
    reducer = model.layers[0]._unit().reducer
    found = [{**reducer.held(), **reducer.held_reduced()}]
    model.set_requires_gradient_sync(False)
    stack.step(model)
    found.append({**reducer.held(), **reducer.held_reduced()})
    model.set_requires_gradient_sync(True)
    stack.step(model)
    found.append({**reducer.held(), **reducer.held_reduced()})
    model.zero_grad()
    return [*found, {**reducer.held(), **reducer.held_reduced()}]


def test_gradients_are_counted_while_they_are_kept_and_once_they_are_reduced(run_ranks):
    numel = [7 * stack.DIM + 7 + stack.DIM * 7 + stack.DIM]
    numel += [4 * stack.DIM + 4 + 3 * 7 + 3, 3 * stack.DIM + 3 + 3 * 7 + 3]  # of either rank
    for rank, found in enumerate(run_ranks(2, _held_by_gradients)):
        rows = 4 * numel[1 + rank]
        counts = [(0, 0), (4 * numel[0], 0), (0, rows), (0, 0)]
        assert found == [{"gradients": g, "reducing": 0, "rows": r} for g, r in counts]


def _held(how: str) -> list[int]:
    """Bytes that a reduction holds before and after it was waited for."""
    peers, cpu, found = Peers.of(dist.group.WORLD), torch.device("cpu"), []
    with use_collectives(how):
        grads = Gradients([torch.ones(16)], (8,), torch.float32)
        reduction = collectives.choose(peers, cpu).reduce_scatter(grads, peers, cpu)
        found.append(reduction.held)
        reduction.wait()
        return [*found, reduction.held]


def test_a_reduction_holds_its_message_and_what_it_receives_and_then_its_output(run_ranks):
    output, message = 4 * 8, 4 * 16
    assert run_ranks(2, _held, "shared") == [[output, output]] * 2
    assert run_ranks(2, _held, "direct") == [[message + output, output]] * 2
    assert run_ranks(2, _held, "backend") == [[message + output, output]] * 2


def _views_that_are_kept(numel: int) -> int:
    peers, cpu = Peers.of(dist.new_group()), torch.device("cpu")
    mailboxes = SharedCollectives(DirectCollectives())
    grads = Gradients([torch.ones(2 * numel)], (numel,), torch.float32)
    mailboxes.reduce_scatter(grads, peers, cpu)
    return len(mailboxes._lanes(peers)._views)


def test_views_of_mailboxes_are_kept_for_messages_of_one_chunk_only(run_ranks):
    assert run_ranks(2, _views_that_are_kept, 100) == [2, 2]  # one to write, one to read
    assert run_ranks(2, _views_that_are_kept, 2**18) == [0, 0]


def _from_a_late_peer(how: str) -> None:
    peers, cpu = Peers.of(dist.group.WORLD), torch.device("cpu")
    with use_collectives(how):
        for _ in range(2):  # buffers that were used before do not hold zeros
            if peers.rank == 1:
                time.sleep(0.2)
            grads = Gradients([torch.full((8,), 1.0 + peers.rank)], (4,), torch.float32)
            reduction = collectives.choose(peers, cpu).reduce_scatter(grads, peers, cpu)
            assert torch.equal(reduction.wait(), torch.full((4,), 3.0))


@pytest.mark.parametrize("how", ["shared", "direct", "backend"])
def test_a_reduction_waits_for_a_late_peer(run_ranks, how):
    run_ranks(2, _from_a_late_peer, how)


def _kept_by_a_reduction(how: str) -> int:
    """Gradients that are there while a reduction of them is."""
    with use_collectives(how):
        peers, cpu = Peers.of(dist.group.WORLD), torch.device("cpu")
        full = [torch.ones(8), torch.ones(8)]
        refs = [weakref.ref(grad) for grad in full]
        grads = Gradients(full, (4, 4), torch.float32)
        reduction = collectives.choose(peers, cpu).reduce_scatter(grads, peers, cpu)
        del full, grads
        kept = sum(ref() is not None for ref in refs)
        assert torch.equal(reduction.wait(), torch.full((8,), 2.0))
    return kept


@pytest.mark.parametrize("how", ["shared", "direct", "backend"])
def test_a_reduction_keeps_no_gradient(run_ranks, how):
    assert run_ranks(2, _kept_by_a_reduction, how) == [0, 0]

"""Our own exchanges give the bits of gloo's collectives, whose summation order `ring` knows."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from minifsdp.collectives import ring
from minifsdp.collectives.backend import BackendCollectives
from minifsdp.collectives.direct import DirectCollectives
from minifsdp.collectives.packed import Gradients, Peers
from minifsdp.collectives.shared import SharedCollectives

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@given(
    piece_numel=st.one_of(st.integers(0, 100), st.integers(0, 3_000_000)),
    world_size=st.integers(2, 9),
    element_bytes=st.sampled_from([2, 4, 8]),
)
def test_spans_tile_the_piece_and_owners_are_ranks(piece_numel, world_size, element_bytes):
    owners = []
    for rank in range(world_size):
        spans = ring.spans(piece_numel, world_size, element_bytes, rank)
        starts, stops = [s.start for s in spans], [s.stop for s in spans]
        assert [0, *stops][: len(spans) + 1] == [*starts, piece_numel if spans else 0]
        assert all(span.start < span.stop for span in spans)
        assert bool(spans) == (piece_numel > 0)
        owners += [span.owner for span in spans]
    assert owners == sorted(owners)
    assert set(owners) <= set(range(world_size))


@given(world_size=st.integers(2, 9), data=st.data())
def test_every_rank_is_added_once_and_the_owner_last(world_size, data):
    owner = data.draw(st.integers(0, world_size - 1))
    order = ring.summation_order(owner, world_size)
    assert sorted(order) == list(range(world_size))
    assert order[0] == (owner - 1) % world_size
    assert order[-1] == owner


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Integers that are equal where bits are: NaN equals itself, and 0.0 differs from -0.0."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _piece_sizes(dtype: torch.dtype, world_size: int) -> list[int]:
    """Elements a rank: tiny ones, some at random, and messages around and above 1 MiB."""
    draw = random.Random(f"{dtype} {world_size}")
    mebibyte = 2**20 // dtype.itemsize // world_size
    tiny = [1, 2, 3, 5, 7]
    anywhere = [draw.randint(1, 2000) for _ in range(6)]
    large = [mebibyte, mebibyte + 1, draw.randint(mebibyte, 3 * mebibyte)]
    return tiny + anywhere + large


def _message(piece_numel: int, dtype: torch.dtype, rank: int, world_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * piece_numel + rank)
    exact = torch.float64 if dtype == torch.float64 else torch.float32  # all bits in use
    return torch.randn(world_size, piece_numel, generator=generator, dtype=exact).to(dtype)


def _reduced(collectives, message: torch.Tensor, peers: Peers, average: bool) -> torch.Tensor:
    grads = Gradients([message.view(-1)], (message.shape[1],), message.dtype, average=average)
    return collectives.reduce_scatter(grads, peers, CPU).wait()


def _all_collectives() -> list:
    direct = DirectCollectives()
    return [direct, BackendCollectives(), SharedCollectives(direct)]


def _reductions_that_differ(dtype: torch.dtype) -> list[tuple[str, int, bool]]:
    peers = Peers.of(dist.group.WORLD)
    everyone = _all_collectives()
    found = []
    for numel in _piece_sizes(dtype, peers.size):
        message = _message(numel, dtype, peers.rank, peers.size)
        for average in (False, True):
            gloo = torch.empty(numel, dtype=dtype)
            dist.reduce_scatter_tensor(gloo, message.view(-1))
            if average:
                gloo.div_(peers.size)
            for collectives in everyone:
                result = _reduced(collectives, message, peers, average)
                if not torch.equal(_bits(result), _bits(gloo)):
                    found.append((collectives.name, numel, average))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_reductions_equal_gloos_bit_for_bit(run_ranks, world_size, dtype):
    assert run_ranks(world_size, _reductions_that_differ, dtype) == [[]] * world_size


def _first_elements_of_long_messages() -> list[dict[str, list[float]]]:
    """Of messages that are just over a number of segments: the beginning of this rank's piece.

    With 1, 2**-9 and -1 in bf16 the order decides: (1 - 1) + 2**-9, but 1 + 2**-9 is 1.
    """
    peers, found = Peers.of(dist.group.WORLD), []
    for slot in (1_136_000, 1_400_002):
        sums = {}
        for collectives in _all_collectives():
            value = [1.0, 2**-9, -1.0][peers.rank]
            full = torch.full((slot * peers.size,), value, dtype=torch.bfloat16)
            grads = Gradients([full], (slot,), torch.bfloat16)
            output = collectives.reduce_scatter(grads, peers, CPU).wait()
            sums[collectives.name] = output[:8].tolist()
        found.append(sums)
    return found


def test_long_messages_are_added_in_gloos_order_to_the_first_element(run_ranks):
    for found in run_ranks(3, _first_elements_of_long_messages):
        for sums in found:
            assert sums["direct"] == sums["backend"] == sums["shared"]


def _sum_in_rank_order_differs(dtype: torch.dtype) -> bool:
    """Whether gloo's sum and one in the order of ranks differ: else the test above shows little."""
    rank, size = dist.get_rank(), dist.get_world_size()
    messages = [_message(4096, dtype, r, size) for r in range(size)]
    gloo = torch.empty(4096, dtype=dtype)
    dist.reduce_scatter_tensor(gloo, messages[rank].view(-1))
    total = messages[0][rank].clone()
    for other in messages[1:]:
        total += other[rank]
    return not torch.equal(total, gloo)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_summation_order_would_be_seen(run_ranks, dtype):
    assert any(run_ranks(3, _sum_in_rank_order_differs, dtype))


@dataclass
class _Part:
    """What a rank sends: rows in `kept` dtype, cast to `message_dtype` on the way."""

    kept: torch.Tensor
    message_dtype: torch.dtype
    slots: tuple[int, ...]
    number: int = 0

    def source(self) -> torch.Tensor:
        return self.kept

    def copy_into(self, slot: torch.Tensor) -> None:
        slot.copy_(self.kept)


def _parts(rank: int, sizes: list[tuple[int, ...]]) -> list[_Part]:
    generator = torch.Generator().manual_seed(rank)
    kept = [torch.float32, torch.float64, torch.float16]
    sent = [torch.bfloat16, torch.float64, torch.float32]
    return [
        _Part(torch.randn(sum(slots), generator=generator).to(kept[i % 3]), sent[i % 3], slots)
        for i, slots in enumerate(sizes)
    ]


def _gathers_that_differ(cases: list[list[tuple[int, ...]]]) -> list[tuple[str, int]]:
    peers = Peers.of(dist.group.WORLD)
    found = []
    for case, sizes in enumerate(cases):
        everyone = [_parts(rank, sizes) for rank in range(peers.size)]
        for collectives in _all_collectives():
            mine = everyone[peers.rank]
            outputs = [
                [torch.empty(peers.size, slot, dtype=part.message_dtype) for slot in part.slots]
                for part in mine
            ]
            of_ranks = [list(zip(*slots, strict=True)) for slots in outputs]
            collectives.all_gather(mine, peers, CPU).wait(of_ranks)
            for index, part in enumerate(mine):
                sent = torch.stack([parts[index].kept for parts in everyone])
                expected = sent.to(part.message_dtype).split(part.slots, dim=1)
                for got, want in zip(outputs[index], expected, strict=True):
                    if not torch.equal(_bits(got), _bits(want)):
                        found.append((collectives.name, case))
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_gathers_bring_what_every_rank_sent(run_ranks, world_size):
    cases = [
        [(1,)],
        [(3, 0, 5)],
        [(0,), (2, 3)],
        [(1,), (7, 1), (5, 3, 1)],
        [(200_001, 100_003), (70_000,), (9,)],
    ]
    assert run_ranks(world_size, _gathers_that_differ, cases) == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_all_gather_of_nothing_brings_nothing(run_ranks, world_size):
    assert (
        run_ranks(world_size, _gathers_that_differ, [[(0,)], [(0, 0), (0,)]]) == [[]] * world_size
    )


def _buffers_are_reused() -> list[bool]:
    """Whether a second message of one size lies where the first lay, and is right all the same."""
    peers = Peers.of(dist.group.WORLD)
    seen = []
    for collectives in (DirectCollectives(), BackendCollectives()):
        places = []
        for seed in range(3):
            full = torch.full((50_000 * peers.size,), float(seed + peers.rank))
            grads = Gradients([full], (50_000,), torch.float32)
            reduction = collectives.reduce_scatter(grads, peers, CPU)
            places.append(reduction.message.data_ptr())
            expected = float(sum(seed + rank for rank in range(peers.size)))
            seen.append(bool((reduction.wait() == expected).all()))
        seen.append(len(set(places)) < 3)
    return seen


def test_message_buffers_are_reused_between_messages(run_ranks):
    for seen in run_ranks(3, _buffers_are_reused):
        assert all(seen)

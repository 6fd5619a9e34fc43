"""What is kept, freed and copied: nothing outlives the model, and one rank copies nothing."""

from __future__ import annotations

import gc
import itertools
import resource
import weakref
from pathlib import Path

import pytest
import stack
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

import minifsdp
from minifsdp import events, pages


class Spy(stack.Block):
    """Keeps a weak reference to each full weight it computed with."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [weakref.ref(p) for p in self.parameters()]
        return super().forward(x)


def _what_outlives_the_model(until: str) -> list[str]:
    """Full and sharded parameters alive after `del model`, with no garbage collection."""
    gc.collect()
    gc.disable()
    try:
        model = stack.shard(stack.build(Spy))
        watched = {name: weakref.ref(p) for name, p in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            loss = model(stack.batch()).sum()
            if until == "step":
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        if until == "forward":
            watched["front.weight, whole"] = weakref.ref(model.front.weight)
        for i, layer in enumerate(model.layers):
            watched |= {f"{i} {j}, whole": ref for j, ref in enumerate(layer.seen)}
        del model, optimizer, loss, layer
        return [name for name, ref in watched.items() if ref() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("until", ["forward", "step"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_deleting_the_model_frees_its_parameters_without_the_collector(
    run_ranks, world_size, until
):
    assert run_ranks(world_size, _what_outlives_the_model, until) == [[]] * world_size


def _storage_bytes_between_steps() -> dict[str, int]:
    """Bytes of the blocks' full weights while autograd still refers to them, and after a step."""
    model = stack.shard(stack.build(Spy))
    loss = model(stack.batch()).sum()

    def held() -> int:
        seen = [ref() for layer in model.layers for ref in layer.seen]
        return sum(p.untyped_storage().nbytes() for p in seen if p is not None)

    sizes = {"after forward": held()}
    loss.backward()
    return sizes | {"after backward": held()}


def test_resharded_units_hold_no_bytes_though_autograd_refers_to_them(run_ranks):
    assert (
        run_ranks(2, _storage_bytes_between_steps)
        == [{"after forward": 0, "after backward": 0}] * 2
    )


class Placed(stack.Block):
    """Remembers where its first weight lies while it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen_at = self.up.weight.data_ptr()
        return super().forward(x)


def _places_on_one_rank(dtype: torch.dtype | None) -> tuple[bool, int]:
    """Whether weights compute where the shard lies, and how many bytes travel."""
    policy = minifsdp.MixedPrecisionPolicy(dtype)
    model = stack.shard(stack.build(Placed), mp_policy=policy)
    sizes: list[int] = []
    with events.listening(lambda e: sizes.append(e.nbytes)):
        stack.step(model)
    in_place = [b.seen_at == b.up.weight.to_local().data_ptr() for b in model.layers]
    assert len(set(in_place)) == 1
    return in_place[0], sum(sizes)


def test_one_rank_copies_no_parameter_that_needs_no_cast(run_ranks):
    assert run_ranks(1, _places_on_one_rank, None) == [(True, 0)]
    assert run_ranks(1, _places_on_one_rank, torch.bfloat16) == [(False, 0)]


N, BLOCKS = 512, 4
UNIT_BYTES = 4 * N * N


def _peak(steps_in_backward: bool) -> int:
    """Bytes of the most held at once in a third step above what was held before it."""
    model = nn.Sequential(*[nn.Linear(N, N, bias=False) for _ in range(BLOCKS)])
    for block in model:
        minifsdp.fully_shard(block)
    minifsdp.fully_shard(model)

    def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, fused=True)

    if steps_in_backward:
        optimizer = minifsdp.step_in_backward(model, adamw)
    else:
        optimizer = adamw(list(model.parameters()))
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            model(torch.ones(1, N)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(nbytes for _, nbytes in changes))


def _mapped_by_a_group() -> int:
    """Bytes that a process group's first messages map to be shared."""
    before = _shared_bytes()
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    model = stack.shard(stack.build(), mesh=mesh)
    stack.step(model)
    return _shared_bytes() - before


def _shared_bytes() -> int:
    """Bytes of the shared-memory file system that are mapped to be shared."""
    found = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, permissions, *rest = line.split()
            if permissions.endswith("s") and any("/dev/shm" in word for word in rest):
                start, stop = (int(address, 16) for address in addresses.split("-"))
                found += stop - start
    return found


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("steps_in_backward", [False, True])
def test_the_most_held_at_once_follows_the_byte_formula(run_ranks, world_size, steps_in_backward):
    """At the end of the first block's backward: its parameters and gradients in full, and the rows
    of the other blocks' gradients, unless they have been stepped on."""
    rows = 0 if steps_in_backward else (BLOCKS - 1) * UNIT_BYTES // world_size
    formula = 2 * UNIT_BYTES + rows
    for peak in run_ranks(world_size, _peak, steps_in_backward):
        assert formula <= peak <= formula + 64 * 1024


def test_what_is_shared_is_two_halves_a_rank_and_a_page(run_ranks):
    for world_size in (2, 4):
        half = min(2**18 * (world_size - 1), 2**20)
        mapped = world_size * (2 * half + 4096)
        assert run_ranks(world_size, _mapped_by_a_group) == [mapped] * world_size


def test_large_host_buffers_get_large_pages_where_the_system_has_them():
    choice = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not choice.exists() or "[never]" in choice.read_text():
        pytest.skip("this system has no large pages")
    tensor = torch.empty(2**26, dtype=torch.uint8)
    pages.prefer_huge(tensor.untyped_storage())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensor.zero_()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 2**26 // 4096 // 4


def test_small_or_empty_buffers_are_left_alone():
    for numel in (0, 1, 2**20):
        pages.prefer_huge(torch.zeros(numel).untyped_storage())

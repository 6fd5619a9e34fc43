"""Collectives through shared memory: the bits of the backend, and safe however a rank ends."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import Pool, RanksFailed
from small_net import build, data, reference_gradients, whole_gradients
from test_ring import CPU, _bits, _Part
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from minifsdp import fully_shard
from minifsdp.collectives import Gradients, Peers, mailbox, use_collectives
from minifsdp.collectives.backend import BackendCollectives
from minifsdp.collectives.direct import DirectCollectives
from minifsdp.collectives.shared import SharedCollectives, cuts

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def world() -> Peers:
    return Peers.of(dist.group.WORLD)


def slots_of(draw: random.Random) -> tuple[int, ...]:
    """Slots of a few parameters: mostly small, some empty, now and then larger than a half."""
    large = draw.random() < 0.05
    return tuple(
        draw.choice([0, 1, draw.randint(1, 50), draw.randint(1, 400_000 if large else 3000)])
        for _ in range(draw.randint(1, 5))
    )


def gathered(collectives, parts, peers) -> list[torch.Tensor]:
    outputs = [
        [[torch.empty(slot, dtype=part.message_dtype) for slot in part.slots] for part in parts]
        for _ in range(peers.size)
    ]
    gather = collectives.all_gather(parts, peers, CPU)
    gather.wait([[outputs[r][i] for r in range(peers.size)] for i in range(len(parts))])
    return [slot for of_rank in outputs for of_part in of_rank for slot in of_part]


def reduced(collectives, slots, dtype, average, generator, peers) -> torch.Tensor:
    full = []
    for slot in slots:
        missing = min(slot, 2) if slot % 3 == 0 else 0  # rows that end before the last slot does
        grad = torch.randn(slot * peers.size - missing, generator=generator).to(dtype)
        full.append(grad)
    grads = Gradients(full, slots, dtype, average=average, divisor=1.0 if average else 2.0)
    return collectives.reduce_scatter(grads, peers, CPU).wait()


def _random_steps(seed: int, steps: int) -> list[str]:
    """Messages of random shapes in random order, by mailboxes and by the backend."""
    peers = world()
    shared, backend = SharedCollectives(DirectCollectives()), BackendCollectives()
    draw = random.Random(seed)
    differ = []
    for step in range(steps):
        slots, dtype = slots_of(draw), draw.choice(DTYPES)
        average, gathers = draw.random() < 0.5, draw.random() < 0.5
        abandoned = draw.random() < 0.1
        results = []
        for collectives in (shared, backend):
            generator = torch.Generator().manual_seed(1000 * step + peers.rank)
            if gathers:
                values = torch.randn(sum(slots), generator=generator)
                parts = [_Part(values, dtype, slots), _Part(values.double(), dtype, slots)]
                if abandoned:
                    gather = collectives.all_gather(parts, peers, CPU)
                    gather.finish()
                    gather.discard()
                results.append(gathered(collectives, parts, peers))
            else:
                results.append([reduced(collectives, slots, dtype, average, generator, peers)])
        if not all(torch.equal(_bits(a), _bits(b)) for a, b in zip(*results, strict=True)):
            differ.append(f"step {step}: {slots} {dtype} {'gather' if gathers else 'reduce'}")
    return differ


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_500_steps_of_random_shapes_and_orders_equal_the_backend_bit_for_bit(run_ranks, world_size):
    assert run_ranks(world_size, _random_steps, world_size, 500) == [[]] * world_size


def test_cuts_tile_every_slot():
    draw = random.Random(0)
    for _ in range(200):
        slots, capacity = slots_of(draw)[:3], draw.randint(1, 2000)
        if sum(slots) > 10_000:
            continue
        seen = [
            (i, e) for cut in cuts(slots, capacity) for i, a, b in cut.spans for e in range(a, b)
        ]
        assert seen == [(i, e) for i, slot in enumerate(slots) for e in range(slot)]
        assert all(0 < cut.stop - cut.start <= capacity for cut in cuts(slots, capacity))


def _allocations() -> tuple[list[int], list[int]]:
    """Bytes allocated by a gather and by a reduction, the third of their kind."""
    from torch.profiler import ProfilerActivity, profile

    peers = world()
    shared = SharedCollectives(DirectCollectives())
    slots = (3000, 500_000)
    part = _Part(torch.zeros(sum(slots)), torch.float32, slots)
    outputs = [[torch.empty(slot) for slot in slots] for _ in range(peers.size)]
    found = []
    for kind in ("gather", "reduce"):
        for _ in range(3):
            full = [torch.ones(slot * peers.size) for slot in slots]
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
                if kind == "gather":
                    shared.all_gather([part], peers, CPU).wait([outputs])
                else:
                    grads = Gradients(full, slots, torch.float32, average=True)
                    shared.reduce_scatter(grads, peers, CPU)
        events = seen.profiler.kineto_results.events()
        sizes = [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]
        found.append(sizes)
    return found[0], found[1]


@pytest.mark.parametrize("world_size", [2, 3])
def test_mailboxes_allocate_nothing_but_the_reduced_rows(run_ranks, world_size):
    for gather, reduction in run_ranks(world_size, _allocations):
        assert gather == []
        assert reduction == [4 * 503_000]


def _waits_in_other_orders() -> bool:
    """Units are gathered for the user in the order of `unshard`, whatever order ranks wait in."""
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])
    whole = [layer.weight.detach().clone() for layer in model]
    for tensor in whole:
        dist.broadcast(tensor, 0)
    for layer, tensor in zip(model, whole, strict=True):
        layer.weight.data.copy_(tensor)
        fully_shard(layer)
    fully_shard(model)
    handles = [layer.unshard(async_op=True) for layer in model]
    for handle in handles if dist.get_rank() else handles[::-1]:
        handle.wait()
    return all(torch.equal(a.weight, b) for a, b in zip(model, whole, strict=True))


def test_ranks_may_wait_for_asynchronous_unshards_in_any_order(run_ranks):
    assert run_ranks(2, _waits_in_other_orders) == [True, True]


def _evaluates_first() -> bool:
    """Train after a group's first message was sent in inference mode."""
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    model = build(mesh=mesh)
    with torch.inference_mode():
        model(data())
    model(data()).square().mean().backward()
    pairs = zip(whole_gradients(model), reference_gradients(), strict=True)
    return all(torch.allclose(a, b) for a, b in pairs)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_first_message_of_a_group_may_be_of_an_evaluation(run_ranks, world_size):
    assert run_ranks(world_size, _evaluates_first) == [True] * world_size


def _groups_that_come_and_go() -> list[int]:
    """Open files after each of several process groups that were used and dropped."""
    counts = []
    for _ in range(4):
        group = dist.new_group()
        model = build(mesh=DeviceMesh.from_group(group, "cpu"))
        model(data()).square().mean().backward()
        del model
        gc.collect()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        counts.append(Path("/proc/self/maps").read_text().count("/dev/shm"))
    return counts


def test_a_dropped_group_leaves_no_mailbox(run_ranks):
    for counts in run_ranks(2, _groups_that_come_and_go):
        assert len(set(counts)) == 1


# When sharing is not possible


def _without_room(folder: str) -> tuple[list[str], bool]:
    """The warnings of two steps, and whether their gradients are right all the same."""
    mailbox._FOLDER, usual = folder, mailbox._FOLDER
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")  # which has no mailboxes yet
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = build(mesh=mesh)
            for step in range(2):
                model(data(step)).square().mean().backward()
    finally:
        mailbox._FOLDER = usual
    messages = [str(w.message) for w in caught if "share memory" in str(w.message)]
    pairs = zip(whole_gradients(model), reference_gradients(2), strict=True)
    return messages, all(torch.allclose(a, b) for a, b in pairs)


def check_fallback(run_ranks, folder: str, reason: str) -> None:
    (first, right), *others = run_ranks(2, _without_room, folder)
    assert right and all(right for _, right in others)
    assert len(first) == 1 and reason in first[0] and "use_collectives" in first[0]
    assert all(messages == [] for messages, _ in others)


def test_without_a_shared_memory_file_system_messages_go_through_sockets(run_ranks):
    check_fallback(run_ranks, "/nonexistent", "No such file or directory")


def test_a_full_shared_memory_file_system_falls_back_with_one_warning(run_ranks):
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("mounting a small file system needs root")
        try:
            check_fallback(run_ranks, folder, "No space left on device")
        finally:
            subprocess.run(["umount", folder], check=True)


def _elsewhere() -> tuple[list[str], bool]:
    """As `_without_room`, on a processor or hosts that mailboxes are not for."""
    mailbox._is_supported, usual = (lambda: False), mailbox._is_supported
    try:
        return _without_room(mailbox._FOLDER)
    finally:
        mailbox._is_supported = usual


def test_where_ranks_cannot_share_by_nature_nobody_is_warned(run_ranks):
    assert run_ranks(2, _elsewhere) == [([], True)] * 2


# Ranks that end, stay away, or do something else


def _train_until(rank: int, step: int, folder: str) -> None:
    """Train; `rank` kills itself at `step`. The others write to `folder` what they are told."""
    use_collectives("shared")
    model = build()
    started = 0.0
    try:
        for now in range(step + 3):
            if now == step:
                started = time.monotonic()
                if dist.get_rank() == rank:
                    os.kill(os.getpid(), signal.SIGKILL)
            model(data(now)).square().mean().backward()
    except RuntimeError as error:
        seconds = time.monotonic() - started
        with open(os.path.join(folder, str(dist.get_rank())), "w") as file:
            file.write(f"{seconds:.3f} {error}")
        raise


def test_a_killed_rank_is_named_within_seconds_and_leaves_nothing(tmp_path):
    before = sorted(os.listdir("/dev/shm"))
    free_before = os.statvfs("/dev/shm").f_bavail
    pool = Pool(3)
    with pytest.raises(RanksFailed, match="died"):
        pool.run(_train_until, 1, 2, str(tmp_path), timeout=30)
    for rank in (0, 2):
        seconds, told = (tmp_path / str(rank)).read_text().split(" ", 1)
        assert float(seconds) < 5
        assert "rank 1 has died" in told
    pool.stop()
    assert sorted(os.listdir("/dev/shm")) == before
    assert os.statvfs("/dev/shm").f_bavail >= free_before - 16


def _late() -> str:
    """Rank 1 does not come to a message of a group that waits one second."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    peers = Peers.of(group)
    shared = SharedCollectives(DirectCollectives())
    part = _Part(torch.zeros(4), torch.float32, (4,))
    outputs = [[[torch.empty(4)] for _ in range(peers.size)]]
    shared.all_gather([part], peers, CPU).wait(outputs)
    if peers.rank == 1:
        return ""
    with pytest.raises(RuntimeError, match="rank 1 did not come to a message within 1 s"):
        shared.all_gather([part], peers, CPU).wait(outputs)
    return "told"


def test_a_rank_that_does_not_come_is_named(run_ranks):
    assert run_ranks(2, _late) == ["told", ""]


def _other_message() -> None:
    peers = world()
    shared = SharedCollectives(DirectCollectives())
    part = _Part(torch.zeros(4), torch.float32, (4,), number=peers.rank)
    outputs = [[[torch.empty(4)] for _ in range(peers.size)]]
    with pytest.raises(RuntimeError, match=r"sends another message .*of unit number"):
        shared.all_gather([part], peers, CPU).wait(outputs)


def test_ranks_in_different_messages_are_told(run_ranks):
    run_ranks(2, _other_message, spoils=True)


def test_other_users_cannot_open_a_mailbox():
    descriptor = mailbox._reserve(4096)
    about = os.fstat(descriptor)
    os.close(descriptor)
    assert (oct(about.st_mode & 0o777), about.st_nlink) == ("0o600", 0)  # and no folder has it

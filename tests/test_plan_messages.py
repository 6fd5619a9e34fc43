"""Messages that are not units': DTensor redistributes, so do optimizers of whole matrices."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import minifsdp
from minifsdp.plan import GPU, Settings, rehearse
from minifsdp.plan.books import Rehearsal
from minifsdp.plan.categories import Category
from minifsdp.plan.costs import Awaited, Mark, Message, Told, Work, message_of
from minifsdp.plan.ledger import Ledger
from minifsdp.plan.machines import Cluster, gpu_named
from minifsdp.plan.timeline import simulate
from minifsdp.plan.world import fake_tensors, pretended_world

FOUR = (0, 1, 2, 3)


@pytest.mark.parametrize("device_type", ["cpu", GPU])
def test_a_redistribution_is_a_message_that_is_waited_for(device_type):
    ledger = Ledger(device_type)
    with pretended_world(4, device_type):
        mesh = init_device_mesh(device_type, (4,))
        with fake_tensors(), ledger:
            whole = _gathered(mesh, device_type)
        assert whole.to_local().shape == (8, 8)
    sent = [step for step in ledger.trace if isinstance(step, (Message, Awaited))]
    assert sent == [Message("all_gather", 8 * 8 * 4, FOUR), Awaited()]


def _gathered(mesh: DeviceMesh, device_type: str) -> DTensor:
    rows = torch.zeros(2, 8, device=device_type)
    whole = DTensor.from_local(rows, mesh, [Shard(0)]).redistribute(placements=[Replicate()])
    whole.to_local().add(1)  # what waits for it
    return whole


def test_the_bytes_of_functional_messages_are_those_of_all_ranks_pieces():
    ops, made = torch.ops._c10d_functional, []
    ledger = Ledger(GPU)
    with pretended_world(4, GPU), fake_tensors(), ledger:
        name, rows = dist.group.WORLD.group_name, torch.zeros(8, 8, device=GPU)
        made.append(ops.all_reduce(rows, "sum", name))
        made.append(ops.reduce_scatter_tensor(rows, "sum", 4, name))
        made.append(ops.all_gather_into_tensor_coalesced([rows, rows], 4, name))
        made.append(ops.broadcast(rows, 0, name))
    sent = [step for step in ledger.trace if isinstance(step, Message)]
    assert sent == [
        Message("all_reduce", 256, FOUR),
        Message("reduce_scatter", 256, FOUR),
        Message("all_gather", 4 * 512, FOUR),
        Message("other", 256, FOUR),
    ]


def test_a_message_of_unknown_ranks_is_refused():
    given = (torch.zeros(8), "sum", "nobody")
    with pytest.raises(RuntimeError, match=r"cannot tell which ranks _c10d_functional\.all_reduce"):
        message_of(torch.ops._c10d_functional.all_reduce.default, given, {}, torch.zeros(8))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("shape", [(8, 6), (6, 8)])
def test_muon_is_planned_with_the_messages_it_sends_itself(shape):
    def build():
        with torch.device("meta"):
            model = nn.Linear(*shape, bias=False)
        mesh = init_device_mesh(GPU, (dist.get_world_size(),))
        return minifsdp.fully_shard(model, mesh=mesh), lambda m: torch.optim.Muon(m.parameters())

    planned = rehearse(build, lambda: torch.zeros(5, shape[0]), 4, GPU, Settings(clip_norm=None))
    phase, sent, products = "", [], 0
    for step in planned.trace:
        if isinstance(step, Mark):
            phase = step.phase
        elif phase == "optimizer" and isinstance(step, Message):
            sent.append(step)
        elif phase == "optimizer" and isinstance(step, Work):
            products += step.operator in ("mm", "addmm")
    assert products == 3 * 5  # of each of five Newton-Schulz iterations
    assert {step.ranks for step in sent} == {FOUR}
    assert sent[0].kind == "all_reduce" and sent[0].nbytes <= 4  # of the norm
    assert planned.peak(False).own_peaks[Category.OPTIMIZER] > 0
    timing = simulate(planned, Cluster(gpu_named(80), 4, 200.0))
    assert timing.by_phase["optimizer"] > 0


def test_a_step_waits_for_the_message_that_was_launched_last():
    cluster = Cluster(gpu_named(80), 4, 200.0)
    gather = Message("all_gather", 10**9, FOUR)
    alone = cluster.seconds("all_gather", 10**9, FOUR)

    def seconds(*trace) -> float:
        books = Rehearsal(4, GPU, 0, 0, 0, {}, [], [], [*trace, Told("", "")], FOUR)
        return simulate(books, cluster).exposed

    assert seconds(gather, Awaited()) == pytest.approx(alone)
    assert seconds(gather) == 0

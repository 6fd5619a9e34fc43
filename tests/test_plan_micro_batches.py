"""Steps of many micro-batches: three rehearsed are all of them, in every figure."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import minifsdp
from minifsdp.plan import GPU, Rehearsal, Settings, rehearsal, rehearse
from minifsdp.plan.books import Repeated
from minifsdp.plan.categories import Category
from minifsdp.plan.costs import Mark, Work
from minifsdp.plan.ledger import Place
from minifsdp.plan.machines import HOST_GB_S, Cluster, gpu_named
from minifsdp.plan.timeline import simulate

OFFLOADED = {"offload_policy": minifsdp.CPUOffloadPolicy()}
CLUSTERS = [  # computing, the network, or the host is what takes longest
    Cluster(gpu_named("A100-80"), 2, 200.0),
    Cluster(gpu_named("L4-24"), 2, 0.001),
]


class Pair(nn.Module):
    """Two units; leaves something behind in each forward, if it is told to."""

    def __init__(self, hoards: bool) -> None:
        super().__init__()
        self.first, self.second, self.hoards = nn.Linear(64, 64), nn.Linear(64, 64), hoards
        self.kept: list[torch.Tensor] = []

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out = self.second(self.first(rows).relu())
        if self.hoards:
            self.kept += [out.detach().clone(), out.detach().to("cpu")]
        return out


def _planned(settings: Settings, hoards: bool = False, replicas: int = 1, **sharded) -> Rehearsal:
    def build():
        with torch.device("meta"):
            model = Pair(hoards)
        shape = (replicas, dist.get_world_size() // replicas)
        mesh = init_device_mesh(GPU, shape if replicas > 1 else shape[1:])
        for module in (model.first, model.second, model):
            minifsdp.fully_shard(module, mesh=mesh, **sharded)
        return model, _adamw

    return rehearse(build, lambda: torch.zeros(5, 64, device=GPU), 4, GPU, settings)


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.register_step_post_hook(lambda *_: model.kept.clear())
    return optimizer


def _figures(books: Rehearsal) -> dict:
    return {
        "device": books.peak(False), "host": books.peak(True), "messages": books.messages,
        "flops": books.flops_by_operator(), "model": books.model_flops, "tokens": books.tokens,
        "without": books.peak(False, frozenset({Category.PARAMETERS})),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "no_sync", "sharded"),
    [
        ((2, 3, 5, 8), False, {}),
        ((4, 6), True, {"replicas": 2}),
        ((4,), False, OFFLOADED),
        ((5,), True, OFFLOADED),
        ((3, 7), False, {"hoards": True}),
    ],
    ids=["plain", "HSDP, no sync", "offload", "offload, no sync", "keeps outputs"],
)
def test_three_micro_batches_tell_all_of_the_others(monkeypatch, numbers, no_sync, sharded):
    for number in numbers:
        settings = Settings(micro_batches=number, no_sync=no_sync)
        short = _planned(settings, **sharded)
        with monkeypatch.context() as patched:
            patched.setattr(rehearsal, "_MICRO_BATCHES", 99)
            whole = _planned(settings, **sharded)
        assert whole.repeated is None
        assert _figures(short) == _figures(whole)
        for cluster in CLUSTERS:
            ours, theirs = simulate(short, cluster), simulate(whole, cluster)
            assert ours[:6] == pytest.approx(theirs[:6], rel=1e-9)
            assert ours.by_phase == pytest.approx(theirs.by_phase, rel=1e-9)


def test_a_hundred_million_micro_batches_take_no_longer_than_three():
    began = time.process_time()
    many = _planned(Settings(micro_batches=10**8))
    offloaded = _planned(Settings(micro_batches=10**8), **OFFLOADED)
    assert all(simulate(offloaded, cluster).seconds > 10 for cluster in CLUSTERS)
    assert many.tokens == 5 * 10**8
    assert many.messages["reduce_scatter"].count == 2 * 10**8
    one = simulate(_planned(Settings()), CLUSTERS[0]).seconds
    assert 0.5 * one < simulate(many, CLUSTERS[0]).seconds / 10**8 < one
    assert time.process_time() - began < 3


def test_a_clock_that_catches_up_is_not_multiplied_past_that():
    """The host is behind at first and slower: the device is to wait for it from the 50th on."""
    nbytes = int(CLUSTERS[0].gpu.memory_gb_s * 1e9 * CLUSTERS[0].gpu.efficiency)
    begins = [Mark("inputs", ""), Work("add", 0, None, 100 * nbytes, False)]
    again = [
        Mark("inputs", ""), Work("add", 0, None, int(3 * HOST_GB_S * 1e9), True),
        Work("add", 0, None, nbytes, False),
    ]  # fmt: skip

    def seconds(trace: list, repeated: Repeated | None) -> float:
        books = Rehearsal(4, GPU, 0, 0, 0, {}, [], [], trace, (0, 1, 2, 3), repeated)
        return simulate(books, CLUSTERS[0]).seconds

    short = Repeated(Place(0, 2, 0), Place(0, 5, 0), 500)
    assert seconds(begins + again, short) == pytest.approx(3 * 500 + 1)
    assert seconds(begins + 500 * again, None) == pytest.approx(3 * 500 + 1)

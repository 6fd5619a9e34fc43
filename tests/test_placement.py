"""Process groups: made once for the ranks they join, and again for a new default group."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minifsdp.collectives import Peers
from minifsdp.placement import Home, default_mesh, near_home, twin_of


def ranks_of(peers: Peers) -> list[int]:
    return dist.get_process_group_ranks(peers.group)


def _twins() -> None:
    world = Peers.of(dist.group.WORLD)
    pair = Home.of(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))).shards
    for peers in (world, pair):
        twin = twin_of(peers)
        assert ranks_of(twin) == ranks_of(peers) and twin.group is not peers.group
        assert (twin.rank, twin.size) == (peers.rank, peers.size)
        assert twin_of(peers).group is twin.group


def test_a_twin_joins_the_same_ranks_and_is_made_once(run_ranks):
    run_ranks(4, _twins)


def _neighbours() -> None:
    home, turned = default_mesh(), DeviceMesh("cpu", torch.tensor([0, 2, 1, 3]))
    for mesh, expected in ((home, [[0, 1], [2, 3]]), (turned, [[0, 2], [1, 3]])):
        near = near_home(Home.of(mesh), 2)
        assert near.mesh.mesh.tolist() == expected
        assert near_home(Home.of(mesh), 2) is near


def test_neighbours_are_those_of_the_mesh(run_ranks):
    run_ranks(4, _neighbours)


def _begun_again(folder: str) -> None:
    first = twin_of(Peers.of(dist.group.WORLD)).group
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="init_process_group"):
        default_mesh()
    store = f"file://{Path(folder) / 'again'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    second = twin_of(Peers.of(dist.group.WORLD)).group
    assert second is not first
    dist.barrier(group=second)


def test_groups_are_made_anew_for_a_new_default_group(run_ranks):
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, _begun_again, folder, spoils=True)


def _three_axes() -> None:
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match="3-D"):
        Home.of(mesh)


def test_a_mesh_of_three_axes_is_refused(run_ranks):
    run_ranks(1, _three_axes)

"""Which ranks a unit is sharded over, and which replicate it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from .collectives import Peers

T = TypeVar("T")


@dataclass(frozen=True)
class Home:
    """Ranks that hold a unit's rows between them, and the ranks that hold the same rows."""

    mesh: DeviceMesh
    shards: Peers
    replicas: Peers | None
    placements: tuple[Placement, ...]
    device: torch.device

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Home:
        """From a 1-D mesh (sharded over it) or 2-D (replicated over axis 0, sharded over axis 1).

        Raises ValueError for another number of axes.
        """
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"fully_shard takes a 1-D mesh, or a 2-D one (replicate, shard); got {mesh.ndim}-D"
            )
        device = torch.device(mesh.device_type)
        if device.type != "cpu":
            device = torch.device(mesh.device_type, torch.accelerator.current_device_index())
        if mesh.ndim == 1:
            return cls(mesh, Peers.of(mesh.get_group()), None, (Shard(0),), device)
        replicas, shards = Peers.of(mesh.get_group(0)), Peers.of(mesh.get_group(1))
        return cls(mesh, shards, replicas, (Replicate(), Shard(0)), device)


def default_mesh() -> DeviceMesh:
    """A 1-D mesh over all ranks. Raises RuntimeError without a process group."""
    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard needs a process group: call torch.distributed.init_process_group() first, "
            "or pass mesh="
        )
    backend = dist.get_backend()
    accelerated = "gloo" not in backend or "nccl" in backend
    accelerator = torch.accelerator.current_accelerator() if accelerated else None
    kind = accelerator.type if accelerator is not None else "cpu"
    return init_device_mesh(kind, (dist.get_world_size(),))


_made: dict[Hashable, tuple[object, Any]] = {}


def _once(key: Hashable, make: Callable[[], T]) -> T:
    """What `make` returns, made once for a key and a default process group.

    Process groups are made on all ranks together and kept until the default one is destroyed.
    """
    world = dist.group.WORLD
    if _made.get(key, (None,))[0] is not world:
        _made[key] = (world, make())
    return _made[key][1]


def twin_of(peers: Peers) -> Peers:
    """The same ranks in a second process group; collective among them at the first call."""
    ranks = dist.get_process_group_ranks(peers.group)
    return _once(
        ("twin", *ranks),
        lambda: Peers.of(dist.new_group(ranks, use_local_synchronization=True)),
    )


def near_home(home: Home, size: int) -> Home:
    """Groups of `size` neighbours within `home`'s shard ranks, to reshard to after forward."""
    mesh = home.mesh
    return _once(
        (mesh, size), lambda: Home.of(DeviceMesh(mesh.device_type, mesh.mesh.view(-1, size)))
    )

"""Which ranks a unit is sharded over, and which replicate it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from .collectives import Peers


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


_twins: dict[tuple[int, ...], tuple[object, Peers]] = {}


def twin_of(peers: Peers) -> Peers:
    """The same ranks in a second process group; collective among them at the first call."""
    world, ranks = dist.group.WORLD, tuple(dist.get_process_group_ranks(peers.group))
    if _twins.get(ranks, (None,))[0] is not world:
        group = dist.new_group(list(ranks), use_local_synchronization=True)
        _twins[ranks] = (world, Peers.of(group))
    return _twins[ranks][1]


_near_homes: dict[tuple[DeviceMesh, int], tuple[object, Home]] = {}


def near_home(home: Home, size: int) -> Home:
    """Groups of `size` neighbours within `home`'s shard ranks, to reshard to after forward.

    Made once for a mesh and size, because a DeviceMesh builds process groups, on all ranks; made
    again when the default process group has been replaced meanwhile.
    """
    world, key = dist.group.WORLD, (home.mesh, size)
    if _near_homes.get(key, (None,))[0] is not world:
        neighbours = DeviceMesh(home.mesh.device_type, home.mesh.mesh.view(-1, size))
        _near_homes[key] = (world, Home.of(neighbours))
    return _near_homes[key][1]

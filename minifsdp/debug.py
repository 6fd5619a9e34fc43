"""Checks that cost too much to leave on: do ranks run the same units, does anything outlive one.

    from minifsdp import debug
    with debug.checks():
        loss = model(tokens)...

[Note: what goes wrong without them]
A rank that skips a unit sends a message its peers do not expect: they hang, abort, or quietly read
one unit's rows as another's. And a tensor that aliases a full parameter (a view kept from forward)
reads freed memory once its unit has resharded: at best an error, on CPU often a crash.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from .collectives import Peers

_TEXT_BYTES = 192
_TAG = 7321  # apart from the engine's own messages on the same group
active: checks | None = None
"""The checks now on; the engine looks here before each message and each reshard."""


class checks:
    """Turn the checks on, on all ranks: `debug.checks()`, or `with debug.checks():` for a block.

    timeout_seconds: how long a rank may be late for a message before it is named.
    order: before each message, ranks tell each other what they are about to send (one small
        exchange a message). aliases: at each reshard, look through every live tensor.
    """

    def __init__(
        self, timeout_seconds: float = 10.0, *, order: bool = True, aliases: bool = True
    ) -> None:
        global active
        self._timeout = timedelta(seconds=timeout_seconds)
        self._order, self._aliases = order, aliases
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._previous, active = active, self

    def __enter__(self) -> checks:
        return self

    def __exit__(self, *exc: object) -> None:
        global active
        active = self._previous

    def before_message(self, kind: str, unit: str, nbytes: int, peers: Peers) -> None:
        """Raise RuntimeError on every rank unless all are about to send the same message."""
        if not self._order or peers.size == 1:
            return
        ranks = dist.get_process_group_ranks(peers.group)
        about = f"{kind} of unit {unit!r}, {nbytes} bytes"
        others = self._exchange(about, peers, self._host_group(peers))
        if any(other != about for other in others.values()):
            listed = "; ".join(f"rank {ranks[r]}: {others[r]}" for r in sorted(others))
            raise RuntimeError(
                f"ranks run different units. rank {ranks[peers.rank]}: {about}; {listed}. Every "
                "rank must run the same units in the same order: look for a branch on data or rank"
            )

    def _host_group(self, peers: Peers) -> dist.ProcessGroup:
        """A process group that moves host tensors: the peers' own if it can, else a gloo twin."""
        if "gloo" in dist.get_backend_config(peers.group):
            return peers.group
        ranks = dist.get_process_group_ranks(peers.group)
        key = tuple(ranks)
        if key not in self._groups:
            self._groups[key] = dist.new_group(
                ranks, backend="gloo", use_local_synchronization=True
            )
        return self._groups[key]

    def _exchange(self, about: str, peers: Peers, group: dist.ProcessGroup) -> dict[int, str]:
        """What each other rank is about to send. Raises RuntimeError naming one that is late."""
        mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        encoded = about.encode()[:_TEXT_BYTES]
        mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        theirs = {r: torch.zeros_like(mine) for r in range(peers.size) if r != peers.rank}
        works = {r: dist.irecv(t, group=group, group_src=r, tag=_TAG) for r, t in theirs.items()}
        sends = [dist.isend(mine, group=group, group_dst=r, tag=_TAG) for r in theirs]
        for r, work in works.items():
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                late = dist.get_process_group_ranks(group)[r]
                seconds = self._timeout.total_seconds()
                raise RuntimeError(
                    f"rank {late} did not come to {about} within {seconds:g} s: it runs other "
                    "units, has stopped, or is slow (see its own traceback)"
                ) from error
        for send in sends:
            send.wait(self._timeout)
        return {r: bytes(t.tolist()).rstrip(b"\0").decode() for r, t in theirs.items()}

    def same_on_replicas(self, unit: str, rows: list[torch.Tensor], replicas: Peers) -> None:
        """Raise RuntimeError on every rank unless all replicas of a unit start with equal rows."""
        mine = [hashlib.sha256(r.cpu().view(torch.uint8).numpy()).hexdigest() for r in rows]
        theirs: list[list[str]] = [[] for _ in range(replicas.size)]
        dist.all_gather_object(theirs, mine, group=replicas.group)
        if any(other != mine for other in theirs):
            ranks = dist.get_process_group_ranks(replicas.group)
            raise RuntimeError(
                f"unit {unit!r} starts with different parameters on ranks {ranks}, which replicate "
                "each other: seed them alike, or load one state with load_full_state_dict"
            )

    def before_free(
        self, unit: str, full: Iterable[tuple[str, torch.Tensor, torch.Tensor]]
    ) -> None:
        """Raise RuntimeError, naming the parameters, if tensors outside alias full ones.

        full: for each parameter its name, its place in memory, flat, and the parameter itself.
        """
        if not self._aliases:
            return
        full = list(full)
        places = {id(place._base): place._base for _, place, _ in full}  # the engine's own
        ours = {id(param) for _, _, param in full} | set(places)
        storages = {_pointer(base) for base in places.values()} - {0}
        found = []
        for tensor in gc.get_objects():
            if (
                not issubclass(type(tensor), torch.Tensor)
                or _pointer(tensor) not in storages
                or id(tensor) in ours
                or id(tensor._base) in places
            ):
                continue
            name = next((n for n, place, _ in full if _lies_in(tensor, place)), "?")
            found.append(f"parameter {name!r} by a tensor of shape {tuple(tensor.shape)}")
        if found:
            raise RuntimeError(
                f"unit {unit!r} reshards while something still aliases its parameters: "
                f"{'; '.join(found)}. It would read freed memory later: keep a .clone(), or set "
                "reshard_after_forward=False for this unit"
            )


def _lies_in(tensor: torch.Tensor, place: torch.Tensor) -> bool:
    """Whether a tensor begins within `place`."""
    return place.data_ptr() <= tensor.data_ptr() < place.data_ptr() + max(1, place.nbytes)


def _pointer(tensor: torch.Tensor) -> int:
    """Where a tensor's storage begins; 0 for tensors that have none of their own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0

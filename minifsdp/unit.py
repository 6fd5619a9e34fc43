"""The unit: parameters that travel together, and the states they go through.

::

              unshard()            wait_for_unshard()
    SHARDED ─────────────► GATHERING ─────────────► UNSHARDED
      ▲                      ▲                        │  │
      │                      │ unshard()              │  │ reshard_near(), to a few neighbours
      │                      └────────── NEAR ◄───────┼──┘
      └──────────────── reshard() ◄───────────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from enum import Enum

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from . import collectives, debug, events
from .flat import FlatShard
from .layout import RowLayout
from .message import LocalGather
from .offload import is_staged
from .param import Owner, ShardedParam
from .placement import Home
from .policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy


class State(Enum):
    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"
    NEAR = "sharded over a few neighbours"


class Unit:
    """Parameters that are gathered by one message. Their gradients: see `reduction`."""

    def __init__(
        self,
        params: Sequence[ShardedParam],
        home: Home,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
    ) -> None:
        self.name = "?"
        self.index = 0  # among the units below one root
        self.params = list(params)
        self.home = home
        self.near: Home | None = None  # where to reshard to after forward, if not home
        self.mp_policy = mp_policy
        self.offloaded = isinstance(offload_policy, CPUOffloadPolicy)
        self._pinned = (
            self.offloaded and offload_policy.pin_memory and torch.accelerator.is_available()
        )
        self.staged = is_staged(home.device, self._pinned)
        self._stepping: Future[None] | None = None
        self.state = State.SHARDED
        self._parts: list[FlatShard] = []
        self._near_parts: list[FlatShard] = []
        self._gather: collectives.Gather | LocalGather | None = None
        self._gathering: list[FlatShard] = []
        self.adopt()

    # Sharded: what the modules hold between steps is the truth

    def adopt(self) -> None:
        """Take what the modules hold now as the sharded parameters.

        At first they hold whole parameters, of which this rank keeps its rows. Later somebody may
        have moved, cast, materialised or replaced them: rows are copied into fresh flat shards, and
        parameters that were tied at construction are tied again.
        """
        rank = self.home.shards.rank
        for part in self._parts:
            part.forget_full()
        groups: dict[tuple[torch.dtype, torch.device], list[ShardedParam]] = {}
        rows: dict[ShardedParam, torch.Tensor] = {}
        for param in self.params:
            held = param.registered()
            if isinstance(held, DTensor):
                rows[param] = held.detach().to_local()
                param.sharded = held
                param.register(held)
            else:
                mine = param.layout.rows_of(rank)
                rows[param] = held.detach()[mine.start : mine.stop]
            device = held.device
            if not held.is_meta:
                device = torch.device("cpu") if self.offloaded else self.home.device
            groups.setdefault((held.dtype, device), []).append(param)
        self._parts = []
        for (dtype, device), members in groups.items():
            layouts = [p.layout for p in members]
            part = FlatShard(members, layouts, rank, self._message_dtype(dtype), self.staged)
            part.fill([rows[p] for p in members], device, self._pinned and device.type == "cpu")
            self._parts.append(part)
            for param, local in zip(members, part.views(), strict=True):
                param.keep_sharded(local)
        self.state = State.SHARDED

    def _message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        wanted = self.mp_policy.param_dtype
        return wanted if wanted is not None and dtype.is_floating_point else dtype

    def is_adopted(self) -> bool:
        """Whether the modules still hold the sharded parameters that the flat shards back."""
        return all(held is p.sharded for p in self.params for held in p.registered_everywhere())

    def rows(self) -> list[torch.Tensor]:
        """This rank's rows of all parameters, a flat tensor for each dtype."""
        return [part.flat for part in self._parts]

    def check_ready(self) -> None:
        """Raise before the first forward what would go wrong in it, naming the parameters."""
        meta = [p.name for p in self.params if p.sharded.is_meta]
        if meta:
            raise RuntimeError(
                f"parameters of unit {self.name!r} are still on meta: {', '.join(meta)}. "
                "Materialise them (model.to_empty(device=...)) and fill them before the forward"
            )
        dtypes = {p.sharded.dtype for p in self.params if p.requires_grad}
        if len(dtypes) > 1:
            listed = ", ".join(
                f"{p.name} {p.sharded.dtype}" for p in self.params if p.requires_grad
            )
            raise ValueError(
                f"trainable parameters of unit {self.name!r} have several dtypes ({listed}): give "
                "them one dtype, or shard those of another dtype as a unit of their own"
            )

    # Stepped on a thread of its own

    def begin_step(self, stepping: Future[None]) -> None:
        """The rows are being stepped; they are not to be read before that is over."""
        self.settle()
        self._stepping = stepping

    def settle(self) -> None:
        """Block until no step is under way. Raises what the step raised."""
        if self._stepping is not None:
            self._wait_for_step()

    @events.timed("optimizer_wait")
    def _wait_for_step(self) -> None:
        stepping, self._stepping = self._stepping, None
        stepping.result()

    # Unshard

    def unshard(self) -> None:
        """Start gathering the parameters, unless they are whole or already on their way."""
        if self.params and self.state in (State.SHARDED, State.NEAR):
            self.settle()
            self._start_gather()

    @events.timed("prefetch")
    def prefetch(self) -> None:
        """`unshard`, asked for by another unit before this one's parameters are needed."""
        self.unshard()

    @events.timed("unshard")
    def _start_gather(self) -> None:
        near = self.state is State.NEAR
        peers = self.near.shards if near else self.home.shards
        parts = self._near_parts if near else self._parts
        moving = [part for part in parts if not self._is_whole(part)]
        for part in moving:
            part.number = self.index
        if debug.active:
            nbytes = sum(part.piece.numel * part.message_dtype.itemsize for part in moving)
            debug.active.before_message("all-gather", self.name, nbytes * peers.size, peers)
        if peers.size == 1:
            self._gather = LocalGather(moving)
        else:
            how = collectives.choose(peers, self.home.device)
            self._gather = how.all_gather(moving, peers, self.home.device)
        self._gathering = moving
        self.state = State.GATHERING
        if events.listeners:
            events.emit("all_gather", self.name, self._gather.nbytes)

    def gathers_late(self) -> bool:
        """Whether a gather has been asked for that only begins when it is waited for."""
        return self.state is State.GATHERING and self._gather.is_deferred

    def wait_for_unshard(self) -> None:
        """Make the parameters whole, once what `unshard` started has arrived."""
        if self.state is State.GATHERING:
            self._take_in()

    @events.timed("wait")
    def _take_in(self) -> None:
        for part in self._parts:
            if part.params[0].unsharded is None:
                self._make_full(part)
            elif part.full is not None:
                part.grow_full()
        self._gather.wait([part.full_slots() for part in self._gathering])
        self._gather, self._gathering, self._near_parts = None, [], []
        for param in self.params:
            param.register(param.unsharded)
        self.state = State.UNSHARDED
        if events.listeners:
            events.emit("unshard", self.name)

    def held(self) -> dict[str, int]:
        """Bytes beside the shard: unsharded (parameters, or rows of neighbours) and message."""
        nbytes = 0
        for part in self._parts:
            if part.full is not None:
                nbytes += part.full.untyped_storage().nbytes()
        for part in self._near_parts:
            nbytes += part.flat.nbytes
        gathering = 0 if self._gather is None else self._gather.held
        return {"unsharded": nbytes, "gathering": gathering}

    def _is_whole(self, part: FlatShard) -> bool:
        """Whether the shard itself serves as the full parameters: one rank, no cast, no offload."""
        flat = part.flat
        return (
            self.home.shards.size == 1
            and flat.dtype == part.message_dtype
            and flat.device == self.home.device
        )

    def _make_full(self, part: FlatShard) -> None:
        with torch.inference_mode(False):  # what is made now is used in training too
            if not self._is_whole(part):
                part.make_full(self.home.device)
                return
            for param, offset in zip(part.params, part.piece.offsets, strict=True):
                param.make_unsharded(part.flat, offset)

    # Reshard

    def reshard(self) -> None:
        """Back to rows, from any state; what was on its way is waited for and dropped."""
        if self.state is State.SHARDED:
            return
        if self.state is State.GATHERING:
            self._gather.finish()
            self._gather.discard()
            self._gather, self._gathering = None, []
        self._near_parts = []
        self._free(State.SHARDED, [param.sharded for param in self.params])

    def reshard_near(self) -> None:
        """Keep, of the whole parameters, the rows that few neighbours need for the next unshard."""
        if self.state is not State.UNSHARDED:
            return
        peers = self.near.shards
        for part in self._parts:
            layouts = [
                RowLayout(p.layout.rows, p.layout.row_numel, peers.size) for p in part.params
            ]
            near = FlatShard(part.params, layouts, peers.rank, part.message_dtype)
            rows = []
            for param, layout in zip(part.params, layouts, strict=True):
                mine = layout.rows_of(peers.rank)
                rows.append(param.unsharded.detach()[mine.start : mine.stop])
            near.fill(rows, self.home.device, pinned=False)
            del rows
            self._near_parts.append(near)
        kept = {
            param: nn.Parameter(param.as_dtensor(local, self.near), param.requires_grad)
            for part in self._near_parts
            for param, local in zip(part.params, part.views(), strict=True)
        }
        self._free(State.NEAR, [kept[param] for param in self.params])

    @events.timed("reshard")
    def _free(self, state: State, registered: Sequence[nn.Parameter]) -> None:
        if debug.active and self.state is State.UNSHARDED:
            full = [(p.name, p.padded, p.unsharded) for p in self.params if p.padded is not None]
            debug.active.before_free(self.name, full)
        for param, held in zip(self.params, registered, strict=True):
            param.register(held)
        for part in self._parts:
            part.free_full()
        whole, self.state = self.state is State.UNSHARDED, state
        if whole:
            for param in self.params:
                param.check_unedited()
        if events.listeners:
            events.emit("reshard", self.name)


def shard(name: str, param: nn.Parameter, owners: list[Owner], home: Home) -> ShardedParam:
    """Describe how `param`, still whole, will be sharded.

    Raises ValueError for a 0-d parameter and NotImplementedError for one that is not contiguous.
    """
    if param.ndim == 0:
        raise ValueError(
            f"parameter {name!r} has no dimension to shard: give it shape (1,), or pass it in "
            "ignored_params"
        )
    if not param.is_contiguous():
        raise NotImplementedError(
            f"parameter {name!r} is not contiguous (stride {param.stride()}): rows of it cannot be "
            "sent as they lie; register param.contiguous() instead"
        )
    rows = param.shape[0]
    row_numel = param.shape[1:].numel()
    return ShardedParam(name, param, owners, home, RowLayout(rows, row_numel, home.shards.size))

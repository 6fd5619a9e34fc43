"""From a unit's gradients, as autograd makes them, to sharded gradients that optimizers read.

[Note: gradients leave autograd at once]
A full gradient is copied into the unit's message in the post-accumulate hook and dropped, so full
gradients and the message never exist side by side. Only where the message is narrower than the
gradient (fp32 gradients reduced in bf16) is it kept until the unit's backward ends: if autograd
brings a second contribution, both must be added before they are rounded.

[Note: a reduction is a short pipeline]
fill the message -> reduce-scatter -> (2-D mesh: all-reduce over replicas) -> divide, hand out.
Each `advance` waits for one stage and starts the next, so that stages of one unit overlap with the
backward of the units before it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import torch

from . import collectives, debug, events
from .layout import PieceLayout
from .message import LocalReduction, place_rows, take_rows
from .param import ShardedParam, post_accumulate_hooks
from .scaling import Scaling, scaling
from .unit import Unit


def refuse_higher_order(unit: str) -> NoReturn:
    """Raise RuntimeError: a sharded gradient has no graph, and full parameters are gone by then."""
    raise RuntimeError(
        f"backward with create_graph=True reached unit {unit!r}: gradients of gradients are not "
        "supported through a sharded unit. Compute them on a model that is not sharded"
    )


class GradientReducer:
    """Collects one unit's gradients during backward, reduces them, and hands out the rows."""

    def __init__(self, unit: Unit) -> None:
        self.unit = weakref.proxy(unit)  # the unit owns this; a cycle would outlive `del model`
        self.syncs = True
        """Reduce gradients at all; else they stay whole and local, accumulating."""
        self.all_reduces = True
        """On a 2-D mesh, also reduce over replicas; else partial sums accumulate."""
        self.fills_unused = False
        """Send zeros for parameters that got no gradient on this rank."""
        self.divide_factor: float | None = None
        self.force_sum = False
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.hook_stream: torch.Stream | None = None
        self.peers = unit.home.shards
        self._watched: dict[int, torch.Tensor] = {}
        self._unsynced: dict[ShardedParam, torch.Tensor] = {}
        self._partial: torch.Tensor | None = None
        self._forget()

    def _forget(self) -> None:
        """No gradient of this backward has arrived, and nothing is under way."""
        self._offsets: dict[ShardedParam, int] = {}  # of parameters in the message being filled
        self._under_way: dict[ShardedParam, int] = {}  # in the one being reduced
        self._filling: collectives.Reduction | None = None
        self._filled: set[ShardedParam] = set()
        self._late: dict[ShardedParam, torch.Tensor] = {}
        self._scatter: collectives.Reduction | None = None
        self._replicate: collectives.all_reduce | None = None

    # Collecting

    def watch(self) -> None:
        """Take gradients of the unsharded parameters from now on."""
        me = weakref.ref(self)
        for index, param in enumerate(self.unit.params):
            full = param.unsharded
            if full.requires_grad and self._watched.get(index) is not full:
                full.register_post_accumulate_grad_hook(partial(_take, me, index))
                self._watched[index] = full

    def take(self, param: ShardedParam, full: torch.Tensor) -> None:
        """Move `full.grad` into the message, or onto what un-synced micro-batches have left."""
        grad, full.grad = full.grad, None
        if grad is None:
            return  # frozen since its forward
        if grad.requires_grad:
            refuse_higher_order(self.unit.name)
        if not self.syncs:
            self._accumulate(param, grad)
            return
        if param in self._unsynced:
            grad = self._unsynced.pop(param).add_(grad)
        self._keep(param, grad)

    def _reduce_dtype(self, computed: torch.dtype) -> torch.dtype:
        """What gradients that are `computed` in a dtype are reduced or accumulated in."""
        return self.unit.mp_policy.reduce_dtype or computed

    def _accumulate(self, param: ShardedParam, grad: torch.Tensor) -> None:
        if param in self._unsynced:
            self._unsynced[param].add_(grad)
        else:
            self._unsynced[param] = grad.to(self._reduce_dtype(grad.dtype))

    def _keep(self, param: ShardedParam, grad: torch.Tensor) -> None:
        reduce_dtype = self._reduce_dtype(grad.dtype)
        exact = torch.promote_types(reduce_dtype, grad.dtype) == reduce_dtype
        if param in self._late:
            self._late[param] = self._late[param] + grad
        elif self._is_local() or not exact:
            self._late[param] = grad
        else:
            self._place(param, grad, reduce_dtype)

    def _is_local(self) -> bool:
        """Whether gradients need no message: one rank, and nobody wants to see one."""
        home = self.unit.home
        return home.shards.size == 1 and home.replicas is None and self.all_reduce_hook is None

    def _place(self, param: ShardedParam, grad: torch.Tensor, dtype: torch.dtype) -> None:
        if self._filling is None:
            kept = {param, *self._unsynced, *self._late}  # perhaps frozen since
            self._begin([p for p in self.unit.params if p.requires_grad or p in kept], dtype)
        message, offset = self._filling.message, self._offsets[param]
        if param in self._filled:
            earlier = take_rows(message, offset, param).to(grad.dtype)
            grad = earlier + grad
        place_rows(message, offset, param, grad)
        self._filled.add(param)

    def _begin(self, members: Sequence[ShardedParam], dtype: torch.dtype) -> None:
        piece = PieceLayout.of([p.layout for p in members])
        self._offsets = dict(zip(members, piece.offsets, strict=True))
        peers, device = self.peers, self.unit.home.device
        if peers.size == 1:
            self._filling = LocalReduction(piece.numel, dtype, device)
        else:
            how = collectives.choose(peers, device)
            self._filling = how.reduction(piece.numel, dtype, peers, device)

    # Reducing

    @torch.no_grad()
    def start(self) -> bool:
        """Reduce what this backward brought; returns whether something is now under way."""
        for param in [p for p in self.unit.params if p in self._unsynced]:
            self._keep(param, self._unsynced.pop(param))
        if self._is_local():
            self._hand_out_local()
            return False
        self._complete_message()
        if self._filling is None:
            return False
        message = self._filling.message
        scale = self._scaling(message.dtype)
        if scale.divide_before != 1:
            message.div_(scale.divide_before)
        if scale.multiply_before != 1:
            message.mul_(scale.multiply_before)
        self._scatter, self._filling = self._filling, None
        self._under_way, self._offsets = self._offsets, {}
        self._filled.clear()
        if debug.active:
            nbytes = self._scatter.nbytes
            debug.active.before_message("reduce-scatter", self.unit.name, nbytes, self.peers)
        self._scatter.start(scale.average_shards)
        if events.listeners:
            events.emit("reduce_scatter", self.unit.name, self._scatter.nbytes)
        return True

    def _complete_message(self) -> None:
        """Bring the message to the parameters that have gradients, or zeros for those that lack."""
        trained = [p for p in self.unit.params if p.requires_grad and p.unsharded is not None]
        late, self._late = self._late, {}
        for param, grad in late.items():
            self._place(param, grad, self._reduce_dtype(grad.dtype))
        missing = [p for p in (self._offsets or trained) if p not in self._filled]
        if missing and self.fills_unused:
            dtype = self._reduce_dtype(missing[0].unsharded.dtype)
            for param in missing:
                zeros = torch.zeros(param.shape, dtype=dtype, device=self.unit.home.device)
                self._place(param, zeros, dtype)
        elif missing and self._filled:
            self._compact()

    def _compact(self) -> None:
        """Rebuild the message without the slots of parameters that got no gradient."""
        wide, offsets = self._filling, self._offsets
        present = [p for p in offsets if p in self._filled]
        self._begin(present, wide.message.dtype)
        for param in present:
            slot, source, target = param.layout.slot_numel, offsets[param], self._offsets[param]
            columns = wide.message[:, source : source + slot]
            self._filling.message[:, target : target + slot].copy_(columns)
        wide.discard()

    def _scaling(self, dtype: torch.dtype) -> Scaling:
        home = self.unit.home
        replicas = home.replicas.size if home.replicas else 1
        return scaling(dtype, home.shards.size, replicas, self.divide_factor, self.force_sum)

    @torch.no_grad()
    def advance(self) -> bool:
        """Wait for the stage under way and start the next; returns whether one is."""
        if self._scatter is not None:
            rows, self._scatter = self._scatter.wait(), None
            if self.unit.home.replicas is None:
                self._hand_out(rows)
                return False
            if self._partial is not None:
                rows.add_(self._partial)
                self._partial = None
            if not self.all_reduces:
                self._partial = rows
                return False
            average = self._scaling(rows.dtype).average_replicas
            self._replicate = collectives.all_reduce(rows, self.unit.home.replicas, average)
            if events.listeners:
                events.emit("all_reduce", self.unit.name, rows.nbytes)
            return True
        if self._replicate is not None:
            rows, self._replicate = self._replicate.wait(), None
            self._hand_out(rows)
        return False

    def finish(self) -> None:
        """Bring what is under way to its end."""
        while self.advance():
            pass

    # Handing out

    def _hand_out(self, rows: torch.Tensor) -> None:
        """Give each parameter its slice of the reduced piece."""
        self._call_hook(rows)
        after = self._scaling(rows.dtype).divide_after
        if after != 1:
            rows.div_(after)
        rows = rows.to(next(iter(self._under_way)).sharded.dtype)
        if self.unit.offloaded:
            rows = rows.cpu()
        rank = self.unit.home.shards.rank
        for param, offset in self._under_way.items():
            count = param.layout.numel_of(rank)
            shape = (len(param.layout.rows_of(rank)), *param.shape[1:])
            self._add_gradient(param, rows[offset : offset + count].view(shape))
        if events.listeners:
            events.emit("reduced", self.unit.name)

    def _call_hook(self, rows: torch.Tensor) -> None:
        if self.all_reduce_hook is None:
            return
        if self.hook_stream is None:
            self.all_reduce_hook(rows)
            return
        current = torch.accelerator.current_stream()
        self.hook_stream.wait_stream(current)
        with self.hook_stream:
            self.all_reduce_hook(rows)
        current.wait_stream(self.hook_stream)

    def _hand_out_local(self) -> None:
        """One rank: the gradients are the rows; scale and cast them as a message would be."""
        for param in [p for p in self.unit.params if p in self._late]:
            grad = self._late.pop(param)
            grad = grad.to(self._reduce_dtype(grad.dtype))
            scale = self._scaling(grad.dtype)
            for divisor in (scale.divide_before, scale.divide_after):
                if divisor != 1:
                    grad = grad / divisor
            grad = grad.to(param.sharded.dtype)
            self._add_gradient(param, grad.cpu() if self.unit.offloaded else grad)

    def _add_gradient(self, param: ShardedParam, local: torch.Tensor) -> None:
        sharded = param.sharded
        if sharded.grad is None:
            sharded.grad = param.as_dtensor(local)
        else:
            sharded.grad.to_local().add_(local)
        for hook in post_accumulate_hooks(sharded):
            hook(sharded)

    def give_up(self, accumulated: bool) -> None:
        """Forget gradients of this backward that were not handed out; and the accumulated ones?"""
        for pending in (self._scatter, self._replicate):
            if pending is not None:
                pending.wait()
        if self._filling is not None:
            self._filling.discard()
        if accumulated:
            self._unsynced.clear()
            self._partial = None
        self._forget()


def _take(reducer: weakref.ref[GradientReducer], index: int, full: torch.Tensor) -> None:
    """Autograd's post-accumulate hook. Weak, so that a graph kept alive keeps no model alive."""
    live = reducer()
    if live is not None:
        with torch.no_grad():
            live.take(live.unit.params[index], full)

"""From a unit's gradients, as autograd left them, to sharded gradients that optimizers read.

[Note: gradients are taken a unit at a time]
Autograd leaves each full gradient on its full parameter. When the unit's backward ends, its full
parameters are freed first; then the gradients go into the message together and are freed. So at
most a unit's parameters and its gradients, or its gradients and a message, are there at once, and
no hook runs for a parameter. Contributions to one gradient are added before they are rounded.

[Note: a reduction is a short pipeline]
message -> reduce-scatter -> (2-D mesh: all-reduce over replicas) -> divide -> (offloaded: down to
the host) -> hand out. Each `advance` waits for one stage and starts the next, so that stages of one
unit overlap with the backward of the units before it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import NoReturn

import torch

from . import collectives, debug, events
from .collectives import Gradients
from .message import LocalReduction
from .offload import Descent
from .param import ShardedParam, post_accumulate_hooks
from .scaling import Scaling, scaling
from .unit import Unit


def refuse_higher_order(unit: str) -> NoReturn:
    """Raise RuntimeError: a sharded gradient has no graph, and full parameters are gone by then."""
    raise RuntimeError(
        f"backward with create_graph=True reached unit {unit!r}: gradients of gradients are not "
        "supported through a sharded unit. Compute them on a model that is not sharded"
    )


Stage = collectives.Reduction | LocalReduction | collectives.all_reduce | Descent


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
        self.on_gradients: Callable[[], Future[None] | None] | None = None
        """Called when gradients have been handed out; may step, and may go on stepping behind."""
        self.peers = unit.home.shards
        self._unsynced: dict[ShardedParam, torch.Tensor] = {}
        self._partial: torch.Tensor | None = None
        self._is_last = True  # whether what is under way is of the last backward before a step
        self._forget()

    def _forget(self) -> None:
        """Nothing is under way."""
        self._reducing: list[ShardedParam] = []
        self._scatter: Stage | None = None
        self._replicate: Stage | None = None
        self._descent: Stage | None = None

    @property
    def name(self) -> str:
        """The unit's name."""
        return self.unit.name

    def held(self) -> dict[str, int]:
        """Bytes of gradients: full (fresh, or kept for a backward that syncs), and on their way."""
        full = [p.unsharded.grad for p in self.unit.params if p.unsharded is not None]
        full += [*self._unsynced.values(), self._partial]
        nbytes = sum([grad.nbytes for grad in full if grad is not None])
        return {"gradients": nbytes, "reducing": self._held_under_way()}

    def held_reduced(self) -> dict[str, int]:
        """Bytes of gradients on their way, and of rows as optimizers read them, without padding."""
        there = [p for p in self.unit.params if p.sharded.grad is not None]
        nbytes = sum([p.rows_numel * p.sharded.dtype.itemsize for p in there])
        return {"reducing": self._held_under_way(), "rows": nbytes}

    def _held_under_way(self) -> int:
        stage = self._scatter or self._replicate or self._descent
        return 0 if stage is None else stage.held

    # Collecting

    def collect(self) -> dict[ShardedParam, torch.Tensor]:
        """Take the gradients that autograd has left on the full parameters."""
        grads: dict[ShardedParam, torch.Tensor] = {}
        for param in self.unit.params:
            full = param.unsharded
            grad = None if full is None else full.grad
            if grad is None:
                continue
            full.grad = None
            if grad.requires_grad:
                refuse_higher_order(self.unit.name)
            grads[param] = grad
        return grads

    def has_gradients(self) -> bool:
        """Whether there is something to collect."""
        return any(
            p.unsharded is not None and p.unsharded.grad is not None for p in self.unit.params
        )

    def _reduce_dtype(self, computed: torch.dtype) -> torch.dtype:
        """What gradients that are `computed` in a dtype are reduced or accumulated in."""
        return self.unit.mp_policy.reduce_dtype or computed

    @events.timed("accumulate")
    @torch.no_grad()
    def accumulate(self) -> None:
        """Keep what this backward brought, whole and local, for a later one that syncs."""
        grads = self.collect()
        while grads:
            param, grad = grads.popitem()
            if param in self._unsynced:
                self._unsynced[param].add_(grad)
            else:
                self._unsynced[param] = grad.to(self._reduce_dtype(grad.dtype))

    def _all_gradients(self) -> dict[ShardedParam, torch.Tensor]:
        """Of each parameter the gradient to reduce, in order; zeros for those that lack one, if so
        wanted."""
        fresh, earlier = self.collect(), self._unsynced
        self._unsynced = {}
        grads: dict[ShardedParam, torch.Tensor] = {}
        for param in self.unit.params:
            if param in earlier:
                grads[param] = earlier.pop(param)
                if param in fresh:
                    grads[param].add_(fresh.pop(param))
            elif param in fresh:
                grads[param] = fresh.pop(param)
            elif self.fills_unused and param.unsharded is not None and param.requires_grad:
                computed = param.unsharded.dtype
                device = self.unit.home.device
                grads[param] = torch.zeros(param.shape, dtype=computed, device=device)
        return grads

    # Reducing

    @torch.no_grad()
    def start(self) -> bool:
        """Reduce what this backward brought; returns whether something is now under way."""
        grads = self._all_gradients()
        if not grads:
            return False
        self._is_last = self.unit.runtime.root().is_last_backward
        if self._is_local():
            self._hand_out_local(grads)
            return False
        self._send(grads)
        return self.advance() if self._scatter.is_complete else True

    @events.timed("reduce")
    def _send(self, grads: dict[ShardedParam, torch.Tensor]) -> None:
        """Start the reduce-scatter of `grads`, and free them."""
        dtype = self._reduce_dtype(next(iter(grads.values())).dtype)
        scale = self._scaling(dtype)
        self._reducing = list(grads)
        message = Gradients(
            [grad.reshape(-1) for grad in grads.values()],
            tuple(param.layout.slot_numel for param in grads),
            dtype,
            scale.multiply_before,
            scale.divide_before,
            scale.average_shards,
            self.unit.index,
        )
        grads.clear()
        nbytes = sum(message.slots) * self.peers.size * dtype.itemsize
        if debug.active:
            debug.active.before_message("reduce-scatter", self.unit.name, nbytes, self.peers)
        if events.listeners:
            events.emit("reduce_scatter", self.unit.name, nbytes if self.peers.size > 1 else 0)
        if self.peers.size == 1:
            self._scatter = LocalReduction(message, self.unit.home.device)
        else:
            how = collectives.choose(self.peers, self.unit.home.device)
            self._scatter = how.reduce_scatter(message, self.peers, self.unit.home.device)

    def _is_local(self) -> bool:
        """Whether gradients need no message: one rank, and nobody wants to see one."""
        home = self.unit.home
        alone = home.shards.size == 1 and home.replicas is None
        return alone and self.all_reduce_hook is None and not self.unit.staged

    def _scaling(self, dtype: torch.dtype) -> Scaling:
        home = self.unit.home
        replicas = home.replicas.size if home.replicas else 1
        return scaling(dtype, home.shards.size, replicas, self.divide_factor, self.force_sum)

    @torch.no_grad()
    def advance(self) -> bool:
        """Wait for the stage under way and start the next; returns whether one is."""
        if self._scatter is not None:
            rows, self._scatter = self._wait(self._scatter), None
            return self._settle(rows) if self.unit.home.replicas is None else self._across(rows)
        if self._replicate is not None:
            rows, self._replicate = self._wait(self._replicate), None
            return self._settle(rows)
        if self._descent is not None:
            rows, self._descent = self._wait(self._descent), None
            self._hand_out(rows, borrowed=True)
        return False

    @events.timed("reduce_wait")
    def _wait(self, stage: Stage) -> torch.Tensor:
        return stage.wait()

    def finish(self) -> None:
        """Bring what is under way to its end."""
        while self.advance():
            pass

    @events.timed("reduce")
    def _across(self, rows: torch.Tensor) -> bool:
        """Reduce over replicas, or keep for a backward that does."""
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

    def _settle(self, rows: torch.Tensor) -> bool:
        """Reduced everywhere: divide, and bring down or hand out."""
        self._call_hook(rows)
        after = self._scaling(rows.dtype).divide_after
        if after != 1:
            rows.div_(after)
        if self.unit.offloaded and self.unit.staged:
            self._descent = Descent(rows)
            return True
        self._hand_out(rows.cpu() if self.unit.offloaded else rows)
        return False

    # Handing out

    def _hand_out(self, rows: torch.Tensor, borrowed: bool = False) -> None:
        """Give each parameter its slice of the reduced piece, which may be in a borrowed buffer."""
        dtype = self._reducing[0].sharded.dtype
        rows = rows.to(dtype, copy=borrowed)
        pieces = torch.split_with_sizes(rows, [p.layout.slot_numel for p in self._reducing])
        for param, piece in zip(self._reducing, pieces, strict=True):
            self._add_gradient(param, piece)
        self._reducing = []
        self._gradients_are_there()

    def _gradients_are_there(self) -> None:
        if events.listeners:
            events.emit("reduced", self.unit.name)
        if self.on_gradients is not None and self._is_last:
            stepping = self.on_gradients()
            if stepping is not None:
                self.unit.begin_step(stepping)

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

    @events.timed("reduce")
    def _hand_out_local(self, grads: dict[ShardedParam, torch.Tensor]) -> None:
        """One rank: the gradients are the rows; scale and cast them as a message would be."""
        for param in list(grads):
            grad = grads.pop(param)
            grad = grad.to(self._reduce_dtype(grad.dtype))
            scale = self._scaling(grad.dtype)
            for divisor in (scale.divide_before, scale.divide_after):
                if divisor != 1:
                    grad = grad / divisor
            grad = grad.to(param.sharded.dtype)
            self._add_gradient(param, grad.cpu() if self.unit.offloaded else grad)
        self._gradients_are_there()

    def _add_gradient(self, param: ShardedParam, rows: torch.Tensor) -> None:
        """Give the sharded parameter its reduced `rows`, of any shape, perhaps with padding."""
        sharded = param.sharded
        if rows.numel() != param.rows_numel:
            rows = rows[: param.rows_numel]
        rows = rows.view(param.rows_shape)
        if sharded.grad is None:
            sharded.grad = param.gradient(rows)
        else:
            sharded.grad.to_local().add_(rows)
        for hook in post_accumulate_hooks(sharded):
            hook(sharded)

    def give_up(self, accumulated: bool) -> None:
        """Forget gradients of this backward that were not handed out; and the accumulated ones?"""
        for pending in (self._scatter, self._replicate, self._descent):
            if pending is not None:
                pending.wait()
        for param in self.unit.params:
            if param.unsharded is not None:
                param.unsharded.grad = None
        if accumulated:
            self._unsynced.clear()
            self._partial = None
        self._forget()

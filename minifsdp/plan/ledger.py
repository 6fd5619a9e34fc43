"""The ledger: every storage from its first byte to its last, and every operator with its cost.

[Note: how the ledger sees]
Below autograd each operator passes a dispatch mode, which looks at the storages of its results. A
storage that is new is booked, and a weak reference to it tells when its last tensor is gone. What
the engine shrinks and grows in place (`UntypedStorage.resize_`) no operator tells of, so that
method reports here while a plan is made. Who allocates decides what a block is: the nearest caller
that `categories` knows. Some are known only later (a whole gradient, once the unit collects it), so
a category may be set until the books are read. Kernels take memory of their own that no operator
returns: `workspaces` has what is known of it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import costs, workspaces
from .categories import Category, category_of_caller


class Block:
    """One storage."""

    __slots__ = ("category", "nbytes", "on_host", "phase", "pinned", "unit")

    def __init__(
        self, category: Category, on_host: bool, phase: str, unit: str, pinned: bool = False
    ) -> None:
        self.category, self.on_host, self.phase, self.unit = category, on_host, phase, unit
        self.nbytes = 0  # now
        self.pinned = pinned


class Change(NamedTuple):
    """Before step `time` of the trace, a block got larger or smaller."""

    time: int
    block: Block
    delta: int


class Moment(NamedTuple):
    """From the change of this number on, the phase and the unit at work."""

    change: int
    phase: str
    unit: str


class Place(NamedTuple):
    """A place in the books: as many changes, steps of the trace and moments come before it."""

    change: int
    step: int
    moment: int


class Ledger(TorchDispatchMode):
    """Books storages and operators of the code that runs inside it.

    device_type: the device that plans are made for; tensors on another are on the host.
    rounding: bytes that sizes of device blocks are rounded up to a multiple of.
    """

    def __init__(self, device_type: str, rounding: int = 1) -> None:
        super().__init__()
        self.device_type, self.rounding = device_type, rounding
        self.changes: list[Change] = []
        self.moments: list[Moment] = []
        self.trace: list[costs.Step] = []
        self.micro_batches: list[Place] = []  # where each begins
        self.phase, self.unit = "build", ""
        self._under_way: list[Block] = []
        self._blocks: dict[int, tuple[weakref.ref[torch.UntypedStorage], Block]] = {}

    # Where we are

    def at(self, phase: str | None = None, unit: str | None = None) -> None:
        """Note that another phase or unit is at work from now on."""
        self.phase = self.phase if phase is None else phase
        self.unit = self.unit if unit is None else unit
        self.moments.append(Moment(len(self.changes), self.phase, self.unit))
        self.trace.append(costs.Mark(self.phase, self.unit))

    @property
    def place(self) -> Place:
        """Where the books end now."""
        return Place(len(self.changes), len(self.trace), len(self.moments))

    def begin_micro_batch(self) -> None:
        """Note that a micro-batch begins, with its inputs."""
        self.micro_batches.append(self.place)
        self.at("inputs", "")

    # Storages

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block a tensor's bytes are in, if it is booked."""
        found = self._blocks.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

    def classify(self, tensor: torch.Tensor | None, category: Category) -> None:
        """Say what a tensor's bytes are, if it is booked."""
        if tensor is None:
            return
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        block = self.block_of(local)
        if block is not None:
            block.category = category

    def book(self, tensor: torch.Tensor, pinned: bool = False) -> Block:
        """Book the storage of a tensor, if it is new or has another size now.

        pinned: whether a new one is page-locked.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._blocks.get(key)
        if found is None or found[0]() is not storage:
            category = category_of_caller(self.phase, self.unit)
            on_host = tensor.device.type != self.device_type
            block = Block(category, on_host, self.phase, self.unit, pinned)
            self._blocks[key] = (weakref.ref(storage, lambda _: self._freed(key, block)), block)
        else:
            block = found[1]
        self._resized(block, storage.nbytes())
        return block

    def _resized(self, block: Block, nbytes: int) -> None:
        if not block.on_host:
            nbytes = -(-nbytes // self.rounding) * self.rounding
        elif block.pinned and nbytes:  # what torch's allocator of page-locked memory rounds up to
            nbytes = 1 << (nbytes - 1).bit_length()
        if nbytes != block.nbytes:
            self.changes.append(Change(len(self.trace), block, nbytes - block.nbytes))
            block.nbytes = nbytes

    def _freed(self, key: int, block: Block) -> None:
        self._resized(block, 0)
        found = self._blocks.get(key)
        if found is not None and found[1] is block:
            del self._blocks[key]

    def take_for_a_moment(self, nbytes: int, category: Category, on_host: bool) -> None:
        """Book what a kernel takes and gives back before it returns."""
        block = Block(category, on_host, self.phase, self.unit)
        self._resized(block, nbytes)
        self._resized(block, 0)

    def hold_while_under_way(self, nbytes: int) -> None:
        """Book what a message takes until it has arrived."""
        block = Block(Category.MESSAGES, True, self.phase, self.unit)
        block.on_host = self.device_type != "cpu"
        self._under_way.append(block)
        self._resized(block, nbytes)

    def arrived(self) -> None:
        """A message was waited for; those before it have arrived too."""
        for block in self._under_way:
            self._resized(block, 0)
        self._under_way.clear()

    @contextlib.contextmanager
    def watching_storages(self) -> Iterator[None]:
        """Have storages that are resized in place report here."""
        owned = "resize_" in vars(torch.UntypedStorage)
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = original(storage, nbytes)
            found = self._blocks.get(storage._cdata)
            if found is not None:
                self._resized(found[1], storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        try:
            yield
        finally:
            if owned:
                torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
            else:
                del torch.UntypedStorage.resize_

    # Operators

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # which comes back with its local tensors
        if (answer := self._answer(func, args)) is not None:
            return answer
        result = func(*args, **kwargs)
        tensors = list(costs.tensors(result))
        for tensor in tensors:
            self.book(tensor, pinned=bool(kwargs.get("pin_memory")))
        for nbytes in workspaces.of(func, args, kwargs, tensors):
            on_host = tensors[0].device.type != self.device_type
            self.take_for_a_moment(nbytes, category_of_caller(self.phase, self.unit), on_host)
        if nbytes := workspaces.of_message(func, args):
            self.hold_while_under_way(nbytes)
        self._cost(func, args, kwargs, result)
        return result

    def _answer(self, func: Any, args: tuple[Any, ...]) -> Any:
        """What an operator that depends on values answers, as the plan assumes."""
        if func is torch.ops.aten.is_pinned.default:
            block = self.block_of(args[0])
            return block is not None and block.pinned
        if func is torch.ops.aten.nonzero.default:  # all of them: the most there can be
            self.trace.append(costs.Sync())
            found = args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
            self.book(found)
            return found
        if func is torch.ops.aten._local_scalar_dense.default:
            self.trace.append(costs.Sync())
            return 1.0 if args[0].is_floating_point() else 1
        return None

    def _cost(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if func.namespace in ("c10d", "_c10d_functional"):
            step = costs.message_of(func, args, kwargs, result)
        else:
            step = costs.work_of(func, args, kwargs, result, self.device_type)
        if step is not None:
            self.trace.append(step)

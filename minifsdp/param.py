"""One parameter and its two lives: rows in a DTensor between steps, whole while it computes.

[Note: why a full parameter keeps its storage object]
Autograd keeps references to a full parameter from forward to backward, so resharding cannot simply
drop the tensor: its storage is shrunk to zero bytes, then grown and refilled before backward.
Refilling goes through `_padded`, a second tensor on the same storage. A tensor made by
`torch.empty(0).set_(storage, ...)` has a version counter of its own, so a refill looks like no
in-place change of what autograd saved, and no private API is needed to say so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .layout import RowLayout
from .misuse import mark
from .placement import Home


class Owner(NamedTuple):
    """A module that registers the parameter, and the attribute it does so under."""

    module: weakref.ref[nn.Module]
    attribute: str


def rebind_local(dtensor: DTensor, local: torch.Tensor) -> None:
    """Make `local` the local tensor of `dtensor`, keeping the identity optimizers know it by.

    The only way is a private attribute: `DTensor` has no public setter, and a new DTensor would
    leave every optimizer built before `model.to(...)` or a checkpoint load holding the old one.
    """
    dtensor._local_tensor = local


def post_accumulate_hooks(param: torch.Tensor) -> Sequence[Callable[[torch.Tensor], None]]:
    """The user's post-accumulate-grad hooks on a sharded parameter.

    Autograd never accumulates into a sharded parameter, so the engine calls them; they are kept in
    a private attribute that has no public reader.
    """
    return tuple((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())


class ShardedParam:
    """A parameter of `shape`, of which this rank keeps the rows `layout.rows_of(rank)`."""

    def __init__(
        self, name: str, param: nn.Parameter, owners: list[Owner], home: Home, layout: RowLayout
    ) -> None:
        self.name = name
        self.owners = owners
        self.home = home
        self.layout = layout
        self.shape = param.shape
        self.stride = param.stride()
        self.sharded: nn.Parameter | None = None
        self.unsharded: nn.Parameter | None = None
        self._padded: torch.Tensor | None = None  # the unsharded storage, padding included
        self._version = 0  # of `unsharded`, when it was last as gathered

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained; the registered one of its lives says."""
        return self.registered().requires_grad

    # Sharded

    def as_dtensor(self, local: torch.Tensor, home: Home | None = None) -> DTensor:
        """`local` rows, (rows of this rank, *shape[1:]), as a DTensor of the whole shape."""
        home = home or self.home
        return DTensor.from_local(
            local,
            home.mesh,
            home.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )

    def keep_sharded(self, local: torch.Tensor) -> None:
        """Make `local`, a view into the flat shard, the rows of the sharded parameter."""
        if self.sharded is None:
            requires_grad = self.registered().requires_grad
            self.sharded = nn.Parameter(self.as_dtensor(local), requires_grad=requires_grad)
            self.register(self.sharded)
        else:
            rebind_local(self.sharded, local)

    def registered(self) -> nn.Parameter:
        """What the owning module holds now; of several owners, the first."""
        owner = self.owners[0]
        return _alive(owner)._parameters[owner.attribute]

    def registered_everywhere(self) -> list[nn.Parameter]:
        """What each owning module holds now: one parameter, unless somebody has parted the ties."""
        return [_alive(owner)._parameters[owner.attribute] for owner in self.owners]

    def register(self, param: nn.Parameter) -> None:
        """Make `param` what every owning module holds; flags set on the one before carry over."""
        before = self.registered()
        if before is not param and before.requires_grad != param.requires_grad:
            param.requires_grad_(before.requires_grad)
        for owner in self.owners:
            module = _alive(owner)
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[owner.attribute] = param  # the same, at a tenth of the cost
            else:  # a module that follows its parameters
                setattr(module, owner.attribute, param)

    # Unsharded

    def make_unsharded(self, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
        """Create the full parameter, its storage still empty."""
        self._padded = torch.empty(self.layout.padded_numel, dtype=dtype, device=device)
        full = self.alias_unsharded(self._padded, 0)
        self._version = full._version
        return full

    def alias_unsharded(self, flat: torch.Tensor, offset: int) -> nn.Parameter:
        """Create the full parameter as a view into `flat` that autograd sees as independent."""
        value = torch.empty(0, dtype=flat.dtype, device=flat.device)
        value.set_(flat.untyped_storage(), flat.storage_offset() + offset, self.shape, self.stride)
        self.unsharded = nn.Parameter(value, requires_grad=self.sharded.requires_grad)
        mark(self.unsharded, f"parameter {self.name!r} in its unsharded form")
        return self.unsharded

    def full_tensors(self) -> list[torch.Tensor]:
        """What the engine itself holds on the full storage."""
        return [] if self._padded is None else [self._padded, self.unsharded]

    def check_unedited(self) -> None:
        """Raise RuntimeError if the full parameter was changed in place: the change would be lost.

        `_version` counts in-place changes; refilling does not (see the note above).
        """
        if self._padded is not None and self.unsharded._version != self._version:
            self._version = self.unsharded._version
            raise RuntimeError(
                f"parameter {self.name!r} was changed in place while it was whole; resharding "
                "drops that, because rows are what is kept: call reshard() on its module first and "
                "change the rows (param.to_local())"
            )

    def allocate(self, layout: RowLayout) -> torch.Tensor:
        """Grow the full storage again; returns it as (world_size, slot) of `layout` to copy into.

        `layout` may be over fewer ranks than the parameter's own, if they divide its ranks: then it
        needs no more padding.
        """
        storage = self._padded.untyped_storage()
        nbytes = self._padded.numel() * self._padded.element_size()
        if storage.nbytes() != nbytes:
            storage.resize_(nbytes)
        padded = self._padded[: layout.padded_numel]
        return padded.view(layout.world_size, layout.slot_numel)

    def free(self) -> None:
        """Shrink the full storage to nothing. Harmless when it is already, or is the shard's."""
        if self._padded is not None:
            self._padded.untyped_storage().resize_(0)

    def forget_unsharded(self) -> None:
        """Drop the full parameter for good, because the shard was moved, cast or replaced."""
        self.free()
        self.unsharded = self._padded = None


def _alive(owner: Owner) -> nn.Module:
    module = owner.module()
    if module is None:
        raise RuntimeError(
            f"the module that held parameter {owner.attribute!r} was deleted while its unit lives; "
            "keep the whole model alive, or shard the part you keep on its own"
        )
    return module

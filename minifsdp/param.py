"""One parameter and its two lives: rows in a DTensor between steps, whole while it computes.

[Note: why a full parameter keeps its storage object]
Autograd keeps references to a full parameter from forward to backward, so resharding cannot simply
drop the tensor: its storage is shrunk to zero bytes, then grown and refilled before backward.
Refilling goes through `padded`, a second tensor on the same storage. A tensor made by
`torch.empty(0).set_(storage, ...)` has a version counter of its own, so a refill looks like no
in-place change of what autograd saved, and no private API is needed to say so. The full parameters
of a unit share one storage (see `flat`), so that one call frees or grows them all.
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
        self.rows_numel = layout.numel_of(home.shards.rank)
        self.rows_shape = (len(layout.rows_of(home.shards.rank)), *param.shape[1:])
        self.sharded: nn.Parameter | None = None
        self.unsharded: nn.Parameter | None = None
        self.padded: torch.Tensor | None = None
        """The full parameter's place, flat, with all ranks' padding; None if the shard is it."""
        self._version = 0  # of `unsharded`, when it was last as gathered

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained; the registered one of its lives says."""
        return self.registered().requires_grad

    # Sharded

    def gradient(self, local: torch.Tensor) -> DTensor:
        """`local` rows of a gradient as a DTensor like the sharded parameter.

        By DTensor's own constructor, with the parameter's specification, both of which are not
        public: `from_local` works them out anew for each gradient, which takes seven times as long.
        """
        return DTensor(local, self.sharded._spec, requires_grad=False)

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
        for owner in self.owners:
            module = _alive(owner)
            held = module._parameters
            before = held[owner.attribute]
            if before is param:
                continue
            if before.requires_grad != param.requires_grad and owner is self.owners[0]:
                param.requires_grad_(before.requires_grad)
            if type(module).__setattr__ is nn.Module.__setattr__:
                held[owner.attribute] = param  # the same, at a tenth of the cost
            else:  # a module that follows its parameters
                setattr(module, owner.attribute, param)

    # Unsharded

    def make_unsharded(self, flat: torch.Tensor, offset: int) -> None:
        """Create the full parameter as a view into `flat` that autograd sees as independent."""
        value = torch.empty(0, dtype=flat.dtype, device=flat.device)
        value.set_(flat.untyped_storage(), flat.storage_offset() + offset, self.shape, self.stride)
        self.unsharded = nn.Parameter(value, requires_grad=self.sharded.requires_grad)
        self._version = self.unsharded._version
        mark(self.unsharded, f"parameter {self.name!r} in its unsharded form")

    def check_unedited(self) -> None:
        """Raise RuntimeError if the full parameter was changed in place: the change would be lost.

        `_version` counts in-place changes; refilling does not (see the note above).
        """
        if self.padded is not None and self.unsharded._version != self._version:
            self._version = self.unsharded._version
            raise RuntimeError(
                f"parameter {self.name!r} was changed in place while it was whole; resharding "
                "drops that, because rows are what is kept: call reshard() on its module first and "
                "change the rows (param.to_local())"
            )

    def slots(self, layout: RowLayout) -> tuple[torch.Tensor, ...]:
        """The full parameter's place as one flat slot of `layout` for each of its ranks.

        `layout` may be over fewer ranks than the parameter's own, if they divide its ranks: then it
        needs no more padding.
        """
        padded = self.padded[: layout.padded_numel]
        return padded.view(layout.world_size, layout.slot_numel).unbind()

    def forget_unsharded(self) -> None:
        """Drop the full parameter for good, because the shard was moved, cast or replaced."""
        self.unsharded = self.padded = None


def _alive(owner: Owner) -> nn.Module:
    module = owner.module()
    if module is None:
        raise RuntimeError(
            f"the module that held parameter {owner.attribute!r} was deleted while its unit lives; "
            "keep the whole model alive, or shard the part you keep on its own"
        )
    return module

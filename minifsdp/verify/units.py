"""Which submodules are units, and the names that parameters keep through every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

_WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")


class Param(NamedTuple):
    """A parameter as it was built."""

    name: str
    unit: str
    """The unit it belongs to: a module's path, "" for the root."""
    shape: tuple[int, ...]
    aliases: tuple[str, ...]
    """Its other names, where it is tied."""


class Plan(NamedTuple):
    """A model's units, inner ones first and without the root, and its parameters."""

    units: list[str]
    params: list[Param]


def clean(name: str) -> str:
    """A module's or parameter's name without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def plan_units(model: nn.Module, wanted: str | Callable[[nn.Module], list[nn.Module]] | None):
    """The model's `Plan`.

    wanted: None for the children, with parameters, of the ModuleList or Sequential that has most
        of them; a glob of module names, in which * stands for one part ("layers.*"), or several
        with commas; or a function from the model to modules. The root is a unit always.

    Raises ValueError for a glob that matches nothing and for modules that are not the model's.
    """
    names = {id(m): clean(name) for name, m in model.named_modules()}
    if wanted is None:
        modules = list(_blocks(model))
    elif callable(wanted):
        modules = list(wanted(model))
        for module in modules:
            if id(module) not in names:
                raise ValueError(
                    f"units gave a {type(module).__name__} that is no module of the model"
                )
    else:
        modules = _matching(model, wanted)
    units = dict.fromkeys(names[id(m)] for m in modules if m is not model)
    inner_first = sorted(units, key=lambda name: -name.count("."))
    return Plan(inner_first, list(_params(model, inner_first)))


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    if lists:
        largest = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))
        for child in largest.children():
            if next(child.parameters(), None) is not None:
                yield child


def _matching(model: nn.Module, globs: str) -> list[nn.Module]:
    found = []
    for glob in globs.split(","):
        parts = glob.strip().split(".")
        matches = [
            module
            for name, module in model.named_modules()
            if len(path := clean(name).split(".")) == len(parts)
            and all(map(fnmatchcase, path, parts))
        ]
        if not matches:
            some = [clean(n) for n, _ in model.named_modules() if n][:6]
            raise ValueError(f"units {glob!r} matches no module; there are {', '.join(some)} ...")
        found += matches
    return found


def _params(model: nn.Module, units: list[str]) -> Iterator[Param]:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(clean(name))
    for param in model.parameters():
        name, *aliases = names[id(param)]
        unit = next((u for u in units if name.startswith(u + ".")), "")
        yield Param(name, unit, tuple(param.shape), tuple(aliases))

"""What a user names as `package.module:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any


def named(name: str, flag: str) -> Any:
    """What is called `name` in a module. Raises ValueError, with `flag`, if there is no such."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"{flag} {name}: give it as package.module:name")
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")  # where the command was given, as `python -m` has it
    _check_there(module, name, flag)
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise ValueError(
            f"{flag} {name}: importing {module} raised {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{flag} {name}: {module} has no {part!r}{_like(found, part)}")
        found = getattr(found, part)
    return found


def _check_there(module: str, name: str, flag: str) -> None:
    """Say which part of a dotted path is missing; a parent that fails to import is told later."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        try:
            missing = importlib.util.find_spec(path) is None
        except ModuleNotFoundError:
            missing = True
        except Exception:
            return
        if missing:
            raise ValueError(
                f"{flag} {name}: no module {path!r}; run from the folder that holds "
                f"{parts[0]!r}, or put that on PYTHONPATH"
            )


def _like(module: object, wanted: str) -> str:
    """What the module has instead, as a clause."""
    public = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
    public = [k for k in public if getattr(vars(module)[k], "__module__", "") == module.__name__]
    return f"; it has {', '.join(sorted(public)[:8])}" if public else ""

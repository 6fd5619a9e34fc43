"""`python -m docs.make [--check]`: see the package."""

from __future__ import annotations

import argparse
import importlib
import sys

_PRELOADED = (  # before ranks are forked
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.profiler",
    "minifsdp",
)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 if something is stale and was only to be checked."""
    parser = argparse.ArgumentParser(prog="python -m docs.make", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a part is stale"
    )
    given = parser.parse_args(arguments)
    for module in _PRELOADED:
        importlib.import_module(module)
    from .build import Made

    made = Made()
    if not given.check:
        try:
            changed = made.write()
        except (RuntimeError, ValueError) as error:
            print(f"nothing more was written: {error}")
            return 1
        print("\n".join(f"wrote {path.name}" for path in changed) or "nothing was stale")
        return 0
    complaints = made.check()
    if complaints:
        print("\n\n".join(complaints))
        print("\nThe guide is not what the engine does. `python -m docs.make` writes it anew.")
        return 1
    print(f"{len(made.pages)} pages and {len(made.pictures())} pictures are what the engine does")
    return 0


if __name__ == "__main__":
    sys.exit(main())

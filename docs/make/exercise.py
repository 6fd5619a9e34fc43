"""`python -m docs.make.exercise N`: break the engine as exercise N says, and see which tests tell.

The line is changed in a copy of the tree; nothing of yours is touched.
"""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 if a test told."""
    parser = argparse.ArgumentParser(prog="python -m docs.make.exercise", description=__doc__)
    parser.add_argument("number", type=int, help="of the exercise, from 1")
    number = parser.parse_args(arguments).number
    from .exercises import break_it, exercise
    from .markers import StaleError

    try:
        chosen = exercise(number)
    except StaleError as error:
        parser.error(str(error))
    mutation = chosen.mutation
    print(f"{mutation.file}\n  - {mutation.line}\n  + {mutation.becomes}\n", flush=True)
    said = break_it(chosen)
    if not said.failed:
        print("No test told. That would be a hole in the tests; or the line is not run by these.")
        return 1
    print("These failed:")
    print("\n".join(f"  {test}" for test in said.failed))
    if said.why:
        print("\nThe first of them said:\n  " + said.why[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())

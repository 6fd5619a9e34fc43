"""The engine broken a line at a time, and which test tells.

    from mutations import Mutation, run
    outcome = run(Mutation("minifsdp/unit.py", "old line", "new line", "what breaks"), ["tests/"])
    outcome.killed_by  # the first test that failed, or None: the mutation survived

[Note: how a mutation is run]
Nothing in the tree is touched. A copy of it, with one line changed, lies in a temporary folder; a
server that has imported torch but not minifsdp forks a process into it, which runs pytest there and
stops at the first failure. The pool of ranks is forked as well instead of spawned (see `workers`),
so that a mutation costs its tests and not the imports of five processes.
"""

from .mutation import Mutation, StaleError
from .runner import Outcome, run

__all__ = ["Mutation", "Outcome", "StaleError", "run"]

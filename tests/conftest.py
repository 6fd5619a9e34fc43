"""One pool of worker processes per world size, kept for the whole run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`run_ranks(world_size, function, *args)`: run a module's function on every rank of a pool."""
    pools: dict[int, Pool] = {}

    def run(world_size: int, function: Callable[..., Any], *args: Any, spoils: bool = False):
        pool = pools.get(world_size)
        if pool is None or not pool.alive:
            pool = pools[world_size] = Pool(world_size)
        try:
            return pool.run(function, *args)
        finally:
            if spoils:  # the function leaves the group unusable
                pool.stop()

    yield run
    for pool in pools.values():
        pool.stop()

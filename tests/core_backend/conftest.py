"""OLMo-core with its GPU leaves replaced, and worlds of ranks that the tests share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.olmo_leaves import put_back, replace_gpu_leaves
from support.ranks import World


@pytest.fixture
def cpu_leaves() -> Iterator[None]:
    """Replace what runs on a GPU only, for one test."""
    replace_gpu_leaves()
    yield
    put_back()


@pytest.fixture(scope="session")
def run_on_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`run_on_ranks(ranks, function, *arguments)` in a world that stays up, for OLMo-core takes seconds to import."""
    worlds: dict[int, World] = {}

    def run(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if ranks not in worlds or worlds[ranks].ended:
            worlds[ranks] = World(ranks)
        return worlds[ranks].run(function, *arguments, timeout=180.0)

    yield run
    for world in worlds.values():
        world.end()

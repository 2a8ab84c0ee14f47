"""Worlds of ranks that the tests of a session share, for starting one costs more than most tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.ranks import World


@pytest.fixture(scope="session")
def run_on_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`run_on_ranks(ranks, function, *arguments)` as `support.ranks.run_ranks`, in a world that stays up."""
    worlds: dict[int, World] = {}

    def run(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if ranks not in worlds or worlds[ranks].ended:
            worlds[ranks] = World(ranks)
        return worlds[ranks].run(function, *arguments)

    yield run
    for world in worlds.values():
        world.end()

"""A strategy of one's own: pack the shortest documents first, and leave out what is far too long for the rest.

python examples/strategy.py
"""

from collections.abc import Sequence
from typing import Any

from pack_core.stream import Choice, Room, Waiting, packs_of


class ShortestFirst:
    """The shortest that fits; what is ten times as long as the shortest that waits is discarded."""

    def choose(self, waiting: Sequence[Waiting], room: Room, memory: Any) -> Choice:
        """Return what goes into the open pack next, and what goes into none."""
        shortest = min(range(len(waiting)), key=lambda place: waiting[place].length)
        limit = 10 * waiting[shortest].length
        far = [(place, "far too long") for place, unit in enumerate(waiting) if unit.length > limit]
        return Choice(take=(shortest,) if room.fits(waiting[shortest]) else (), discard=far)


if __name__ == "__main__":
    for pack in packs_of(
        [300, 20, 500, 70, 110, 90], strategy=ShortestFirst(), capacity=256, window=4, overlong="drop"
    ):
        print(pack.keys, pack.lengths, pack.reason)  # noqa: T201

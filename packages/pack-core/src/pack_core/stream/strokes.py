"""The same choices as the strategies make one at a time, for many documents in one go, over plain rows of numbers.

Every stroke is given sizes in the order of admission, of which the first `window - 1` waited before. Each further one
fills the window, upon which one document leaves it, perhaps after the open pack is closed. Tests hold these
to the loop.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import attrs
import msgspec

_TAKEN = 2**62  # longer than any room
_PLACE = 2**32 - 1


class Limits(msgspec.Struct, frozen=True):
    """What packs and the window hold, and the room of the open pack.

    Attributes:
        window: documents of which one is chosen.
        capacity: tokens of an empty pack.
        most: documents of an empty pack.
        room: tokens the open pack can take.
        left: documents it can take.
        max_wait: how many tickets may be between a document that waits and the latest; None for any number.
    """

    window: int
    capacity: int
    most: int
    room: int
    left: int
    max_wait: int | None = None


@attrs.define
class Rows:
    """Places in packs.

    Attributes:
        closed: the places of each pack that was closed; the first one began before.
        reasons: why each closed.
        row: the places added to the pack that is open.
    """

    closed: list[list[int]] = attrs.field(factory=list)
    reasons: list[str] = attrs.field(factory=list)
    row: list[int] = attrs.field(factory=list)

    def close(self, reason: str) -> None:
        """Close the open pack."""
        self.closed.append(self.row)
        self.reasons.append(reason)
        self.row = []


Stroke = Callable[[Sequence[int], Sequence[int], Limits], Rows]


def _in_order(given: Sequence[int], tickets: Sequence[int], limits: Limits, looks_on: bool) -> Rows:
    """Take the oldest document, or where that does not fit and one `looks_on`, the oldest of those that do."""
    rows, sizes, head = Rows(), [*given, 0], 0
    room, left, wait = limits.room, limits.left, limits.max_wait
    fitting: list[int] | None = None  # once the oldest did not fit: what does
    for latest in range(limits.window - 1, len(given)):
        if fitting is not None and sizes[latest] <= room:
            fitting.append(latest)
        place = head
        if sizes[head] > room:
            due = wait is not None and tickets[latest] - tickets[head] >= wait
            if fitting is None and looks_on and not due:
                fitting = [at for at, size in enumerate(sizes[head : latest + 1], head) if size <= room]
            if fitting and not due:
                place = fitting[0]
            else:
                rows.close("due" if due else "closed")
                room, left, fitting = limits.capacity, limits.most, None
        rows.row.append(place)
        room -= sizes[place]
        left -= 1
        sizes[place] = _TAKEN
        while sizes[head] == _TAKEN:
            head += 1
        if not room or not left:
            rows.close("full")
            room, left, fitting = limits.capacity, limits.most, None
        elif fitting:
            fitting = [at for at in fitting if sizes[at] <= room]
    return rows


def next_fit(sizes: Sequence[int], tickets: Sequence[int], limits: Limits) -> Rows:
    """Return packs of the oldest documents.

    >>> next_fit([6, 5, 3, 4], range(4), Limits(1, 10, 9, 10, 9)).closed
    [[0], [1, 2]]
    """
    return _in_order(sizes, tickets, limits, looks_on=False)


def first_fit(sizes: Sequence[int], tickets: Sequence[int], limits: Limits) -> Rows:
    """Return packs of the oldest documents that fit.

    >>> first_fit([6, 5, 3, 4], range(4), Limits(3, 10, 9, 10, 9)).row
    [0, 2]
    """
    return _in_order(sizes, tickets, limits, looks_on=True)


def _by_length(given: Sequence[int], tickets: Sequence[int], limits: Limits, oldest_first: bool) -> Rows:
    """Take the longest document that fits; where `oldest_first`, only if the oldest does not fit."""
    rows, sizes, head = Rows(), [*given, 0], 0
    row, room, left, wait = rows.row, limits.room, limits.left, limits.max_wait
    # Sorted by size, of equals the latest first: the last code that a room allows is the oldest of the longest.
    codes = [size << 32 | _PLACE - place for place, size in enumerate(given)]
    waited = limits.window - 1
    held = sorted(codes[:waited])
    for latest, code in enumerate(codes[waited:], waited):
        insort(held, code)
        due = wait is not None and tickets[latest] - tickets[head] >= wait
        oldest = sizes[head]
        if due or (oldest_first and oldest <= room):
            if oldest > room:
                rows.close("due")
                row, room, left = rows.row, limits.capacity, limits.most
            at = bisect_left(held, codes[head])
        else:
            at = bisect_left(held, (room + 1) << 32) - 1
            if at < 0:
                rows.close("closed")
                row, room, left = rows.row, limits.capacity, limits.most
                at = bisect_left(held, codes[head]) if oldest_first else len(held) - 1
        place = _PLACE - (held.pop(at) & _PLACE)
        row.append(place)
        room -= sizes[place]
        left -= 1
        sizes[place] = _TAKEN
        while sizes[head] == _TAKEN:
            head += 1
        if not room or not left:
            rows.close("full")
            row, room, left = rows.row, limits.capacity, limits.most
    return rows


def best_fit(sizes: Sequence[int], tickets: Sequence[int], limits: Limits) -> Rows:
    """Return packs of the oldest documents, and the longest that fit where the oldest does not.

    >>> best_fit([6, 5, 3, 4], range(4), Limits(3, 10, 9, 10, 9)).closed
    [[0, 3]]
    """
    return _by_length(sizes, tickets, limits, oldest_first=True)


def longest_first(sizes: Sequence[int], tickets: Sequence[int], limits: Limits) -> Rows:
    """Return packs of the longest documents that fit.

    >>> longest_first([3, 5, 6, 4], range(4), Limits(4, 10, 9, 10, 9)).row
    [2]
    """
    return _by_length(sizes, tickets, limits, oldest_first=False)


def cut_where_full(sizes: Sequence[int], limits: Limits) -> tuple[Rows, list[tuple[int, int, int]]]:
    """Return packs of pieces, and the pieces `(place, start, stop)` of the documents that leave the window.

    >>> cut_where_full([6, 5, 3], Limits(1, 10, 9, 10, 9))
    (Rows(closed=[[0, 1]], reasons=['full'], row=[2, 3]), [(0, 0, 6), (1, 0, 4), (1, 4, 5), (2, 0, 3)])
    """
    rows = Rows()
    pieces: list[tuple[int, int, int]] = []
    room, left = limits.room, limits.left
    for place in range(len(sizes) - limits.window + 1):
        size, start = sizes[place], 0
        while start < size:
            stop = min(size, start + room)
            rows.row.append(len(pieces))
            pieces.append((place, start, stop))
            room -= stop - start
            left -= 1
            start = stop
            if not room or not left:
                rows.close("full")
                room, left = limits.capacity, limits.most
    return rows, pieces


STROKES: dict[str, Stroke] = {
    "next_fit": next_fit,
    "first_fit": first_fit,
    "best_fit": best_fit,
    "longest_first": longest_first,
}

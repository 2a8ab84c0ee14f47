"""Strategies that take documents as they arrive: next-fit, first-fit, best-fit, and one long row that is cut."""

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import chain

from pack_core.types import Parts


def next_fit(sizes: Sequence[int], capacity: int, most: int) -> "array[int]":
    """Return where packs start: one is open, and closes when the next document does not fit.

    >>> next_fit([6, 4, 3, 8], 10, 10)
    array('q', [0, 2, 3, 4])
    """
    offsets = array("q", [0])
    start = used = 0
    for place, size in enumerate(sizes):
        used += size
        if used > capacity or place - start == most:
            offsets.append(place)
            start, used = place, size
    offsets.append(len(sizes))
    return offsets


def first_fit(sizes: Sequence[int], capacity: int, most: int) -> tuple[list[int], int]:
    """Return the pack of each document, and how many packs: each goes into the first pack that has room.

    A tree holds the largest room below every node, so that the first pack with room is found from the top down.

    >>> first_fit([6, 7, 4, 3], 10, 10)
    ([0, 1, 0, 1], 2)
    """
    if 2 * min(sizes) > capacity:
        return list(range(len(sizes))), len(sizes)  # no two share a pack; the tree would be at its largest
    wide = 1_024
    rooms = [capacity] * (2 * wide)  # packs that are not open yet have all their room
    held = [0] * wide
    owners: list[int] = []
    opened = 0
    for size in sizes:
        if opened == wide:
            rooms, wide = _grown(rooms, wide, capacity)
            held += [0] * opened
        node = 1
        while node < wide:
            node *= 2
            if rooms[node] < size:
                node += 1
        pack = node - wide
        owners.append(pack)
        if pack == opened:
            opened += 1
        held[pack] += 1
        rooms[node] = rooms[node] - size if held[pack] < most else 0
        while node > 1:
            left, right = rooms[node & -2], rooms[node | 1]
            node >>= 1
            room = left if left > right else right
            if rooms[node] == room:
                break
            rooms[node] = room
    return owners, opened


def best_fit(sizes: Sequence[int], capacity: int, most: int) -> tuple[list[int], int]:
    """Return the pack of each document, and how many packs: each goes where the least room suffices, earliest on ties.

    >>> best_fit([4, 7, 3], 10, 10)  # the 3 leaves 3 of the first, and nothing of the second
    ([0, 1, 1], 2)
    """
    least = min(sizes)
    rooms: list[int] = []  # that some open pack has, rising
    packs: dict[int, list[int]] = {}  # with that room, a heap
    held: list[int] = []
    owners: list[int] = []
    for size in sizes:
        place = bisect_left(rooms, size)
        if place < len(rooms):
            room = rooms[place]
            pack = heappop(packs[room])
            if not packs[room]:
                del rooms[place], packs[room]
        else:
            room, pack = capacity, len(held)
            held.append(0)
        owners.append(pack)
        held[pack] += 1
        room -= size
        if room >= least and held[pack] < most:
            if room in packs:
                heappush(packs[room], pack)
            else:
                packs[room] = [pack]
                insort(rooms, room)
    return owners, len(held)


def cut_row(
    tokens: Sequence[int], totals: Sequence[int], capacity: int, most: int, align: int
) -> "tuple[array[int], array[int], Parts]":
    """Return order, offsets and parts of all documents in one row, cut wherever a pack is full.

    Args:
        tokens: of each document.
        totals: 0 and the running totals of their rooms, in steps of `align` tokens.
        capacity: the room of a pack, in such steps.
        most: most documents, or parts of one, in a pack.
        align: tokens of a step.

    >>> order, offsets, parts = cut_row([6, 8, 3], [0, 6, 14, 17], 10, 10, 1)
    >>> order, offsets
    (array('q', [0, 1, 1, 2]), array('q', [0, 2, 4]))
    >>> parts
    Parts(places=array('q', [1, 2]), starts=array('q', [0, 4]), stops=array('q', [4, 8]))
    """
    order, offsets = array("q"), array("q", [0])
    places, starts, stops = array("q"), array("q"), array("q")
    document, done, count = 0, 0, len(totals) - 1
    while document < count:
        beyond = min(document + most, count)
        end = min(totals[document] + done + capacity, totals[beyond])
        stop = bisect_left(totals, end, document + 1, beyond + 1)
        last, over = stop - 1, totals[stop] - end
        reach = end - totals[last]
        if done and last > document:
            _add(places, starts, stops, len(order), done * align, tokens[document])
        if over or (done and last == document):
            start = done * align if last == document else 0
            _add(places, starts, stops, len(order) + last - document, start, min(reach * align, tokens[last]))
        order.extend(range(document, stop))
        offsets.append(len(order))
        document, done = (last, reach) if over else (stop, 0)
    return order, offsets, Parts(places, starts, stops)


def _add(places: "array[int]", starts: "array[int]", stops: "array[int]", place: int, start: int, stop: int) -> None:
    places.append(place)
    starts.append(start)
    stops.append(stop)


def _grown(rooms: list[int], wide: int, capacity: int) -> tuple[list[int], int]:
    row = rooms[wide:] + [capacity] * wide
    rows = [row]
    while len(row) > 1:
        row = list(map(max, row[::2], row[1::2]))
        rows.append(row)
    return [0, *chain.from_iterable(reversed(rows))], 2 * wide

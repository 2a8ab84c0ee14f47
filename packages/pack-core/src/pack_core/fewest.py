"""As few packs as a bounded search finds, where decreasing strategies leave a gap to the lower bound.

Three searches, each only while there is a gap. Packs are filled one pattern at a time: the longest document left and
what fills the rest best, longest first, as often as counts allow (minimum pack slack, Gupta and Ho, 1999, over counted
sizes). Few documents are placed by branch and bound. Then patterns again, passing over sizes at random.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from heapq import heappop, heapreplace
from itertools import chain

from pack_core.bounding import floors
from pack_core.decreasing import decreasing
from pack_core.kernels.packing import Counts, Steps
from pack_core.search.randomness import Randomness

#: Packs of the same content: how many, and the sizes in each with how many of every size, longest first.
_Run = tuple[int, tuple[tuple[int, int], ...]]

#: Documents tried for one pattern before the best so far is taken.
_TRIED = 300
#: Documents tried for patterns that make up an attempt: all attempts of the default take half a second or so.
_AN_ATTEMPT = 16_000
#: Most documents that branch and bound is begun for, and how often it places one before it is given up.
_FEW, _PLACED = 60, 60_000


def fewest(counts: Counts, capacity: int, most: int, *, attempts: int, seed: int) -> Steps:
    """Return the steps of the fewest packs found; the search ends at the lower bound or after so many attempts.

    Args:
        counts: documents by size, none over `capacity`.
        capacity: the room of a pack.
        most: most documents of a pack.
        attempts: searches after the two decreasing strategies; 0 for the better of those. One that has more documents
            to try than an attempt may counts for several, and the last may be broken off.
        seed: for what is passed over at random from the third attempt on.

    >>> counts = Counts([5, 4, 3, 2], [1, 2, 1, 2])  # first-fit decreasing has 5 4 | 4 3 2 | 2 in tens
    >>> fewest(counts, 10, 10, attempts=9, seed=0).packs
    2
    """
    best = decreasing(counts, capacity, most, best=False)
    if (best.packs - 1) * capacity < sum(
        size * amount for size, amount in zip(counts.sizes, counts.counts, strict=True)
    ):
        return best  # without the other bounds, which take longer than this
    bounds = floors(counts, capacity, most)
    floor = bounds.packs
    if best.packs > floor:
        other = decreasing(counts, capacity, most, best=True)
        best = other if other.packs < best.packs else best
    randomness = Randomness(seed)
    budget = attempts * _AN_ATTEMPT
    for attempt in range(attempts):
        if best.packs <= floor or budget <= 0:
            break
        found: list[_Run] = []
        if attempt == 0:
            found, tried = _patterns(counts, capacity, most, budget)
        elif attempt > 1:
            found, tried = _patterns(counts, capacity, most, budget, lambda: randomness.below(4) == 0)
        elif counts.documents <= _FEW:
            found, proven = placed(counts, capacity, most, best.packs, floor, min(budget, _PLACED))
            budget, tried = (0 if proven else budget), 0
        elif bounds.documents == floor:
            found, tried = _dealt(counts, capacity, most, floor), counts.documents
        else:
            tried = 0
        budget -= tried
        if found and sum(packs for packs, _ in found) < best.packs:
            best = _steps(found, counts)
    return best


def _patterns(
    counts: Counts, capacity: int, most: int, limit: int, passed: Callable[[], bool] = lambda: False
) -> tuple[list[_Run], int]:
    """Fill packs one pattern at a time: the longest document left, and beside it what leaves least room.

    There are no packs when more documents than the limit were tried on the way.
    """
    rising = counts.sizes[::-1]
    left = dict(zip(counts.sizes, counts.counts, strict=True))
    runs: list[_Run] = []
    tried = 0
    while rising:
        if tried > limit:
            return [], tried
        pattern, some = _pattern(rising, left, capacity, most, passed)
        tried += some
        packs = min(left[size] // each for size, each in pattern)
        runs.append((packs, pattern))
        for size, each in pattern:
            left[size] -= packs * each
            if not left[size]:
                del rising[bisect_left(rising, size)]
    return runs, tried


def _pattern(
    rising: list[int], left: dict[int, int], capacity: int, most: int, passed: Callable[[], bool]
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return the longest size and those that fill the rest of a pack best, depth first, and how many were tried."""
    chosen, used = [rising[-1]], Counter(rising[-1:])
    room = least = capacity - rising[-1]
    best = chosen[:]
    stack: list[int] = []
    place = bisect_right(rising, room) - 1
    tried = 0
    while least and tried < _TRIED:
        while place >= 0 and (used[rising[place]] >= left[rising[place]] or passed()):
            place -= 1
        if place >= 0 and len(chosen) < most:
            size = rising[place]
            chosen.append(size)
            used[size] += 1
            stack.append(place)
            room -= size
            tried += 1
            if room < least:
                least, best = room, chosen[:]
            place = min(place, bisect_right(rising, room) - 1)
        elif stack:
            place = stack.pop()
            size = chosen.pop()
            used[size] -= 1
            room += size
            place -= 1
        else:
            break
    return _counted(best), tried + 1


def _dealt(counts: Counts, capacity: int, most: int, packs: int) -> list[_Run]:
    """Deal documents, longest first, each to the pack with most room; no packs when one does not fit."""
    open_packs = [(-capacity, pack, most) for pack in range(packs)]
    held: list[list[int]] = [[] for _ in range(packs)]
    for size in _each(counts):
        if not open_packs or -open_packs[0][0] < size:
            return []
        less, pack, slots = open_packs[0]
        held[pack].append(size)
        if slots > 1:
            heapreplace(open_packs, (less + size, pack, slots - 1))
        else:
            heappop(open_packs)
    return [(1, _counted(sizes)) for sizes in held if sizes]


def placed(counts: Counts, capacity: int, most: int, packs: int, floor: int, limit: int) -> tuple[list[_Run], bool]:
    """Return the packs of a branch and bound under a known number of packs, and whether that settles the matter.

    >>> placed(Counts([4, 3, 2], [2, 2, 3]), 10, 10, 3, 2, 1_000)  # 4 4 2 and 3 3 2 2
    ([(1, ((4, 2), (2, 1))), (1, ((3, 2), (2, 2)))], True)
    """
    sizes = _each(counts)
    best: list[_Run] = []
    while packs > floor:
        owners = _branch(sizes, capacity, most, packs - 1, limit)
        if owners is None:
            return best, False
        if not owners:
            break
        packs -= 1
        held: list[list[int]] = [[] for _ in range(packs)]
        for size, pack in zip(sizes, owners, strict=True):
            held[pack].append(size)
        best = [(1, _counted(held_sizes)) for held_sizes in held if held_sizes]
    return best, True


def _branch(sizes: list[int], capacity: int, most: int, packs: int, limit: int) -> list[int] | None:
    """Return the pack of each document, [] when so few packs cannot hold them, or None when the limit came first."""
    rooms, slots, owners = [capacity] * packs, [most] * packs, [0] * len(sizes)
    spare = packs * capacity - sum(sizes)
    least, placed_so_far = sizes[-1], 0

    def place(document: int, lost: int) -> bool:
        nonlocal placed_so_far
        if document == len(sizes):
            return True
        size, seen = sizes[document], set()
        for pack in sorted(range(packs), key=rooms.__getitem__):
            room = rooms[pack]
            if room < size or not slots[pack] or (room, slots[pack]) in seen:
                continue
            seen.add((room, slots[pack]))
            placed_so_far += 1
            if placed_so_far > limit:
                return False
            rest = room - size
            gone = lost + (rest if rest < least or slots[pack] == 1 else 0)
            if gone > spare:
                continue
            rooms[pack], slots[pack], owners[document] = rest, slots[pack] - 1, pack
            if place(document + 1, gone):
                return True
            rooms[pack], slots[pack] = room, slots[pack] + 1
            if not rest and most >= len(sizes):
                break  # what else could fill that room fits wherever this document went instead
        return False

    if spare < 0:
        return []
    if place(0, 0):
        return owners
    return None if placed_so_far > limit else []


def _each(counts: Counts) -> list[int]:
    return [size for size, amount in zip(counts.sizes, counts.counts, strict=True) for _ in range(amount)]


def _counted(falling: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple(Counter(falling).items())


def _steps(runs: list[_Run], counts: Counts) -> Steps:
    """Return the runs as steps, those with the longest documents first; every size is handed out in that order."""
    rows: dict[int, list[int]] = {size: [] for size in counts.sizes}
    first = 0
    for packs, pattern in sorted(runs, key=lambda run: run[1], reverse=True):
        held = 0
        for size, each in pattern:
            rows[size] += (first, packs, each, held)
            held += each
        first += packs
    return Steps(list(chain.from_iterable(rows.values())), first)

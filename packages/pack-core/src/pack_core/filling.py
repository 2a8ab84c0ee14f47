"""Packs of all ranks filled together, so that those that run at the same time weigh the same.

A position is one pack of every rank: they run together, and all wait for the heaviest. Samples come longest first. Many
cost nothing, for they fit into a pack without making it heavier than the heaviest of its position; one goes where most
is left of that. Else a position becomes heavier, and takes one sample a pack, the longest to the lightest pack: the
first position that has room, and a new one where none has; or, over a given number of positions, the one that has most
room left. With one rank nothing is ever left below the heaviest, and these are first-fit decreasing and emptiest pack
first, with which plans fill each rank's column by itself.
"""

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace

Packs = list[list[int]]

#: What the linear layers do for a token, in attention pairs: six times a hidden size of 4,096.
LINEAR = 24_576


def weigh(length: int, linear: int) -> int:
    """Return the work of one sample in attention pairs, `length * (linear + length)`.

    A layer of hidden size h does 24 h^2 floating-point operations a token in its projections and a feed-forward of
    width 4 h, and 4 h for each pair of tokens that attend; over 4 h, that is 6 h a token and one a pair.

    >>> weigh(100, 24_576)
    2467600
    """
    return length * (linear + length)


def weigh_all(lengths: Sequence[int], linear: int) -> list[int]:
    """Return the work of each sample, as `weigh` gives it.

    >>> weigh_all([100, 200], 24_576)
    [2467600, 4955200]
    """
    return [length * (linear + length) for length in lengths]  # a call for each would take three times as long


def deals(values: Sequence[int], ranks: int) -> Packs:
    """Return the samples, largest first and as they arrive on ties, `ranks` at a time.

    >>> deals([2, 9, 5], 2)
    [[1, 2], [0]]
    """
    largest = sorted(range(len(values)), key=values.__getitem__, reverse=True)
    return [largest[start : start + ranks] for start in range(0, len(largest), ranks)]


def dealt(values: Sequence[int], ranks: int) -> Packs:
    """Return the samples of each rank: equal counts, even sums.

    Largest first, `ranks` at a time, the largest of each deal to the rank that has least.

    >>> dealt([1, 2, 3, 4], ranks=2)
    [[3, 0], [2, 1]]
    """
    columns: Packs = [[] for _ in range(ranks)]
    least = list(range(ranks))  # sum * ranks + rank, so that integers sort as pairs would
    for deal in deals(values, ranks):
        least.sort()
        for seat, index in enumerate(deal):
            columns[least[seat] % ranks].append(index)
            least[seat] += values[index] * ranks
    return columns


def filled(
    order: Sequence[int],
    lengths: Sequence[int],
    capacity: int,
    *,
    ranks: int = 1,
    count: int | None = None,
    most: int | None = None,
    linear: int = LINEAR,
) -> list[Packs] | None:
    """Return packs `[positions][ranks]`, or None where `count` positions do not take all samples, or leave one empty.

    Args:
        order: the samples, longest first.
        lengths: tokens of each sample, none over the capacity.
        capacity: most tokens a pack may hold.
        ranks: packs of a position.
        count: positions, filled evenly; None for as many as first-fit opens, the last of which may hold empty packs.
        most: most samples of a pack.
        linear: as `weigh` takes it.

    >>> filled([0, 1, 2, 3], [6, 5, 3, 3], capacity=9, ranks=2)  # 6 and 5, then one 3 for each
    [[[0, 3], [1, 2]]]
    >>> filled([0, 1, 2, 3], [6, 5, 3, 1], capacity=9)  # one rank: 6 3 | 5 1
    [[[0, 2]], [[1, 3]]]
    """
    longest_first = [lengths[index] for index in order]
    samples = list(zip(order, longest_first, weigh_all(longest_first, linear), strict=True))
    _, shortest, lightest = samples[-1]
    places = _Places(ranks, capacity, most, linear, lightest)
    places.open(count or 1)
    choose = _First(places.largest, shortest).choose if count is None else _Roomiest(places.room).choose
    at = 0
    while at < len(samples):
        _, length, weight = samples[at]
        spare = places.most_spare()
        if weight <= spare:
            places.slip(samples[at])
            at += 1
            continue
        position = choose(length)
        if position == len(places.packs):
            places.open(1)
        if places.largest[position] < length:
            return None
        into = places.lightest_first(position, length)
        at += places.put(position, into, samples[at : at + ranks], spare)
    if count is not None and not all(map(all, places.packs)):
        return None
    return places.packs


class _Places:
    """Packs as they fill: `packs[position][rank]`, and what is known of each in lists of the same shape."""

    def __init__(self, ranks: int, capacity: int, most: int | None, linear: int, lightest: int) -> None:
        """Start with none open; no sample weighs less than `lightest`."""
        self.ranks, self.capacity, self.most, self.linear, self.lightest = ranks, capacity, most, linear, lightest
        self.packs: list[Packs] = []
        #: Of each pack: tokens left, its work, and how much heavier it may become.
        self.room: list[list[int]] = []
        self.held: list[list[int]] = []
        self.spare: list[list[int]] = []
        #: Of each position: most room of a pack, and most spare of a pack.
        self.largest: list[int] = []
        self.loosest: list[int] = []
        #: Positions by `loosest`, most on top, and entries that hold no more.
        self._below: list[tuple[int, int]] = []

    def open(self, count: int) -> None:
        """Open empty positions."""
        ranks, capacity = self.ranks, self.capacity
        for _ in range(count):
            self.packs.append([[] for _ in range(ranks)])
            self.room.append([capacity] * ranks)
            self.held.append([0] * ranks)
            self.spare.append([0] * ranks)
        self.largest += [capacity] * count
        self.loosest += [0] * count

    def most_spare(self) -> int:
        """Return how much work some pack can take at no cost."""
        below, loosest = self._below, self.loosest
        while below and below[0][0] != -loosest[below[0][1]]:
            heappop(below)
        return -below[0][0] if below else 0

    def slip(self, sample: tuple[int, int, int]) -> None:
        """Put a sample into the pack that can take most work at no cost, of which `most_spare` was asked."""
        index, length, weight = sample
        position = self._below[0][1]
        packs, room, held = self.packs[position], self.room[position], self.held[position]
        spare = self.spare[position]
        rank = spare.index(self.loosest[position])
        packs[rank].append(index)
        left = 0 if len(packs[rank]) == self.most else room[rank] - length
        room[rank] = left
        held[rank] += weight
        spare[rank] = min(max(held) - held[rank], left * (self.linear + left))
        self._note(position)

    def lightest_first(self, position: int, length: int) -> list[int]:
        """Return the ranks of a position, lightest first, if that one has room; else the one with most room."""
        room = self.room[position]
        ranks = sorted(range(self.ranks), key=self.held[position].__getitem__)
        return ranks if length <= room[ranks[0]] else [room.index(self.largest[position])]

    def put(self, position: int, ranks: list[int], samples: Sequence[tuple[int, int, int]], spare: int) -> int:
        """Put samples into packs, one each, and return how many: the first, and those after it that fit and cost."""
        packs, room, held = self.packs[position], self.room[position], self.held[position]
        linear, put = self.linear, 0
        for rank, (index, length, weight) in zip(ranks, samples, strict=False):
            left = room[rank] - length
            if put and (weight <= spare or left < 0):
                break
            packs[rank].append(index)
            room[rank] = left
            held[rank] += weight
            put += 1
        if self.most is not None:
            for rank in ranks[:put]:
                if len(packs[rank]) == self.most:
                    room[rank] = 0
        top = max(held)
        # No heavier than the heaviest, nor than with one sample as long as the room.
        self.spare[position] = [
            below if (below := top - work) < (fit := left * (linear + left)) else fit
            for work, left in zip(held, room, strict=True)
        ]
        self._note(position)
        return put

    def _note(self, position: int) -> None:
        """Note anew what its packs have left."""
        self.largest[position] = max(self.room[position])
        loosest = self.loosest[position] = max(self.spare[position])
        if loosest >= self.lightest:
            heappush(self._below, (-loosest, position))


class _First:
    """The first position with room, which first-fit takes."""

    def __init__(self, largest: list[int], shortest: int) -> None:
        """Watch the most room of a pack of each position; no sample is shorter than `shortest`."""
        self.largest, self.shortest = largest, shortest
        self.ready: list[int] = []  # positions that may have room, first on top
        self.waiting: list[tuple[int, int]] = []  # those that had none for longer samples, most room on top
        self.seen = 0

    def choose(self, length: int) -> int:
        """Return it, or the number of positions where none has room."""
        ready, waiting, largest = self.ready, self.waiting, self.largest
        if self.seen < len(largest):
            ready += range(self.seen, len(largest))  # larger than all before: still a heap
            self.seen = len(largest)
        while waiting and waiting[0][0] <= -length:
            heappush(ready, heappop(waiting)[1])
        while ready and largest[ready[0]] < length:
            position = heappop(ready)
            if largest[position] >= self.shortest:
                heappush(waiting, (-largest[position], position))
        return ready[0] if ready else len(largest)


class _Roomiest:
    """The position with most room in all, the first on ties."""

    def __init__(self, room: list[list[int]]) -> None:
        """Watch the room of each pack of each position."""
        self.room = room
        self.heap = [(-sum(own), position) for position, own in enumerate(room)]  # what each once had, never less

    def choose(self, length: int) -> int:
        """Return it, whatever the length."""
        while True:
            room, position = self.heap[0]
            free = sum(self.room[position])
            if room == -free:
                return position
            heapreplace(self.heap, (-free, position))

"""First-fit and best-fit decreasing over counted sizes: whole groups of equal documents into runs of equal packs.

Documents of one size are placed together. A run is a stretch of consecutive packs with the same content, so all its
packs have the same room. First-fit fills the first pack that has room for the size until it has none, then the next;
best-fit fills the pack with the least room that suffices, and that pack then has less room than any other, so it is
chosen again until it has none. Either way a run takes as many documents a pack as fit, and the work grows with
distinct sizes and not with documents. The result is the textbook's, pack for pack.
"""

from heapq import heappop, heappush
from itertools import accumulate

from pack_core.kernels.packing import Counts, Steps


def decreasing(counts: Counts, capacity: int, most: int, *, best: bool) -> Steps:
    """Return the steps of best-fit decreasing, or of first-fit decreasing.

    Args:
        counts: documents by size, none over `capacity`.
        capacity: the room of a pack.
        most: most documents of a pack.
        best: take the pack with the least room that suffices, the earliest on ties, and not the earliest of all.

    >>> decreasing(Counts([5, 4, 1], [2, 1, 1]), 10, 10, best=False)  # 5 5 | 4 1
    Steps(rows=[0, 1, 2, 0, 1, 1, 1, 0, 1, 1, 1, 1], packs=2)
    """
    sizes, amounts = counts.sizes, counts.counts
    large = sum(2 * size > capacity for size in sizes)
    rows, waiting, opened = _alone(sizes, amounts[:large], capacity, most)
    put, least = rows.extend, sizes[-1]
    # Runs that have, in the order the strategy takes them: (key, first, packs, held, room).
    ready: list[tuple[int, int, int, int, int]] = []
    for size, left in zip(sizes[large:], amounts[large:], strict=True):
        while waiting and -waiting[0][0] >= size:
            less, first, packs, held = heappop(waiting)
            heappush(ready, (-less if best else first, first, packs, held, -less))
        while left:
            if not ready:
                packs = -(-left // min(capacity // size, most))
                ready.append((0, opened, packs, 0, capacity))
                opened += packs
            _, first, packs, held, room = ready[0]
            each = room // size
            if each > most - held:
                each = most - held
            whole = packs * each <= left
            if whole:
                full, some, left = packs, 0, left - packs * each
                heappop(ready)
            else:
                full, some = divmod(left, each)
                left = 0
            if full:
                put((first, full, each, held))
                rest = room - each * size
                if rest >= least and held + each < most:
                    heappush(waiting, (-rest, first, full, held + each))
            if whole:
                continue
            # The documents end within this run, which is cut; what is left of it still is the first of all.
            first, packs = first + full, packs - full
            if some:
                put((first, 1, some, held))
                rest = room - some * size
                ready[0] = (rest if best else first, first, 1, held + some, rest)
                first, packs = first + 1, packs - 1
                if packs:
                    heappush(ready, (room if best else first, first, packs, held, room))
            else:
                ready[0] = (room if best else first, first, packs, held, room)
    return Steps(rows, opened)


def _alone(
    sizes: list[int], amounts: list[int], capacity: int, most: int
) -> tuple[list[int], list[tuple[int, int, int, int]], int]:
    """Return the steps of the documents over half the capacity, the runs they make, and how many packs these are.

    Each has a pack alone. No run has room for the next size; most room comes first: (-room, first, packs, held).
    """
    firsts = list(accumulate(amounts, initial=0))
    opened = firsts.pop()
    rows = [value for first, packs in zip(firsts, amounts, strict=True) for value in (first, packs, 1, 0)]
    runs = [(size - capacity, first, packs, 1) for size, first, packs in zip(sizes, firsts, amounts, strict=False)]
    waiting = [run for run in reversed(runs) if -run[0] >= sizes[-1] and most > 1]
    return rows, waiting, opened

"""Slow, obvious versions of evening out: every assignment of a few samples, and filling that looks at every pack."""

from collections.abc import Iterator, Sequence
from itertools import product

Packs = list[list[int]]


def step_faults(
    ranks: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int], capacity: int, most: int | None = None
) -> list[str]:
    """Every broken promise of one step: a sample not there once, a pack too full or empty, ranks that differ."""
    found = []
    if sorted(index for packs in ranks for one in packs for index in one) != list(range(len(lengths))):
        found.append("samples are missing or doubled")
    if len({len(packs) for packs in ranks}) != 1:
        found.append(f"ranks have {[len(packs) for packs in ranks]} packs")
    for rank, packs in enumerate(ranks):
        for p, one in enumerate(packs):
            if sum(lengths[index] for index in one) > capacity or not one or len(one) > (most or len(one)):
                found.append(f"pack {p} of rank {rank} holds {list(one)}")
    return found


def least_largest(costs: Sequence[int], ranks: int, equal_counts: bool) -> int:
    """The least that the largest sum of a rank can be, over every way to share the samples out."""
    sums = []
    for owners in product(range(ranks), repeat=len(costs)):
        counts = [owners.count(rank) for rank in range(ranks)]
        if min(counts) and (not equal_counts or len(set(counts)) == 1):
            sums.append(max(sum(c for c, owner in zip(costs, owners, strict=True) if owner == r) for r in range(ranks)))
    return min(sums)


def partitions(samples: int, blocks: int) -> Iterator[Packs]:
    """Every way to put samples into at most so many blocks, none empty."""

    def grow(index: int, held: Packs) -> Iterator[Packs]:
        if index == samples:
            yield [list(block) for block in held]
            return
        for block in held:
            block.append(index)
            yield from grow(index + 1, held)
            block.pop()
        if len(held) < blocks:
            held.append([index])
            yield from grow(index + 1, held)
            held.pop()

    yield from grow(0, [])


def best_steps(lengths: Sequence[int], ranks: int, capacity: int, works: Sequence[int]) -> dict[int, int]:
    """Packs a rank -> the least sum, over positions, of the heaviest pack; of all steps within the capacity.

    Grouped by falling work, `ranks` at a time, packs have the least such sum.
    """
    best: dict[int, int] = {}
    for blocks in partitions(len(lengths), len(lengths)):
        if len(blocks) % ranks or any(sum(lengths[i] for i in block) > capacity for block in blocks):
            continue
        held = sorted((sum(works[i] for i in block) for block in blocks), reverse=True)
        count = len(blocks) // ranks
        best[count] = min(best.get(count, sum(held)), sum(held[::ranks]))
    return best


def fill(
    order: Sequence[int],
    lengths: Sequence[int],
    capacity: int,
    ranks: int,
    count: int | None,
    most: int | None,
    linear: int,
) -> list[Packs] | None:
    """Packs by position, as they are filled together; each step looks at every pack."""
    positions: list[Packs] = [[[] for _ in range(ranks)] for _ in range(count or 1)]

    def tokens(pack: list[int]) -> int:
        return sum(lengths[i] for i in pack)

    def work(pack: list[int]) -> int:
        return sum(lengths[i] * (linear + lengths[i]) for i in pack)

    def room(pack: list[int]) -> int:
        return 0 if most is not None and len(pack) == most else capacity - tokens(pack)

    def spare(position: Packs, pack: list[int]) -> int:
        return min(max(map(work, position)) - work(pack), room(pack) * (linear + room(pack)))

    waiting = list(order)
    while waiting:
        weight = work(waiting[:1])
        loosest = max(positions, key=lambda one: max(spare(one, pack) for pack in one))
        pack = max(loosest, key=lambda pack: spare(loosest, pack))
        most_spare = spare(loosest, pack)
        if weight <= most_spare:
            pack.append(waiting.pop(0))
            continue
        length = lengths[waiting[0]]
        if count is None:
            fitting = [one for one in positions if max(map(room, one)) >= length]
            if not fitting:
                fitting = [[[] for _ in range(ranks)]]
                positions += fitting
            chosen = fitting[0]
        else:
            chosen = max(positions, key=lambda one: sum(map(room, one)))
            if max(map(room, chosen)) < length:
                return None
        seats = sorted(chosen, key=work)
        if room(seats[0]) < length:
            seats = [max(chosen, key=room)]
        for place, seat in enumerate(seats):
            if not waiting or (place and (work(waiting[:1]) <= most_spare or room(seat) < lengths[waiting[0]])):
                break
            seat.append(waiting.pop(0))
    return None if count is not None and not all(pack for one in positions for pack in one) else positions

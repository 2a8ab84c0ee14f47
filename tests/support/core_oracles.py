"""Slow, obvious versions of what pack_core computes, and checks written without it."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product

Packs = list[list[int]]


def next_fit(lengths: Sequence[int], capacity: int, max_documents: int | None = None) -> Packs:
    packs: Packs = []
    for index, length in enumerate(lengths):
        full = (
            not packs
            or sum(lengths[i] for i in packs[-1]) + length > capacity
            or (max_documents is not None and len(packs[-1]) + 1 > max_documents)
        )
        if full:
            packs.append([])
        packs[-1].append(index)
    return packs


def split_by_tokens(packs: Packs, lengths: Sequence[int], count: int) -> Packs:
    packs = [list(one) for one in packs]

    def tokens(one: Sequence[int]) -> int:
        return sum(lengths[i] for i in one)

    while len(packs) < count:
        splittable = [p for p, one in enumerate(packs) if len(one) >= 2]
        heaviest = max(tokens(packs[p]) for p in splittable)
        chosen = next(p for p in splittable if tokens(packs[p]) == heaviest)
        one = packs[chosen]
        cut = min(range(1, len(one)), key=lambda at: (max(tokens(one[:at]), tokens(one[at:])), at))
        packs[chosen : chosen + 1] = [one[:cut], one[cut:]]
    return packs


def split_by_samples(packs: Packs, count: int) -> Packs:
    packs = [list(one) for one in packs]
    while len(packs) < count:
        most = max(len(one) for one in packs)
        chosen = next(p for p, one in enumerate(packs) if len(one) == most)
        one = packs[chosen]
        packs[chosen : chosen + 1] = [one[: len(one) // 2], one[len(one) // 2 :]]
    return packs


def all_cuts(count_of_samples: int, count: int) -> Iterator[Packs]:
    for inner in combinations(range(1, count_of_samples), count - 1):
        edges = [0, *inner, count_of_samples]
        yield [list(range(a, b)) for a, b in pairwise(edges)]


def smallest_largest(lengths: Sequence[int], count: int, max_documents: int | None = None) -> int:
    """The smallest possible largest pack over every way to cut the order into `count` packs."""
    return min(
        max(sum(lengths[i] for i in one) for one in packs)
        for packs in all_cuts(len(lengths), count)
        if max_documents is None or max(map(len, packs)) <= max_documents
    )


def assignments(samples: int, ranks: int, packs: int) -> Iterator[list[list[list[int]]]]:
    """Every way to lay samples into the packs of the ranks, empty packs included."""
    places = list(product(range(ranks), range(packs)))
    for chosen in product(places, repeat=samples):
        laid: list[list[list[int]]] = [[[] for _ in range(packs)] for _ in range(ranks)]
        for index, (rank, p) in enumerate(chosen):
            laid[rank][p].append(index)
        yield laid


def work_of(laid: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int]) -> tuple[int, int]:
    """Token work and pair work, straight from their formulas."""
    packs = range(len(laid[0]))
    token = sum(max(sum(lengths[i] for i in rank[p]) for rank in laid) for p in packs)
    pair = sum(max(sum(lengths[i] ** 2 for i in rank[p]) for rank in laid) for p in packs)
    return token, pair


def step_of(lengths: Sequence[int], ranks: int, capacity: int, count_by: str, cap: int | None = None) -> list[Packs]:
    """The packs of each rank for one step over all the samples, from the slow versions."""
    columns = [list(range(len(lengths)))[rank::ranks] for rank in range(ranks)]
    laid = [next_fit([lengths[i] for i in column], capacity, cap) for column in columns]
    count = max(map(len, laid))
    result = []
    for packs, column in zip(laid, columns, strict=True):
        held = [lengths[i] for i in column]
        cut = split_by_tokens(packs, held, count) if count_by == "tokens" else split_by_samples(packs, count)
        result.append([[column[place] for place in one] for one in cut])
    return result


def complaints(packs: Packs, lengths: Sequence[int], count: int, limit: int, cap: int | None = None) -> list[str]:
    """What is wrong with packs that should be `count` consecutive, non-empty ones within the limit."""
    found = []
    if [i for one in packs for i in one] != list(range(len(lengths))):
        found.append("not every sample once, in order")
    if len(packs) != count:
        found.append(f"{len(packs)} packs, not {count}")
    if not all(packs):
        found.append("an empty pack")
    if any(sum(lengths[i] for i in one) > limit for one in packs):
        found.append("a pack over the limit")
    if cap is not None and any(len(one) > cap for one in packs):
        found.append("a pack with too many samples")
    return found

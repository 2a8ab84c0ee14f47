"""Orders made at once, from lengths and counts: what a search starts from and has to beat."""

from collections.abc import Sequence
from typing import Protocol

from pack_core.filling import deals, filled
from pack_core.search.layout import Rules

Columns = list[list[int]]


class Growth(Protocol):
    """The expert loads of replicas that samples are dealt to one by one."""

    def unevenness(self, sample: int) -> int:
        """Return by how much the largest destinations of a sample, times their number, exceed all it brings."""
        ...

    def of(self, replica: int, sample: int) -> int:
        """Return by how much a sample would raise the largest loads of a replica, summed over layers."""
        ...

    def add(self, replica: int, sample: int) -> None:
        """Give a sample to a replica."""
        ...


#: How many of the lightest replicas the expert-aware order tries for each sample.
_TRIED = 4


def by_experts(lengths: Sequence[int], growth: Growth, destinations: int, ranks: int) -> Columns:
    """Return columns dealt by length as `dealt` does, and so that the deals even out which destinations are needed.

    Within a deal, the sample whose destinations are most uneven chooses first: of the replicas with a free rank (the
    four with fewest tokens, where there are more) the one whose largest loads, summed over layers, it raises least.
    Inside a replica, longer samples go to ranks with fewer tokens.

    Args:
        lengths: tokens of each sample.
        growth: what a sample adds to the loads of a replica.
        destinations: ranks of a replica.
        ranks: how many there are.
    """
    replicas = range(ranks // destinations)
    tokens, carried = [0] * ranks, [0] * len(replicas)
    columns: Columns = [[] for _ in range(ranks)]
    for deal in deals(lengths, ranks):
        held: list[list[int]] = [[] for _ in replicas]
        for index in sorted(deal, key=lambda index: (-growth.unevenness(index), index)):
            free = sorted((g for g in replicas if len(held[g]) < destinations), key=lambda g: (carried[g], g))
            chosen = min(free[:_TRIED], key=lambda g: (growth.of(g, index), g))
            growth.add(chosen, index)
            held[chosen].append(index)
            carried[chosen] += lengths[index]
        for g, members in enumerate(held):
            own = range(g * destinations, (g + 1) * destinations)
            lightest = sorted(own, key=lambda rank: (tokens[rank], rank))
            longest = sorted(members, key=lambda index: (-lengths[index], index))
            for index, rank in zip(longest, lightest, strict=True):
                columns[rank].append(index)
                tokens[rank] += lengths[index]
    return columns


def full(columns: Columns, lengths: Sequence[int], rules: Rules) -> list[int]:
    """Return the order in which every rank fills its packs: by first-fit, longest first.

    Each rank forwards its packs by falling sum of squares, so that a pack meets packs of like cost on other ranks.

    >>> full([[3, 0], [2, 1]], [1, 2, 3, 4], Rules(ranks=2, capacity=5, equalize="tokens", max_documents=None))
    [3, 2, 0, 1]
    """
    return _aligned([_filled(column, lengths, rules) or [] for column in columns], lengths)


def level(columns: Columns, lengths: Sequence[int], rules: Rules) -> list[int]:
    """Return the order in which every rank spreads its samples evenly over as many packs as the rank that needs most.

    Longest first, each sample goes to the emptiest pack; a rank where one does not fit fills its packs as in `full`.
    """
    first = [_filled(column, lengths, rules) or [] for column in columns]
    count = max(map(len, first))
    even = [_filled(column, lengths, rules, count) for column in columns]
    return _aligned([one or other for one, other in zip(even, first, strict=True)], lengths)


def _aligned(packs: Sequence[Columns], lengths: Sequence[int]) -> list[int]:
    """The order of all ranks' packs, each rank's by falling sum of squares."""
    columns = []
    for of_rank in packs:
        costliest = sorted(of_rank, key=lambda pack: -sum(lengths[index] ** 2 for index in pack))
        columns.append([index for pack in costliest for index in pack])
    return [column[place] for place in range(len(columns[0])) for column in columns]


def _filled(column: Sequence[int], lengths: Sequence[int], rules: Rules, count: int | None = None) -> Columns | None:
    packs = filled(column, lengths, rules.capacity, count=count, most=rules.max_documents)
    return None if packs is None else [pack for (pack,) in packs]

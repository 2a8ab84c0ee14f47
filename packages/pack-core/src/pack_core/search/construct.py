"""Orders made at once, from lengths and counts: what a search starts from and has to beat."""

from collections.abc import Sequence
from typing import Protocol

from pack_core.search.layout import Rules


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


def by_length(lengths: Sequence[int], rules: Rules) -> list[int]:
    """Return an order of equal sample counts, even tokens, and packs that meet packs of like square on other ranks.

    Samples are dealt longest first, `ranks` at a time, the longest of each deal to the rank with fewest tokens; then
    every rank packs its samples by first-fit, longest first, and forwards its packs by falling sum of squares.

    >>> by_length([1, 2, 3, 4], Rules(ranks=2, capacity=5, equalize="tokens", max_documents=None))
    [3, 2, 0, 1]
    """
    columns: list[list[int]] = [[] for _ in range(rules.ranks)]
    tokens = [0] * rules.ranks
    for deal in _deals(lengths, rules.ranks):
        lightest = sorted(range(rules.ranks), key=lambda rank: (tokens[rank], rank))
        for index, rank in zip(deal, lightest, strict=True):
            columns[rank].append(index)
            tokens[rank] += lengths[index]
    return _interleaved([_aligned(column, lengths, rules) for column in columns])


def by_experts(lengths: Sequence[int], growth: Growth, destinations: int, rules: Rules) -> list[int]:
    """Return an order like `by_length`, whose deals also even out which destinations a replica needs.

    Within a deal, the sample whose destinations are most uneven chooses first: of the replicas with a free rank (the
    four with fewest tokens, where there are more) the one whose largest loads, summed over layers, it raises least.
    Inside a replica, longer samples go to ranks with fewer tokens.

    Args:
        lengths: tokens of each sample.
        growth: what a sample adds to the loads of a replica.
        destinations: ranks of a replica.
        rules: the ranks and their limits.
    """
    replicas = range(rules.ranks // destinations)
    tokens, carried = [0] * rules.ranks, [0] * len(replicas)
    columns: list[list[int]] = [[] for _ in range(rules.ranks)]
    for deal in _deals(lengths, rules.ranks):
        held: list[list[int]] = [[] for _ in replicas]
        for index in sorted(deal, key=lambda index: (-growth.unevenness(index), index)):
            free = sorted((g for g in replicas if len(held[g]) < destinations), key=lambda g: (carried[g], g))
            chosen = min(free[:_TRIED], key=lambda g: (growth.of(g, index), g))
            growth.add(chosen, index)
            held[chosen].append(index)
            carried[chosen] += lengths[index]
        for g, members in enumerate(held):
            ranks = range(g * destinations, (g + 1) * destinations)
            lightest = sorted(ranks, key=lambda rank: (tokens[rank], rank))
            longest = sorted(members, key=lambda index: (-lengths[index], index))
            for index, rank in zip(longest, lightest, strict=True):
                columns[rank].append(index)
                tokens[rank] += lengths[index]
    return _interleaved([_aligned(column, lengths, rules) for column in columns])


def _deals(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """The samples, longest first, `ranks` at a time."""
    longest = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    return [longest[start : start + ranks] for start in range(0, len(longest), ranks)]


def _aligned(column: Sequence[int], lengths: Sequence[int], rules: Rules) -> list[int]:
    """A rank's samples in packs: first-fit, longest first; the packs by falling sum of squares."""
    most = len(column) if rules.max_documents is None else rules.max_documents
    packs: list[list[int]] = []
    room: list[int] = []
    for index in column:
        p = next((p for p, left in enumerate(room) if left >= lengths[index] and len(packs[p]) < most), len(packs))
        if p == len(packs):
            packs.append([])
            room.append(rules.capacity)
        packs[p].append(index)
        room[p] -= lengths[index]
    packs.sort(key=lambda pack: -sum(lengths[index] ** 2 for index in pack))
    return [index for pack in packs for index in pack]


def _interleaved(columns: Sequence[Sequence[int]]) -> list[int]:
    """The order whose position p is place `p // ranks` of rank `p % ranks`."""
    return [column[place] for place in range(len(columns[0])) for column in columns]

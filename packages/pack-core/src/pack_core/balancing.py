"""Samples to ranks, so that all have as much to do: the best of four ways to even out sums."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from operator import itemgetter

from pack_core.errors import CountError, PackError
from pack_core.filling import LINEAR, Packs, deals, dealt, weigh
from pack_core.lengths import Lengths, as_integer, as_lengths

_OBJECTIVES = ("tokens", "quadratic", "work")


def balance(
    lengths: Lengths,
    ranks: int,
    objective: str = "tokens",
    equal_counts: bool = True,
    *,
    linear: int = LINEAR,
    ids: Sequence[str | int] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Return the samples of every rank, evened out by what they cost; nothing is packed, and no capacity kept.

    Four ways are tried: longest first to the rank that has least, back and forth over the ranks (snake), differencing
    (Karmarkar and Karp, 1982), and, from the best of these, swaps of samples between the ranks. The best is the one
    whose largest sum is least. `schedule` does the whole step, packs included.

    | objective | a sample of n tokens costs |
    |---|---|
    | `tokens` | n |
    | `quadratic` | n^2 |
    | `work` | n (linear + n), in attention pairs |

    Args:
        lengths: tokens of each sample, `[samples]`.
        ranks: how many share them, at most as many as samples.
        objective: what to even out, one of the table.
        equal_counts: give every rank the same number of samples, which must then be a multiple of the ranks.
        linear: what the layers outside attention do for a token, in attention pairs: 24 h^2 floating-point operations
            over 4 h are six times the hidden size h, 24,576 at 4,096; only `work` looks at it.
        ids: names of the samples for error messages, `[samples]`.

    Returns:
        `[ranks]` rows of indices, rising; the rank with the first sample comes first.

    Raises:
        CountError: some rank would hold no sample, or not as many as the others where all must hold the same.
        LengthError: a length is no whole number of at least 1; the sample is named.
        PackError: the objective is unknown, or a number is below what it may be.

    >>> balance([8, 7, 6, 5, 4], ranks=2, equal_counts=False)  # 15 and 15
    ((0, 1), (2, 3, 4))
    >>> balance([9, 1, 9, 1], ranks=2)
    ((0, 3), (1, 2))
    """
    if objective not in _OBJECTIVES:
        raise PackError(f"objective is {objective!r}; it must be one of {', '.join(map(repr, _OBJECTIVES))}")
    tokens, ranks = as_lengths(lengths, ids=ids).tolist(), as_integer(ranks, "ranks")
    linear = as_integer(linear, "linear", least=0)
    check_shares(len(tokens), ranks)
    if equal_counts and len(tokens) % ranks:
        raise CountError(
            f"{len(tokens)} samples do not give {ranks} ranks the same number each; use a multiple of {ranks}, "
            "or equal_counts=False"
        )
    cost: dict[str, Callable[[int], int]] = {
        "tokens": int,
        "quadratic": lambda length: length * length,
        "work": lambda length: weigh(length, linear),
    }
    costs = list(map(cost[objective], tokens))
    ways = [_snake(costs, ranks), _differenced(costs, ranks, equal_counts)]
    ways.append(dealt(costs, ranks) if equal_counts else _lightest(costs, ranks))
    best = min(ways, key=lambda groups: max(sum(costs[index] for index in group) for group in groups))
    return tuple(sorted(tuple(sorted(group)) for group in evened(best, tokens, costs, moves=not equal_counts)))


def check_shares(samples: int, ranks: int, each: int = 1) -> None:
    """Check that every rank can have so many packs or samples, none of them empty.

    Raises:
        CountError: there are too few samples.

    >>> check_shares(4, 2, 2)
    """
    if samples < ranks * each:
        what = "a sample" if each == 1 else f"{each:,} packs"
        raise CountError(
            f"{samples:,} samples cannot give each of {ranks:,} ranks {what}, none empty; "
            f"that takes {ranks * each:,} samples, or fewer ranks"
        )


def evened(
    groups: Sequence[Sequence[int]],
    lengths: Sequence[int],
    costs: Sequence[int],
    *,
    capacity: int | None = None,
    most: int | None = None,
    moves: bool = True,
    fine: int = 1,
) -> Packs:
    """Return the groups after swaps, and moves, that make the costliest of them cost less.

    Again and again the costliest group gives a sample to the cheapest that can take it, for a smaller one or for none:
    the pair that brings the two nearest to each other. It ends where none does, or after eight changes a group.

    Args:
        groups: samples, no group empty.
        lengths: tokens of each sample.
        costs: of each sample, more for a longer one.
        capacity: most tokens of a group, or None.
        most: most samples of a group, or None.
        moves: let a sample go for none.
        fine: the difference from which on two groups count as uneven.

    >>> evened([[0, 1], [2, 3]], [9, 6, 4, 3], [9, 6, 4, 3])  # 15 and 7; 6 for 3 makes it 12 and 10
    [[3, 0], [2, 1]]
    """
    sums = [sum(map(costs.__getitem__, group)) for group in groups]
    if max(sums) - min(sums) < fine:
        return [list(group) for group in groups]
    # Cost, tokens and index of each: longer samples cost more, so that this is the order of all three.
    held = [sorted([(costs[index], lengths[index], index) for index in group]) for group in groups]
    largest = sum(lengths) if capacity is None else capacity
    room = [largest - sum([tokens for _, tokens, _ in group]) for group in held]
    for _ in range(8 * len(held)):
        seats = sorted(range(len(held)), key=sums.__getitem__)
        giver = seats[-1]
        for taker in seats[:-1]:
            gap = sums[giver] - sums[taker]
            alone = moves and len(held[giver]) > 1 and (most is None or len(held[taker]) < most)
            pair = _pair(held[giver], held[taker], gap, room[taker], alone) if gap >= fine else None
            if pair is not None:
                break
        else:
            break
        for sample, source, target in ((pair[0], giver, taker), (pair[1], taker, giver)):
            if sample is not None:
                held[source].remove(sample)
                held[target].insert(bisect_left(held[target], sample), sample)
                sums[source], sums[target] = sums[source] - sample[0], sums[target] + sample[0]
                room[source], room[target] = room[source] + sample[1], room[target] - sample[1]
    return [[index for _, _, index in group] for group in held]


_Sample = tuple[int, int, int]


def _pair(
    giver: list[_Sample], taker: list[_Sample], gap: int, room: int, alone: bool
) -> tuple[_Sample, _Sample | None] | None:
    """Return what one gives and takes so that two groups, `gap` apart, come nearest to each other."""
    best, found = gap, None
    for given in giver:
        cost, tokens, _ = given
        options: list[tuple[int, _Sample | None]] = [(cost, None)] if alone and tokens <= room else []
        first = bisect_left(taker, tokens - room, key=itemgetter(1))  # none shorter: the taker would be too full
        near = max(bisect_left(taker, (cost - gap // 2, 0, 0)), first)
        options += [(cost - taken[0], taken) for taken in taker[max(near - 1, first) : near + 1]]
        for less, taken in options:
            if 0 < less < gap and abs(gap - 2 * less) < best:
                best, found = abs(gap - 2 * less), (given, taken)
    return found


def _snake(costs: Sequence[int], ranks: int) -> Packs:
    groups: Packs = [[] for _ in range(ranks)]
    for number, deal in enumerate(deals(costs, ranks)):
        for group, index in zip(groups[::-1] if number % 2 else groups, deal, strict=False):
            group.append(index)
    return groups


def _lightest(costs: Sequence[int], ranks: int) -> Packs:
    groups: Packs = [[] for _ in range(ranks)]
    least = [(0, rank) for rank in range(ranks)]
    for deal in deals(costs, ranks):
        for index in deal:
            cost, rank = least[0]
            groups[rank].append(index)
            heapreplace(least, (cost + costs[index], rank))
    return groups


def _differenced(costs: Sequence[int], ranks: int, equal_counts: bool) -> Packs:
    """Join, again and again, the two partial shares whose sums lie furthest apart: the largest with the smallest.

    A share starts as one sample, or as `ranks` of like cost where counts must stay equal; joining keeps them so.
    """
    starts = deals(costs, ranks if equal_counts else 1)
    shares = []
    for number, deal in enumerate(starts):
        sums = [costs[index] for index in deal] + [0] * (ranks - len(deal))
        shares.append((sums[-1] - sums[0], number, sums, [[index] for index in deal] + [[]] * (ranks - len(deal))))
    heapify(shares)
    for number in range(len(starts), 2 * len(starts) - 1):
        _, _, sums, groups = heappop(shares)
        _, _, other, more = heappop(shares)
        joined = [(mine + yours, rank) for rank, (mine, yours) in enumerate(zip(sums, reversed(other), strict=True))]
        joined.sort(reverse=True)
        sums = [total for total, _ in joined]
        groups = [groups[rank] + more[-1 - rank] for _, rank in joined]
        heappush(shares, (sums[-1] - sums[0], number, sums, groups))
    return shares[0][3]

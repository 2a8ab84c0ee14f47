"""One optimizer step: samples to ranks and packs, as many packs on every rank."""

import operator
from collections.abc import Sequence
from operator import itemgetter

from pack_core.balancing import check_shares, evened
from pack_core.errors import CountError, PackError
from pack_core.filling import LINEAR, Packs, filled, weigh, weigh_all
from pack_core.lengths import Lengths, as_integer, check_fit, read_with_longest
from pack_core.packing import equalize as equalize_packs
from pack_core.packing import pack
from pack_core.types import Schedule


def schedule(
    lengths: Lengths,
    ranks: int,
    capacity: int,
    *,
    order: Sequence[int] | None = None,
    equalize: str = "tokens",
    max_documents: int | None = None,
    linear: int = LINEAR,
    ids: Sequence[str | int] | None = None,
) -> Schedule:
    """Return the packs of every rank for one optimizer step: no pack over the capacity, as many on every rank.

    Without an order, samples go wherever the step is soonest done. The ranks run their p-th packs together and wait for
    the heaviest, so those weigh the same, or as near as whole samples come; so do the ranks' sums, and packs are as few
    as first-fit decreasing needs. Work, of which linear layers and attention have their part, is evened out: a sample
    of n tokens weighs n (linear + n). Heavy packs come first, and a pack holds its samples as they arrived.

    With an order, only cutting is left to do, as in a trainer that shares samples out by stride. Position p goes to
    rank `p % ranks`, where it is local place `p // ranks`. Each rank packs its own column by next-fit; then all ranks
    are split up to the largest count any rank needs. Because every rank holds the same number of samples, that count
    never leaves a pack empty.

    Args:
        lengths: tokens of each sample, `[samples]`.
        ranks: how many share them.
        capacity: most tokens a pack may hold.
        order: indices of this step's samples, `[step_samples]`, a positive multiple of the ranks; none twice.
        equalize: with an order, `"tokens"`, `"samples"` or `"balanced"`, see `pack_core.equalize`.
        max_documents: most samples a pack may hold, or None.
        linear: without an order, what the layers outside attention do for a token, in attention pairs, see
            `pack_core.balance`.
        ids: names of the samples for error messages, `[samples]`.

    Raises:
        CountError: there are fewer samples than packs that no rank can do without, or the ranks would not hold the same
            number of an order.
        LengthError: a sample is over `capacity`; it is named.
        PackError: `order` names a sample twice or one that does not exist, or an option is unknown.

    >>> schedule([9, 7, 6, 3, 2], ranks=2, capacity=10)  # 9 beside 7, then 3 2 beside 6: 14 and 13
    Schedule(packs=(((0,), (3, 4)), ((1,), (2,))))
    >>> schedule([15, 15, 2, 2], ranks=2, capacity=16, order=[0, 1, 2, 3])
    Schedule(packs=(((0,), (2,)), ((1,), (3,))))
    """
    (tokens, longest), ranks = read_with_longest(lengths, ids), as_integer(ranks, "ranks")
    capacity = as_integer(capacity, "capacity")
    if order is not None:
        return _in_order(tokens, ranks, capacity, order, equalize, max_documents, ids)
    if longest > capacity:
        check_fit(tokens, capacity, ids)
    check_shares(len(tokens), ranks)
    most = None if max_documents is None else as_integer(max_documents, "max_documents")
    linear = as_integer(linear, "linear", least=0)
    works = weigh_all(tokens, linear)
    packs = _positions(tokens, ranks, capacity, most, linear)
    # What all positions together may leave uneven: 0.4 % of a rank's work.
    fine = max(sum(works) // (250 * ranks * len(packs)), 1)
    weighed = []
    for position in packs:
        sums = _sums(position, works)
        if max(sums) - min(sums) >= fine:
            position = evened(position, tokens, works, capacity=capacity, most=most, fine=fine)
            sums = _sums(position, works)
        weighed.append(sorted(zip(sums, _sums(position, tokens), position, strict=True), reverse=True))
    return _shared(weighed, fine)


def _sums(packs: Packs, values: Sequence[int]) -> list[int]:
    value = values.__getitem__
    return [sum(map(value, samples)) for samples in packs]


def _positions(lengths: list[int], ranks: int, capacity: int, most: int | None, linear: int) -> list[Packs]:
    """The packs `[positions][ranks]`, none empty: filled evenly where there is room to spare, else first-fit."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    tokens, shortest = sum(lengths), lengths[order[-1]]

    def even(count: int) -> list[Packs] | None:
        # Even packs are never quite full: without room for one more short sample each, they will not hold all.
        tight = ranks * count * (capacity - shortest) < tokens
        return None if tight else filled(order, lengths, capacity, ranks=ranks, count=count, most=most, linear=linear)

    least = max(-(-tokens // (ranks * capacity)), 0 if most is None else -(-len(lengths) // (ranks * most)))
    packs = even(least)
    if packs is None:
        packs = filled(order, lengths, capacity, ranks=ranks, most=most, linear=linear) or []
        if len(packs) > least:
            packs = _fewer(lengths, ranks, capacity, most, linear, len(packs)) or packs
        check_shares(len(lengths), ranks, len(packs))
        if len(packs) > least:
            packs = even(len(packs)) or packs
    every = [samples for position in packs for samples in position]
    for samples in every:
        if not samples:
            samples.append(max(every, key=len).pop())
    return packs


def _fewer(
    lengths: list[int], ranks: int, capacity: int, most: int | None, linear: int, count: int
) -> list[Packs] | None:
    """The packs of first-fit decreasing by weight, where they need fewer positions than `count`.

    Filling positions evenly may miss by a token what filling one pack after the other fits.
    """
    packing = pack(lengths, capacity, strategy="first_fit_decreasing", max_documents=most)
    few = -(-len(packing) // ranks)
    if few >= count or ranks * few > len(lengths):
        return None
    every = [[*samples] for samples in equalize_packs(packing, lengths, count=ranks * few, max_documents=most)]
    every.sort(key=lambda samples: -sum(weigh(lengths[index], linear) for index in samples))
    return [every[start : start + ranks] for start in range(0, len(every), ranks)]


def _shared(weighed: list[list[tuple[int, int, list[int]]]], fine: int) -> Schedule:
    """Give the packs of each position to the ranks: what is most to the rank that has least so far.

    The positions uneven in work come first, most uneven ahead. In the others, where it differs by less than `fine`,
    tokens decide.

    Args:
        weighed: of each pack its work, its tokens and its samples, `[positions][ranks]`, most work first.
        fine: see there.
    """
    weighed.sort(key=lambda packs: -packs[0][0])
    uneven: list[tuple[int, int]] = []
    even: list[tuple[int, int]] = []
    for p, packs in enumerate(weighed):
        differ = packs[0][0] - packs[-1][0]
        if differ < fine:
            sums = [one[1] for one in packs]
            even.append((max(sums) - min(sums), p))
        else:
            uneven.append((differ, p))
    ranks = range(len(weighed[0]))
    so_far = [[0] * len(ranks), [0] * len(ranks)]
    rows: list[list[tuple[int, ...]]] = [[()] * len(weighed) for _ in ranks]
    for by, found in enumerate((uneven, even)):
        for _, p in sorted(found, key=lambda one: (-one[0], one[1])):
            most = sorted(weighed[p], key=itemgetter(by), reverse=True)
            for one, rank in zip(most, sorted(ranks, key=so_far[by].__getitem__), strict=True):
                rows[rank][p] = tuple(sorted(one[2]))
                so_far[0][rank] += one[0]
                so_far[1][rank] += one[1]
    return Schedule(tuple(map(tuple, rows)))


def _in_order(
    tokens: Sequence[int],
    ranks: int,
    capacity: int,
    order: Sequence[int],
    equalize: str,
    max_documents: int | None,
    ids: Sequence[str | int] | None,
) -> Schedule:
    order = tuple(map(operator.index, order))
    _check_order(order, len(tokens), ranks)
    names = [index if ids is None else ids[index] for index in order]
    check_fit([tokens[index] for index in order], capacity, names)
    columns = [order[rank::ranks] for rank in range(ranks)]
    held = [[tokens[index] for index in column] for column in columns]
    packings = [pack(column, capacity=capacity, max_documents=max_documents) for column in held]
    count = max(map(len, packings))
    return Schedule(
        tuple(
            tuple(
                tuple(column[place] for place in places)
                for places in equalize_packs(
                    packing, column_tokens, count=count, method=equalize, max_documents=max_documents
                )
            )
            for column, column_tokens, packing in zip(columns, held, packings, strict=True)
        )
    )


def _check_order(order: Sequence[int], samples: int, ranks: int) -> None:
    if not order or len(order) % ranks:
        raise CountError(
            f"{len(order)} samples do not give {ranks} ranks the same number each; use a positive multiple of {ranks}"
        )
    if min(order) < 0 or max(order) >= samples:
        raise PackError(
            f"order holds indices {min(order)} to {max(order)} but there are {samples} samples, 0 to {samples - 1}"
        )
    if len(set(order)) != len(order):
        first: dict[int, int] = {}
        for position, index in enumerate(order):
            if index in first:
                raise PackError(
                    f"order holds sample {index} at positions {first[index]} and {position}; each may be there once"
                )
            first[index] = position

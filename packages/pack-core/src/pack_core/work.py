"""What a step costs in counts, and what no packing can go below. Counts order schedules; they are no wall times."""

import math
from collections.abc import Sequence

import attrs

from pack_core.errors import CountError, PackError
from pack_core.kernels import column_figures
from pack_core.lengths import Lengths, as_integer, as_lengths
from pack_core.types import Bounds, DispatchCounts, Schedule, Work


def work(schedule: Schedule, lengths: Lengths, capacity: int, counts: DispatchCounts | None = None) -> Work:
    """Return the counted work of one optimizer step.

    All ranks run pack p at the same time and wait for the slowest, so over packs the largest rank counts:
    `A = sum_p max_r tokens[r, p]` and `Q = sum_p max_r sum_{documents in (r, p)} length**2`, the squares of the
    samples' lengths, since a sample attends only to itself. With counts, expert work likewise: the ranks of a replica
    exchange tokens in every layer, so `X = sum_p sum_l max_{g, d} load[g, p, l, d]`.

    Args:
        schedule: packs of every rank, as indices into `lengths`.
        lengths: tokens of each sample, `[samples]`.
        capacity: most tokens a pack may hold.
        counts: of the same samples, by destination: as many places as ranks in a replica.

    Raises:
        CountError: the ranks do not all have the same number of packs, at least one, or are no whole replicas.
        PackError: the schedule names a sample that has no length, or the counts are of other samples.

    >>> work(Schedule((((0, 1),), ((2,),))), [2, 3, 4], capacity=8)  # doctest: +NORMALIZE_WHITESPACE, +ELLIPSIS
    Work(packs_per_rank=1, attention_token_work=5, attention_pair_work=16, model_tokens=9, max_pack_tokens=5,
         fill_fraction=0.5625, ...)
    """
    tokens = as_lengths(lengths)
    capacity = as_integer(capacity, "capacity")
    held = [len(packs) for packs in schedule.packs]
    if not held or min(held) < 1 or min(held) != max(held):
        raise CountError(f"the ranks have {held} packs; every rank must have the same number, at least 1")
    _check_known(schedule, len(tokens))
    loads = [[sum(tokens[index] for index in one) for one in packs] for packs in schedule.packs]
    pairs = [[sum(tokens[index] ** 2 for index in one) for one in packs] for packs in schedule.packs]
    total = sum(map(sum, loads))
    found = Work(
        packs_per_rank=held[0],
        attention_token_work=_sum_of_largest(loads),
        attention_pair_work=_sum_of_largest(pairs),
        model_tokens=total,
        max_pack_tokens=max(map(max, loads)),
        fill_fraction=total / (len(held) * held[0] * capacity),
    )
    if counts is None:
        return found
    _check_samples(counts, len(tokens))
    return _with_experts(found, dispatch_loads(schedule, counts))


def dispatch_loads(schedule: Schedule, counts: DispatchCounts) -> list[list[list[list[int]]]]:
    """Return the expert choices every destination executes, `[replicas][packs][layers][destinations]`.

    Args:
        schedule: packs of every rank.
        counts: by destination.

    Raises:
        CountError: the ranks are no whole replicas of `counts.places` ranks.

    >>> from array import array
    >>> counts = DispatchCounts((0,), 1, 2, array("i", [3, 1, 0, 4]))
    >>> dispatch_loads(Schedule((((0,),), ((1,),))), counts)
    [[[[3, 5]]]]
    """
    ranks, places = len(schedule.packs), counts.places
    _check_replicas(ranks, places)
    rows = {index: counts.of(index) for packs in schedule.packs for one in packs for index in one}
    return [
        [
            _folded_rows(
                [rows[index] for rank in range(start, start + places) for index in schedule.packs[rank][p]], counts
            )
            for p in range(schedule.packs_per_rank)
        ]
        for start in range(0, ranks, places)
    ]


def _folded_rows(rows: Sequence[Sequence[int]], counts: DispatchCounts) -> list[list[int]]:
    load = [sum(column) for column in zip(*rows, strict=True)] or [0] * counts.row
    return [load[at : at + counts.places] for at in range(0, counts.row, counts.places)]


def _with_experts(found: Work, loads: Sequence[Sequence[Sequence[Sequence[int]]]]) -> Work:
    dispatches = [dispatch for replica in loads for dispatch in replica]
    peaks = [sum(max(layer) for layer in dispatch) for dispatch in dispatches]
    totals = [sum(map(sum, dispatch)) for dispatch in dispatches]
    places = len(dispatches[0][0])
    skews = [peak * places / total if total else 1.0 for peak, total in zip(peaks, totals, strict=True)]
    joint = zip(*loads, strict=True)  # pack by pack, all replicas
    return attrs.evolve(
        found,
        critical_work_proxy=sum(
            max(max(layer) for layer in of_replicas) for packs in joint for of_replicas in zip(*packs, strict=True)
        ),
        dispatches=len(dispatches),
        skew_mean=math.fsum(skews) / len(skews),
        skew_max=max(skews),
        max_slot_assignments=max(max(max(layer) for layer in dispatch) for dispatch in dispatches),
    )


def bounds(lengths: Lengths, ranks: int, capacity: int, counts: DispatchCounts | None = None) -> Bounds:
    """Return what no assignment of one step's samples to ranks and packs can go below.

    `A >= max(ceil(sum length / ranks), max length)`, `Q` likewise with squared lengths, and packs per rank
    `>= ceil(sum length / (ranks * capacity))`. With counts, `X >= sum_l max(ceil(max_d T[l, d] / replicas),
    max_{i, d} c[i, l, d])` with T the totals of the step and c the counts of one sample.

    Args:
        lengths: tokens of each sample of the step, `[step_samples]`.
        ranks: how many ranks share them.
        capacity: most tokens a pack may hold.
        counts: of the same samples, by destination.

    Raises:
        CountError: the ranks are no whole replicas of `counts.places` ranks.
        PackError: there are no samples, the counts are of others, or `ranks` or `capacity` is below 1.

    >>> bounds([2, 3, 4], ranks=2, capacity=4)  # doctest: +ELLIPSIS
    Bounds(packs_per_rank=2, attention_token_work=5, attention_pair_work=16, ...)
    """
    tokens = as_lengths(lengths)
    ranks, capacity = as_integer(ranks, "ranks"), as_integer(capacity, "capacity")
    if not tokens:
        raise PackError("there are no lengths to bound; give at least one sample")
    total, squares, longest = sum(tokens), sum(length**2 for length in tokens), max(tokens)
    found = Bounds(
        packs_per_rank=-(-total // (ranks * capacity)),
        attention_token_work=max(-(-total // ranks), longest),
        attention_pair_work=max(-(-squares // ranks), longest**2),
    )
    if counts is None:
        return found
    _check_samples(counts, len(tokens))
    _check_replicas(ranks, counts.places)
    totals, largest = column_figures(counts.counts, counts.row)
    places, replicas = counts.places, ranks // counts.places
    layers = [slice(at, at + places) for at in range(0, counts.row, places)]
    return attrs.evolve(
        found,
        critical_work_proxy=sum(max(-(-max(totals[layer]) // replicas), max(largest[layer])) for layer in layers),
        even_critical_work=sum(-(-sum(totals[layer]) // ranks) for layer in layers),
    )


def placed_critical_work(counts: DispatchCounts, destinations: int, replicas: int) -> int:
    """Return the bound on expert work with experts placed anew, each layer by longest processing time first.

    Every destination keeps as many experts as before. Placing is not ours to do: this says what it could still remove.
    It is an estimate from below for that placement, not for every one.

    Args:
        counts: of a step, per expert.
        destinations: how many own the experts, which they share out equally.
        replicas: complete expert sets.

    >>> from array import array
    >>> placed_critical_work(DispatchCounts((0,), 1, 4, array("i", [9, 8, 1, 2])), destinations=2, replicas=1)
    10
    """
    totals, largest = column_figures(counts.counts, counts.row)
    share, work = counts.places // destinations, 0
    for at in range(0, counts.row, counts.places):
        loads, owned = [0] * destinations, [0] * destinations
        for load in sorted(totals[at : at + counts.places], reverse=True):
            place = min((d for d in range(destinations) if owned[d] < share), key=loads.__getitem__)
            loads[place] += load
            owned[place] += 1
        work += max(-(-max(loads) // replicas), max(largest[at : at + counts.places]))
    return work


def _sum_of_largest(loads: Sequence[Sequence[int]]) -> int:
    return sum(max(of_ranks) for of_ranks in zip(*loads, strict=True))


def _check_samples(counts: DispatchCounts, samples: int) -> None:
    if counts.samples != samples:
        raise PackError(f"there are {samples:,} lengths but counts of {counts.samples:,} samples; give one of each")


def _check_replicas(ranks: int, places: int) -> None:
    if ranks % places:
        raise CountError(
            f"{ranks} ranks are no whole replicas of {places} destinations; fold the counts to expert_parallel places"
        )


def _check_known(schedule: Schedule, samples: int) -> None:
    named = [index for packs in schedule.packs for one in packs for index in one]
    unknown = [index for index in named if not 0 <= index < samples]
    if unknown:
        raise PackError(f"the schedule holds sample {unknown[0]} but there are {samples} lengths, 0 to {samples - 1}")

"""What a step costs in counts, and what no packing can go below. Counts order schedules; they are no wall times."""

from collections.abc import Sequence

from pack_core.errors import CountError, PackError
from pack_core.lengths import Lengths, as_integer, as_lengths
from pack_core.types import Bounds, Schedule, Work


def work(schedule: Schedule, lengths: Lengths, capacity: int) -> Work:
    """Return the counted work of one optimizer step.

    All ranks run pack p at the same time and wait for the slowest, so over packs the largest rank counts:
    `A = sum_p max_r tokens[r, p]` and `Q = sum_p max_r sum_{documents in (r, p)} length**2`, the squares of the
    samples' lengths, since a sample attends only to itself.

    Args:
        schedule: packs of every rank, as indices into `lengths`.
        lengths: tokens of each sample, `[samples]`.
        capacity: most tokens a pack may hold.

    Raises:
        CountError: the ranks do not all have the same number of packs, at least one.
        PackError: the schedule names a sample that has no length.

    >>> work(Schedule((((0, 1),), ((2,),))), [2, 3, 4], capacity=8)  # doctest: +NORMALIZE_WHITESPACE
    Work(packs_per_rank=1, attention_token_work=5, attention_pair_work=16, model_tokens=9, max_pack_tokens=5,
         fill_fraction=0.5625)
    """
    tokens = as_lengths(lengths)
    capacity = as_integer(capacity, "capacity")
    counts = [len(packs) for packs in schedule.packs]
    if not counts or min(counts) < 1 or min(counts) != max(counts):
        raise CountError(f"the ranks have {counts} packs; every rank must have the same number, at least 1")
    _check_known(schedule, len(tokens))
    loads = [[sum(tokens[index] for index in one) for one in packs] for packs in schedule.packs]
    pairs = [[sum(tokens[index] ** 2 for index in one) for one in packs] for packs in schedule.packs]
    total = sum(map(sum, loads))
    return Work(
        packs_per_rank=counts[0],
        attention_token_work=_sum_of_largest(loads),
        attention_pair_work=_sum_of_largest(pairs),
        model_tokens=total,
        max_pack_tokens=max(map(max, loads)),
        fill_fraction=total / (len(counts) * counts[0] * capacity),
    )


def bounds(lengths: Lengths, ranks: int, capacity: int) -> Bounds:
    """Return what no assignment of one step's samples to ranks and packs can go below.

    `A >= max(ceil(sum length / ranks), max length)`, `Q` likewise with squared lengths, and packs per rank
    `>= ceil(sum length / (ranks * capacity))`.

    Args:
        lengths: tokens of each sample of the step, `[step_samples]`.
        ranks: how many ranks share them.
        capacity: most tokens a pack may hold.

    Raises:
        PackError: there are no samples, or `ranks` or `capacity` is below 1.

    >>> bounds([2, 3, 4], ranks=2, capacity=4)
    Bounds(packs_per_rank=2, attention_token_work=5, attention_pair_work=16)
    """
    tokens = as_lengths(lengths)
    ranks, capacity = as_integer(ranks, "ranks"), as_integer(capacity, "capacity")
    if not tokens:
        raise PackError("there are no lengths to bound; give at least one sample")
    total, squares, longest = sum(tokens), sum(length**2 for length in tokens), max(tokens)
    return Bounds(
        packs_per_rank=-(-total // (ranks * capacity)),
        attention_token_work=max(-(-total // ranks), longest),
        attention_pair_work=max(-(-squares // ranks), longest**2),
    )


def _sum_of_largest(loads: Sequence[Sequence[int]]) -> int:
    return sum(max(of_ranks) for of_ranks in zip(*loads, strict=True))


def _check_known(schedule: Schedule, samples: int) -> None:
    named = [index for packs in schedule.packs for one in packs for index in one]
    unknown = [index for index in named if not 0 <= index < samples]
    if unknown:
        raise PackError(f"the schedule holds sample {unknown[0]} but there are {samples} lengths, 0 to {samples - 1}")

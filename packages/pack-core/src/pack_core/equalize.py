"""Packs to exactly as many packs as are wanted."""

import heapq
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from pack_core.errors import CountError, PackError
from pack_core.lengths import Lengths, as_integer, as_lengths
from pack_core.types import Packing


def equalize(
    packing: Packing,
    lengths: Lengths,
    *,
    count: int,
    method: str = "tokens",
    max_documents: int | None = None,
) -> Packing:
    """Return the same samples in the same order, cut into exactly `count` packs, none empty.

    No pack grows past the largest one given, so the capacity still holds; packs made with `align` want lengths rounded
    up to it.

    Args:
        packing: packs over all the samples.
        lengths: tokens of each sample, `[samples]`, by the indices that `packing` uses.
        count: packs wanted, at least `len(packing)`, at most the number of samples.
        method: `"tokens"` splits, again and again, the pack with most tokens that has two samples, where its larger
            part becomes smallest; ties go to the earliest. `"samples"` splits the pack with most samples (the first
            on ties) at half its samples, blind to tokens. `"balanced"` cuts the whole order anew, so that the largest
            pack is as small as `count` consecutive packs allow.
        max_documents: the cap `packing` was made with; only `"balanced"`, which cuts anew, needs it.

    Raises:
        CountError: `count` is below the packs given (nothing is merged) or above the samples (a pack would be empty).
        PackError: the method is unknown, `packing` is no Packing, or `lengths` does not belong to it.

    >>> from pack_core import pack
    >>> lengths = [300, 200, 400, 600]
    >>> list(equalize(pack(lengths, capacity=1024), lengths, count=3))
    [[0, 1], [2], [3]]
    """
    check_method(method)
    if not isinstance(packing, Packing):
        raise PackError(f"packing is a {type(packing).__name__}; give the Packing that pack returned")
    tokens = as_lengths(lengths)
    cap = None if max_documents is None else as_integer(max_documents, "max_documents")
    _check_belongs(packing, tokens, cap)
    count = as_integer(count, "count")
    if count < len(packing):
        raise CountError(
            f"cannot bring {len(packing):,} packs to {count:,}: packs are split, never merged; "
            f"ask for a count of {len(packing):,} or more"
        )
    if count > len(packing.order):
        raise CountError(
            f"cannot cut {len(packing.order):,} samples into {count:,} packs: one would be empty; "
            f"ask for a count of {len(packing.order):,} or fewer"
        )
    totals = [0, *accumulate(tokens[index] for index in packing.order)]
    return Packing(packing.order, array("q", split(packing.offsets, totals, count, method, cap)))


def split(offsets: Sequence[int], totals: Sequence[int], count: int, method: str, cap: int | None) -> list[int]:
    """Return the offsets of exactly `count` packs, as `equalize` cuts them, of arguments that were checked.

    >>> split([0, 3, 4], [0, 300, 500, 900, 1500], 3, "tokens", None)
    [0, 2, 3, 4]
    """
    return _METHODS[method](offsets, totals, count, cap)


def check_method(method: str) -> None:
    """Check that `equalize` knows the method.

    Raises:
        PackError: it does not; the known ones are named.

    >>> check_method("balanced")
    """
    if method not in _METHODS:
        known = ", ".join(map(repr, _METHODS))
        raise PackError(f"equalize method is {method!r}; it must be one of {known}")


def _by_tokens(offsets: Sequence[int], totals: Sequence[int], count: int, cap: int | None) -> list[int]:
    def weight(start: int, stop: int) -> int:
        return totals[stop] - totals[start]

    def cut(start: int, stop: int) -> int:
        # The larger part shrinks until the left one reaches half the tokens and grows from there on, so the best
        # boundary is that one or the one before.
        half = bisect_left(totals, (totals[start] + totals[stop] + 1) // 2, start + 1, stop - 1)
        before = max(half - 1, start + 1)
        larger_before = max(weight(start, before), weight(before, stop))
        return before if larger_before <= max(weight(start, half), weight(half, stop)) else half

    return _split(offsets, count, weight, cut)


def _by_samples(offsets: Sequence[int], totals: Sequence[int], count: int, cap: int | None) -> list[int]:
    return _split(offsets, count, lambda start, stop: stop - start, lambda start, stop: start + (stop - start) // 2)


def _balanced(offsets: Sequence[int], totals: Sequence[int], count: int, cap: int | None) -> list[int]:
    """Cut anew: the fewest packs under the smallest limit that `count` packs can keep, the rest by splitting."""
    most = len(totals) - 1 if cap is None else cap
    longest = max(stop - start for start, stop in pairwise(totals))
    low = max(longest, -(-totals[-1] // count))
    high = max(totals[stop] - totals[start] for start, stop in pairwise(offsets))
    while low < high:
        middle = (low + high) // 2
        if len(fill(totals, middle, most)) - 1 <= count:
            high = middle
        else:
            low = middle + 1
    return _by_tokens(fill(totals, low, most), totals, count, cap)


def fill(totals: Sequence[int], limit: int, most: int) -> list[int]:
    """Return where packs start that are filled one after the other: next-fit, the fewest any consecutive cut needs.

    Args:
        totals: 0 and the running totals of the lengths, `[samples + 1]`.
        limit: most tokens of a pack, at least the longest length.
        most: most samples of a pack.

    >>> fill([0, 3, 5, 9], limit=5, most=3)
    [0, 2, 3]
    """
    offsets, start, end = [0], 0, len(totals) - 1
    while start < end:
        # Totals strictly increase, so one past the limit is the first place where the pack would be over it.
        start = min(bisect_left(totals, totals[start] + limit + 1, start, min(start + most, end) + 1) - 1, end)
        offsets.append(start)
    return offsets


def _split(
    offsets: Sequence[int], count: int, weight: Callable[[int, int], int], cut: Callable[[int, int], int]
) -> list[int]:
    """Split the heaviest pack of two samples or more, the earliest on ties, until there are `count` packs."""
    heap = [(-weight(start, stop), start, stop) for start, stop in pairwise(offsets) if stop - start > 1]
    heapq.heapify(heap)
    result = list(offsets)
    while len(result) <= count:
        _, start, stop = heapq.heappop(heap)
        middle = cut(start, stop)
        result.append(middle)
        for left, right in ((start, middle), (middle, stop)):
            if right - left > 1:
                heapq.heappush(heap, (-weight(left, right), left, right))
    return sorted(result)


def _check_belongs(packing: Packing, tokens: "array[int]", cap: int | None) -> None:
    if packing.parts or packing.dropped:
        raise PackError(
            f"the packing dropped {len(packing.dropped):,} documents and holds {len(packing.parts):,} parts; "
            "only packs of whole documents, all of them, can be cut further"
        )
    if len(packing.order) != len(tokens):
        raise PackError(
            f"the packing holds {len(packing.order):,} samples but {len(tokens):,} lengths were given; "
            "give the lengths it was made from"
        )
    if not tokens:
        raise PackError("the packing holds no samples; there is nothing to cut")
    if min(packing.order) < 0 or max(packing.order) >= len(tokens):
        raise PackError(
            f"the packing holds indices {min(packing.order)} to {max(packing.order)} but lengths are "
            f"0 to {len(tokens) - 1}; give the lengths it was made from"
        )
    largest = max(stop - start for start, stop in pairwise(packing.offsets))
    if cap is not None and largest > cap:
        raise PackError(
            f"max_documents is {cap:,} but a pack already holds {largest:,} samples; give the cap it was made with"
        )


_METHODS: dict[str, Callable[[Sequence[int], Sequence[int], int, int | None], list[int]]] = {
    "tokens": _by_tokens,
    "samples": _by_samples,
    "balanced": _balanced,
}

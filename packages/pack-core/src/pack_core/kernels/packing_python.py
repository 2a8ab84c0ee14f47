"""Packing in plain Python: every loop over documents is one of the interpreter's own."""

import functools
import operator
from array import array
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from itertools import accumulate, chain, compress, islice

from pack_core.kernels.packing import Counts, Pieces, Steps
from pack_core.lengths import Lengths, read_with_longest


def read(lengths: Lengths, ids: Sequence[str | int] | None) -> tuple[Sequence[int], int]:
    """Return the lengths as a row that was checked, and the longest of them, 0 where there is none."""
    return read_with_longest(lengths, ids)


def whole(tokens: Sequence[int]) -> "array[int]":
    """Return a row as 64-bit integers."""
    return tokens if isinstance(tokens, array) and tokens.typecode == "q" else array("q", tokens)


def rises(row: Sequence[int]) -> bool:
    """Return whether each value is more than the one before.

    >>> rises([0, 2, 3]), rises([0, 0])
    (True, False)
    """
    return all(map(operator.lt, row, islice(row, 1, None)))


def rounded(tokens: Sequence[int], align: int) -> Sequence[int]:
    """Return how many steps of `align` tokens each takes.

    >>> rounded([1, 4, 5], 4)
    array('q', [1, 1, 2])
    """
    return tokens if align == 1 else array("q", [-(-length // align) for length in tokens])


def totals(sizes: Sequence[int]) -> list[int]:
    """Return 0 and the running totals.

    >>> totals([3, 2])
    [0, 3, 5]
    """
    return list(accumulate(sizes, initial=0))


def listed(sizes: Sequence[int]) -> Sequence[int]:
    """Return what a loop reads fastest."""
    return sizes


def over(tokens: Sequence[int], limit: int) -> "array[int]":
    """Return the places of those over the limit.

    >>> over([3, 9, 4], 4)
    array('q', [1])
    """
    return array("q", [place for place, length in enumerate(tokens) if length > limit])


def without(tokens: Sequence[int], places: Sequence[int]) -> Pieces:
    """Return all documents but these.

    >>> without([3, 9, 4], [1])
    Pieces(tokens=array('q', [3, 4]), documents=array('q', [0, 2]), starts=None)
    """
    kept = bytearray(b"\1") * len(tokens)
    for place in places:
        kept[place] = 0
    return Pieces(array("q", compress(tokens, kept)), array("q", compress(range(len(tokens)), kept)))


def clipped(tokens: Sequence[int], limit: int) -> Pieces:
    """Return the documents, none over the limit.

    >>> clipped([3, 9], 4)
    Pieces(tokens=array('q', [3, 4]), documents=None, starts=None)
    """
    return Pieces(array("q", [min(length, limit) for length in tokens]))


def cut(tokens: Sequence[int], limit: int) -> Pieces:
    """Return the documents, those over the limit in pieces of that many tokens and a rest.

    >>> cut([3, 9], 4)
    Pieces(tokens=array('q', [3, 4, 4, 1]), documents=array('q', [0, 1, 1, 1]), starts=array('q', [0, 0, 4, 8]))
    """
    pieces, documents, starts = array("q"), array("q"), array("q")
    for document, length in enumerate(tokens):
        for start in range(0, length, limit):
            pieces.append(min(limit, length - start))
            documents.append(document)
            starts.append(start)
    return Pieces(pieces, documents, starts)


def take(values: Sequence[int], places: Sequence[int]) -> "array[int]":
    """Return the values at some places.

    >>> take([5, 7, 9], [2, 0])
    array('q', [9, 5])
    """
    return array("q", map(values.__getitem__, places))


def partial(pieces: Pieces, tokens: Sequence[int], order: "array[int]") -> "tuple[array[int], array[int], array[int]]":
    """Return the places in an order of what is no whole document, and where each of these starts and stops.

    >>> partial(cut([3, 9], 4), [3, 9], array("q", [3, 0, 1, 2]))
    (array('q', [0, 2, 3]), array('q', [8, 0, 4]), array('q', [9, 4, 8]))
    """
    places, starts, stops = array("q"), array("q"), array("q")
    for place, piece in enumerate(order):
        held = pieces.tokens[piece]
        if held != tokens[piece if pieces.documents is None else pieces.documents[piece]]:
            start = 0 if pieces.starts is None else pieces.starts[piece]
            places.append(place)
            starts.append(start)
            stops.append(start + held)
    return places, starts, stops


def group(sizes: Sequence[int]) -> "tuple[Counts, array[int]]":
    """Return the documents counted by size, and ranked by it, longest first, in arrival order on ties.

    >>> group([2, 5, 2])
    (Counts(sizes=[5, 2], counts=[1, 2]), array('q', [1, 0, 2]))
    """
    same: defaultdict[int, array[int]] = defaultdict(functools.partial(array, "q"))
    deque(map(array.append, map(same.__getitem__, sizes), range(len(sizes))), 0)
    falling = sorted(same, reverse=True)
    ranked = array("q")
    for size in falling:
        ranked.extend(same[size])
    return Counts(falling, [len(same[size]) for size in falling]), ranked


def count(sizes: Sequence[int]) -> Counts:
    """Return the documents counted by size.

    >>> count([2, 5, 2])
    Counts(sizes=[5, 2], counts=[1, 2])
    """
    found = Counter(sizes)
    falling = sorted(found, reverse=True)
    return Counts(falling, [found[size] for size in falling])


def lay(ranked: "array[int]", steps: Steps) -> "tuple[array[int], array[int]]":
    """Return the order and offsets that the steps give.

    >>> lay(array("q", [7, 8, 9]), Steps([0, 2, 1, 0, 0, 1, 1, 1], packs=2))
    (array('q', [7, 9, 8]), array('q', [0, 2, 3]))
    """
    rows = steps.rows
    change = [0] * (steps.packs + 1)
    for first, packs, each in zip(rows[::4], rows[1::4], rows[2::4], strict=True):
        change[first] += each
        change[first + packs] -= each
    held = list(accumulate(change[:-1]))
    offsets = array("q", accumulate(held, initial=0))
    # Where the number of documents a pack changes; between two such places a column of packs is one strided slice.
    turns = [pack for pack, by in enumerate(change) if by] if steps.packs else [0]
    if turns[-1] != steps.packs:
        turns.append(steps.packs)
    order = array("q", bytes(8 * len(ranked)))
    source = 0
    for first, packs, each, before in zip(rows[::4], rows[1::4], rows[2::4], rows[3::4], strict=True):
        if packs == 1:
            to = offsets[first] + before
            order[to : to + each] = ranked[source : source + each]
            source += each
            continue
        end = first + packs
        turn = bisect_right(turns, first)
        while first < end:
            stop = min(turns[turn], end)
            to, wide, some = offsets[first] + before, held[first], (stop - first) * each
            for column in range(each):
                order[to + column : offsets[stop] : wide] = ranked[source + column : source + some : each]
            source += some
            first = stop
            turn += 1
    return order, offsets


def offsets_of(owners: Sequence[int], packs: int) -> "tuple[array[int], array[int]]":
    """Return the order and offsets of documents whose pack is known; arrival order inside a pack.

    >>> offsets_of([1, 0, 1], 2)
    (array('q', [1, 0, 2]), array('q', [0, 1, 3]))
    """
    held: list[list[int]] = [[] for _ in range(packs)]
    deque(map(list.append, map(held.__getitem__, owners), range(len(owners))), 0)
    return array("q", list(chain.from_iterable(held))), array("q", accumulate(map(len, held), initial=0))

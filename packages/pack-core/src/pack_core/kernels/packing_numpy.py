"""Packing with NumPy: the functions of `packing_python`, which says what each means, with the same results."""

from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pack_core.kernels.packing import Counts, Pieces, Steps
from pack_core.lengths import LARGEST, Lengths, read_with_longest

_Row: TypeAlias = NDArray[Any]

_RADIX = 2**16
#: Since NumPy 2 values are sorted by vector instructions on all common machines; before, sorting places was faster.
_SORTS_VALUES = int(np.__version__.split(".")[0]) >= 2
#: Documents taken at a time: what is held beside input and result then stays in a core's cache.
_AT_A_TIME = 2**15
#: Bits of a place in a stretch, where one sort does not take all documents; sizes have the other 15 of 32.
_STRETCH = 17


def read(lengths: Lengths, ids: Sequence[str | int] | None) -> tuple[_Row, int]:
    """Return the lengths as a row, the very memory they were given in where that can be, and the longest of them."""
    found = row_of(lengths, ids)
    if found is not None:
        return found
    listed, longest = read_with_longest(lengths, ids)
    return np.array(listed, np.int64), longest


def row_of(lengths: object, ids: Sequence[str | int] | None) -> tuple[_Row, int] | None:
    """Return the memory of flat integers that are lengths as a row, and the longest; None: there is no such memory."""
    if isinstance(lengths, (list, tuple, range, str, bytes, bytearray, np.ma.MaskedArray)):
        return None  # of a masked array the memory does not say what is missing
    try:
        row: _Row = np.asarray(lengths)
        if row.dtype == object and hasattr(lengths, "__dlpack__"):
            row = np.from_dlpack(lengths)
    except Exception:  # whatever another library raises, the slow path reads the values or names the trouble
        return None
    if row.ndim != 1 or row.dtype.kind not in "iu" or not row.dtype.isnative or not len(row):
        return None
    # A sum of 64 bits could wrap; the slow path adds up without, and says what is wrong with a length or the ids.
    longest = int(row.max())
    fits = row.min() >= 1 and longest * len(row) <= LARGEST and (ids is None or len(ids) == len(row))
    return (row, longest) if fits else None


def whole(tokens: Sequence[int] | _Row) -> "array[int]":
    """Return a row as 64-bit integers."""
    if isinstance(tokens, array) and tokens.typecode == "q":
        return tokens
    row = np.asarray(tokens)
    result = _empty(len(row))
    np.frombuffer(result, np.int64)[:] = row
    return result


def rises(row: "array[int]") -> bool:
    """Return whether each value is more than the one before."""
    values = np.frombuffer(row, np.int64)
    return bool((values[1:] > values[:-1]).all())


def rounded(tokens: Sequence[int] | _Row, align: int) -> _Row:
    """Return how many steps of `align` tokens each takes."""
    # In unsigned or narrow types the sum could wrap.
    row = np.asarray(tokens)
    return row if align == 1 else -(-row.astype(np.int64) // align)


def totals(sizes: _Row) -> list[int]:
    """Return 0 and the running totals."""
    return [0, *np.cumsum(sizes, dtype=np.int64).tolist()]


def listed(sizes: _Row) -> list[int]:
    """Return what a loop reads fastest."""
    result: list[int] = sizes.tolist()
    return result


def over(tokens: _Row, limit: int) -> "array[int]":
    """Return the places of those over the limit."""
    return whole(np.flatnonzero(tokens > limit))


def without(tokens: _Row, places: Sequence[int]) -> Pieces:
    """Return all documents but these."""
    kept = np.ones(len(tokens), bool)
    kept[np.asarray(places, np.int64)] = False
    return Pieces(_given(tokens[kept]), whole(np.flatnonzero(kept)))


def clipped(tokens: _Row, limit: int) -> Pieces:
    """Return the documents, none over the limit."""
    return Pieces(_given(np.minimum(tokens, limit)))


def cut(tokens: _Row, limit: int) -> Pieces:
    """Return the documents, those over the limit in pieces of that many tokens and a rest."""
    wide = tokens.astype(np.int64)
    parts = -(-wide // limit)
    documents = np.repeat(np.arange(len(wide)), parts)
    starts = (np.arange(len(documents)) - np.repeat(np.cumsum(parts) - parts, parts)) * limit
    return Pieces(_given(np.minimum(wide[documents] - starts, limit)), whole(documents), whole(starts))


def take(values: Sequence[int] | _Row, places: Sequence[int] | _Row) -> "array[int]":
    """Return the values at some places."""
    return whole(np.asarray(values)[np.asarray(places)])


def partial(pieces: Pieces, tokens: _Row, order: "array[int]") -> "tuple[array[int], array[int], array[int]]":
    """Return the places in an order of what is no whole document, and where each of these starts and stops."""
    held, ranked = np.asarray(pieces.tokens), np.frombuffer(order, np.int64)
    full = tokens if pieces.documents is None else tokens[np.asarray(pieces.documents)]
    places = np.flatnonzero((held != full)[ranked])
    found = ranked[places]
    starts = np.zeros(len(found), np.int64) if pieces.starts is None else np.asarray(pieces.starts)[found]
    return whole(places), whole(starts), whole(starts + held[found])


def group(sizes: _Row) -> tuple[Counts, _Row]:
    """Return the documents counted by size, and ranked by it, longest first, in arrival order on ties."""
    top = int(sizes.max())
    wide, places = (top - 1).bit_length(), (len(sizes) - 1).bit_length()
    if _SORTS_VALUES and wide + places <= 32 > places:
        return _counted(sizes, top), _sorted_codes(sizes, top, places)
    if _SORTS_VALUES and wide + _STRETCH <= 32:
        return _merged(sizes, top)
    return _counted(sizes, top), _sorted_places(sizes, top)


def count(sizes: Sequence[int] | _Row) -> Counts:
    """Return the documents counted by size."""
    row = np.asarray(sizes)
    return _counted(row, int(row.max()))


def _counted(sizes: _Row, top: int) -> Counts:
    if top <= 4 * len(sizes) + _RADIX:
        counts = np.bincount(sizes.astype(np.int64, copy=False))
        rising = np.flatnonzero(counts)
        counts = counts[rising]
    else:
        rising, counts = np.unique(sizes, return_counts=True)
    return Counts(rising[::-1].tolist(), counts[::-1].tolist())


def lay(ranked: _Row, steps: Steps) -> "tuple[array[int], array[int]]":
    """Return the order and offsets that the steps give."""
    rows = np.fromiter(steps.rows, np.int64, len(steps.rows)).reshape(-1, 4)
    first, packs, each, before = rows.T
    edges = np.concatenate((first, first + packs))
    change = np.bincount(edges, np.concatenate((each, -each)), steps.packs + 1)[: steps.packs]
    offsets = _empty(steps.packs + 1)
    starts = np.frombuffer(offsets, np.int64)
    np.cumsum(np.cumsum(change.astype(np.int64)), out=starts[1:])
    order = _empty(len(ranked))
    placed = np.frombuffer(order, np.int64)
    documents = packs * each
    ends = np.cumsum(documents)
    numbers = np.arange(max(_AT_A_TIME, int(documents.max())))
    done = step = 0
    while step < len(rows):
        stop = max(int(np.searchsorted(ends, done + _AT_A_TIME, "right")), step + 1)
        some = slice(step, stop)
        to = _places(starts, first[some], packs[some], each[some], before[some], numbers)
        placed[to] = ranked[done : done + len(to)]
        done, step = done + len(to), stop
    return order, offsets


def offsets_of(owners: Sequence[int], packs: int) -> "tuple[array[int], array[int]]":
    """Return the order and offsets of documents whose pack is known; arrival order inside a pack."""
    row = np.asarray(owners, np.int64)
    offsets = _empty(packs + 1)
    np.cumsum(np.bincount(row, minlength=packs), out=np.frombuffer(offsets, np.int64)[1:])
    return whole(_stable(row)), offsets


def _places(starts: _Row, first: _Row, packs: _Row, each: _Row, before: _Row, numbers: _Row) -> _Row:
    """Return where in the order the documents of some steps go, in their ranking; `numbers` count from 0."""
    ends = np.cumsum(packs)
    pack = np.repeat(first - ends + packs, packs)
    pack += numbers[: len(pack)]
    base: _Row = starts[pack]
    base += np.repeat(before, packs)
    wide = np.repeat(each, packs)
    if int(each.max()) == 1:
        return base
    base -= np.cumsum(wide)
    base += wide
    places = np.repeat(base, wide)
    places += numbers[: len(places)]
    return places


def _sorted_codes(sizes: _Row, top: int, bits: int) -> _Row:
    """Return the ranking by size and place in one number: in half the time of places sorted by size, and stable."""
    codes = np.empty(len(sizes), np.uint32)
    numbers = np.arange(min(_AT_A_TIME, len(sizes)), dtype=np.uint32)
    for start in range(0, len(sizes), _AT_A_TIME):
        some = codes[start : start + _AT_A_TIME]
        some[:] = sizes[start : start + _AT_A_TIME]
        np.subtract(np.uint32(top % 2**32), some, out=some)  # their difference is less, whatever wraps
        some <<= np.uint32(bits)
        some += numbers[: len(some)]
        some += np.uint32(start)
    codes.sort()
    codes &= np.uint32((1 << bits) - 1)
    return codes


def _merged(sizes: _Row, top: int) -> tuple[Counts, _Row]:
    """Return counts and ranking of more documents than one sort takes: each stretch is sorted alone.

    In a sorted stretch documents of one size lie together, and go behind those of the stretches before.
    """
    size = 1 << _STRETCH
    stretches = [sizes[start : start + size] for start in range(0, len(sizes), size)]
    counts = [np.bincount(some.astype(np.int64, copy=False), minlength=top + 1)[::-1] for some in stretches]
    whole = np.sum(counts, axis=0)
    after = np.cumsum(whole) - whole
    ranked, numbers = np.empty(len(sizes), np.int64), np.arange(size)
    for number, (some, own) in enumerate(zip(stretches, counts, strict=True)):
        to = np.repeat(after - np.cumsum(own) + own, own)
        to += numbers[: len(some)]
        ranked[to] = _sorted_codes(some, top, _STRETCH) + np.int64(number * size)
        after += own
    falling = np.flatnonzero(whole)
    return Counts((top - falling).tolist(), whole[falling].tolist()), ranked


def _sorted_places(sizes: _Row, top: int) -> _Row:
    if top < _RADIX:
        order: _Row = np.argsort(np.uint16(top) - sizes.astype(np.uint16), kind="stable")
        return order
    return _stable(top - sizes.astype(np.int64, copy=False))


def _stable(keys: _Row) -> _Row:
    """Return the stable order of keys of at least 0: sixteen bits at a time, which NumPy sorts in linear time."""
    top = int(keys.max()) if len(keys) else 0
    order: _Row = np.argsort((keys & (_RADIX - 1)).astype(np.uint16), kind="stable")
    shift = 16
    while top >> shift:
        digits = ((keys >> shift) & (_RADIX - 1)).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
        shift += 16
    return order


def _given(row: _Row) -> Sequence[int]:
    result: Any = row
    return result  # type: ignore[no-any-return]  # the rows of this kernel are arrays of NumPy


def _empty(count: int) -> "array[int]":
    return array("q", (0,)) * count

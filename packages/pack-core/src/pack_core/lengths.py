"""Lengths in tokens, read from whatever holds integers, without importing NumPy or torch."""

import operator
import reprlib
from array import array
from collections.abc import Iterable, Mapping, Sequence, Set
from importlib.util import find_spec
from typing import SupportsIndex

from pack_core.errors import LengthError, PackError

#: What `as_lengths` reads: any ordered, flat collection of integers.
Lengths = Iterable[SupportsIndex]

LARGEST = 2**63 - 1
_LONG = 2_048
_INTEGER_FORMATS = frozenset("bBhHiIlLqQnN")
_UNORDERED_OR_TEXT = (str, bytes, bytearray, Mapping, Set)


def as_lengths(values: Lengths, *, ids: Sequence[str | int] | None = None) -> "array[int]":
    """Return the lengths as 64-bit integers, one a sample, in the order given.

    Reads lists, tuples, ranges and iterators of integers, `array.array`, `memoryview`, NumPy arrays, torch tensors and
    Arrow columns of any integer width, and lists of their 0-d elements. Widths never overflow.

    Args:
        values: tokens of each sample, `[samples]`, each at least 1.
        ids: names of the samples for error messages, `[samples]`.

    Raises:
        LengthError: a length is no whole number (floats and booleans are none), is below 1, or does not fit; the
            position is named. Also for anything that is not one flat, ordered row of integers.

    >>> from array import array
    >>> as_lengths(array("B", [200, 200]))
    array('q', [200, 200])
    """
    row = _by_numpy(values, ids)
    return array("q", read_lengths(values, ids=ids)) if row is None else row


def read_lengths(values: Lengths, *, ids: Sequence[str | int] | None = None) -> list[int]:
    """Return the lengths as `as_lengths` does, but as a list: the one given where that holds plain integers.

    Raises:
        LengthError: as `as_lengths`.

    >>> read_lengths([200, 200])
    [200, 200]
    """
    return read_with_longest(values, ids)[0]


def read_with_longest(values: Lengths, ids: Sequence[str | int] | None) -> tuple[list[int], int]:
    """Return the lengths as `read_lengths` does, and the longest of them, 0 where there is none.

    >>> read_with_longest([200, 300], None)
    ([200, 300], 300)
    """
    if isinstance(values, _UNORDERED_OR_TEXT):
        raise LengthError(f"lengths are a {type(values).__name__}; give a list or array of integers, one a sample")
    if isinstance(values, (array, memoryview)) and _is_flat_integers(values):
        whole: list[int] = values.tolist()  # integers that are made once are checked and counted sooner
    else:
        whole = _whole_numbers(_listed(values), ids)
    if ids is not None and len(ids) != len(whole):
        raise LengthError(f"{len(whole):,} lengths but {len(ids):,} ids were given; there must be one id a length")
    return whole, _checked_longest(whole, ids)


def as_integer(value: object, name: str, *, least: int = 1) -> int:
    """Return `value` as a Python int, whatever integer type it has.

    Raises:
        PackError: it is no whole number, or is below `least`.

    >>> as_integer(7, "capacity")
    7
    """
    whole = _whole(value)
    if whole is None:
        raise PackError(
            f"{name} is {reprlib.repr(value)} ({type(value).__name__}); it must be a whole number of at least {least}"
        )
    if whole < least:
        raise PackError(f"{name} is {whole:,}; it must be at least {least}")
    return whole


def as_identity(value: object, name: str) -> str | int:
    """Return an id or group as a plain `str` or `int`.

    Raises:
        PackError: it is neither, or an integer that 64 bits do not hold.

    >>> as_identity("q17/3", "id")
    'q17/3'
    """
    if isinstance(value, str):
        return str(value)
    whole = _whole(value)
    if whole is None:
        raise PackError(f"{name} is {reprlib.repr(value)} ({type(value).__name__}); give a str or an int")
    if not -(2**63) <= whole < 2**64:
        raise PackError(f"{name} is {whole}, which does not fit 64 bits; give a smaller int or a str")
    return whole


def check_fit(lengths: Sequence[int], capacity: int, ids: Sequence[str | int] | None = None) -> None:
    """Check that every sample fits into one pack alone.

    Raises:
        LengthError: one does not; the first is named with its length and the limit.

    >>> check_fit([300, 200], capacity=300)
    """
    if not lengths or max(lengths) <= capacity:
        return
    position = next(p for p, length in enumerate(lengths) if length > capacity)
    raise LengthError(
        f"{label(position, ids)} has {lengths[position]:,} tokens but capacity (packing_max_tokens) is {capacity:,}; "
        f"raise packing_max_tokens to {lengths[position]:,} or more, or drop the sample"
    )


def label(position: int, ids: Sequence[str | int] | None) -> str:
    """Return how an error names the sample at a position.

    >>> label(3, None), label(3, ["a", "b", "c", "d"])
    ('the sample at position 3', "sample 'd' (position 3)")
    """
    return f"the sample at position {position}" if ids is None else f"sample {ids[position]!r} (position {position})"


def _is_flat_integers(values: "array[int] | memoryview") -> bool:
    if isinstance(values, array):
        return values.typecode in _INTEGER_FORMATS
    return values.ndim == 1 and values.format in _INTEGER_FORMATS


def _by_numpy(values: object, ids: Sequence[str | int] | None) -> "array[int] | None":
    """Return the lengths of a long row without a Python int for each, or None: it is short, or there is no NumPy."""
    if isinstance(values, (list, tuple, range)) or operator.length_hint(values) < _LONG:
        return None
    if find_spec("numpy") is None:
        return None
    from pack_core.kernels.packing_numpy import row_of, whole

    found = row_of(values, ids)
    return None if found is None else whole(found[0])


def _listed(values: object) -> list[object]:
    tolist = getattr(values, "tolist", getattr(values, "to_pylist", None))
    listed = tolist() if callable(tolist) else values
    if not isinstance(listed, Iterable):
        raise LengthError(f"lengths are one {type(values).__name__}; give a list or array of integers, one a sample")
    return listed if isinstance(listed, list) else list(listed)


def _whole_numbers(listed: list[object], ids: Sequence[str | int] | None) -> list[int]:
    if set(map(type, listed)) <= {int}:
        return listed  # type: ignore[return-value]  # every type was just looked at, at the speed of C
    whole = []
    for position, value in enumerate(listed):
        number = _whole(value)
        if number is None:
            raise LengthError(
                f"{_where(position, ids, len(listed))} has length {reprlib.repr(value)} ({type(value).__name__}); "
                "a length is one whole number of tokens"
            )
        whole.append(number)
    return whole


def _whole(value: object) -> int | None:
    if type(value) is int:
        return value
    # A 0-d array says what it holds by `tolist` only: torch lets a boolean tensor pass for an index.
    tolist = getattr(value, "tolist", None)
    held = tolist() if callable(tolist) else value
    if isinstance(held, bool):
        return None
    try:
        return operator.index(held)  # type: ignore[arg-type]  # whether it can be asked is the question
    except TypeError:
        return None


def _checked_longest(whole: Sequence[int], ids: Sequence[str | int] | None) -> int:
    if not whole:
        return 0
    distinct = set(whole)  # few as a rule, so that their least and longest are found sooner
    if min(distinct) < 1:
        position = next(p for p, length in enumerate(whole) if length < 1)
        raise LengthError(
            f"{label(position, ids)} has length {whole[position]}; a sample has at least 1 token, drop it otherwise"
        )
    longest = max(distinct)
    if longest * len(whole) > LARGEST < sum(whole):
        position = max(range(len(whole)), key=lambda p: whole[p])
        raise LengthError(
            f"the lengths sum to more than {LARGEST:,} tokens ({label(position, ids)} has {whole[position]:,}); "
            "check how they were computed"
        )
    return longest


def _where(position: int, ids: Sequence[str | int] | None, count: int) -> str:
    # The ids may be too few here: they are compared with the lengths only once those are known to be lengths.
    return label(position, ids if ids is not None and len(ids) == count else None)

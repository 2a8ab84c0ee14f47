"""Counting expert ids in plain Python, with the loops of C that `bytes`, `int` and `Counter` hold."""

import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from operator import add, or_, sub

_TYPECODES = {(1, True): "b", (2, True): "h", (4, True): "i", (8, True): "q"}
_TYPECODES |= {(size, False): code.upper() for (size, _), code in _TYPECODES.items()}
_UNKNOWN = 0x80
_VALUES = bytes(range(256))


def count(
    ids: memoryview, shape: tuple[int, int, int], selected: Sequence[int], owners: Sequence[int], places: int
) -> "array[int] | None":
    """Return how many ids of each selected layer go to each place, or None when one of them is no expert.

    Up to 256 experts, or 128 places, every id becomes one byte, its place, and bytes are counted by the bits they are
    made of (see `_by_planes`); others are counted by `Counter`.

    Args:
        ids: `[rows, layers, top_k]`, row-major, flat or not, of a native integer format.
        shape: those three, rows at least 1.
        selected: layers to count.
        owners: place of each expert, `[experts]`.
        places: how many there are.

    Returns:
        `[len(selected), places]` flat, int32.

    >>> count(memoryview(bytes([0, 1, 3, 1])), (2, 1, 2), [0], [0, 0, 1, 1], 2)
    array('i', [3, 1])
    """
    raw, size = ids.tobytes(), ids.itemsize
    signed = (ids.format or "B")[-1].islower()
    if len(owners) > 1 << 15 or places > (256 if len(owners) <= 256 else 128):
        return _count_wide(array(_TYPECODES[size, signed], raw), shape, selected, owners, places)
    # Nothing above the largest positive number of a signed type is an expert: those are its negative ones.
    tables = _tables(owners[:128] if signed and size == 1 else owners)
    counts = array("i")
    for layer in selected:
        of_layer = _places(raw, size, layer, shape, tables)
        if of_layer is None:
            return None
        counts.extend(_histogram(of_layer, places))
    return counts


def fold(counts: "array[int]", owners: Sequence[int], places: int) -> "array[int]":
    """Return `[rows, experts]` counts added up over the experts of each place, `[rows, places]`, both flat.

    >>> fold(array("i", [1, 2, 3, 4]), [0, 1], 3)
    array('i', [1, 2, 0, 3, 4, 0])
    """
    experts = len(owners)
    folded = array("i", bytes(4 * (len(counts) // experts * places)))
    for expert, place in enumerate(owners):
        folded[place::places] = array("i", map(add, folded[place::places], counts[expert::experts]))
    return folded


def columns(counts: "array[int]", row: int) -> tuple[list[int], list[int]]:
    """Return the sum and the largest of every column of `[samples, row]` counts.

    >>> columns(array("i", [3, 1, 0, 4]), 2)
    ([3, 5], [3, 4])
    """
    held = [counts[column::row] for column in range(row)]
    return [sum(column) for column in held], [max(column) for column in held]


def _count_wide(
    ids: "array[int]", shape: tuple[int, int, int], selected: Sequence[int], owners: Sequence[int], places: int
) -> "array[int] | None":
    _, layers, top_k = shape
    counts = array("i", bytes(4 * len(selected) * places))
    for place, layer in enumerate(selected):
        found: Counter[int] = Counter()
        for start in range(layer * top_k, (layer + 1) * top_k):
            found.update(ids[start :: layers * top_k])
        if min(found) < 0 or max(found) >= len(owners):
            return None
        for expert, times in found.items():
            counts[place * places + owners[expert]] += times
    return counts


def _tables(owners: Sequence[int]) -> list[bytes]:
    """Return, for each value of an id's second byte, the places that the values of its lowest byte go to.

    One table holds experts alone, so that its size says which values are none; several are padded.
    """
    tables = [bytes(owners[start : start + 256]) for start in range(0, len(owners), 256)]
    return tables if len(tables) == 1 else [table.ljust(256, bytes([_UNKNOWN])) for table in tables]


def _places(raw: bytes, size: int, layer: int, shape: tuple[int, int, int], tables: list[bytes]) -> bytes | None:
    """Return the place that each id of a layer goes to, one a byte, in any order; None when an id is no expert."""
    rows, layers, top_k = shape
    step = layers * top_k * size
    order = range(size) if sys.byteorder == "little" else range(size - 1, -1, -1)

    def column(byte: int) -> bytes:
        starts = range(layer * top_k * size + byte, (layer + 1) * top_k * size, size)
        return b"".join([raw[start::step] for start in starts])

    lowest, *above = (column(byte) for byte in order)
    if any(of_byte.count(0) != rows * top_k for of_byte in above[len(tables) > 1 :]):
        return None
    if len(tables) == 1:
        unknown = lowest.translate(None, _VALUES[: len(tables[0])])
        return None if unknown else lowest.translate(tables[0].ljust(256))
    joined = _by_two_bytes(lowest, above[0] if above else bytes(rows * top_k), tables)
    return joined if joined.isascii() else None


def _by_two_bytes(lowest: bytes, above: bytes, tables: list[bytes]) -> bytes:
    """Return the places of ids of two bytes: where the upper byte is h, table h says where the lower one goes."""
    size = len(lowest)
    parts = []
    for high, table in enumerate(tables):
        here = bytes(255 * (value == high) for value in range(256))
        parts.append(_number(lowest.translate(table)) & _number(above.translate(here)))
    parts.append(_number(above.translate(bytes(_UNKNOWN * (value >= len(tables)) for value in range(256)))))
    return reduce(or_, parts).to_bytes(size, "little")


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _histogram(data: bytes, values: int) -> list[int]:
    """Return how often each value below `values` occurs in `data`, which holds no others."""
    bits = max(values - 1, 1).bit_length()
    if len(data) < max(512, 1 << 2 * bits - 2):
        found = Counter(data)
        return [found[value] for value in range(values)]
    if bits < 8:
        return _by_planes(data, bits)[:values]
    quarters = [_VALUES[start : start + 64] for start in range(0, 256, 64)]
    parts = [data.translate(_VALUES[:64] * 4, _VALUES.replace(quarter, b"")) for quarter in quarters]
    return [times for part in parts for times in _by_planes(part, 6)][:values]


def _by_planes(data: bytes, bits: int) -> list[int]:
    """Return how often each value below `2**bits` occurs.

    One long integer per bit of the values holds that bit of all of them. The bits set in the AND of a set of such
    integers count the values that contain the set; subtracting supersets, bit by bit, leaves those that equal it.
    """
    padding = -len(data) % 8
    size = (len(data) + padding) // 8
    planes = _planes(data + bytes(padding), size)
    meets = [(1 << 8 * size) - 1]
    for plane in planes[:bits]:
        meets += [meet & plane for meet in meets]
    found = [meet.bit_count() for meet in meets]
    for _ in range(bits):
        without, having = found[::2], found[1::2]
        found = [*map(sub, without, having), *having]
    found[0] -= padding
    return found


def _planes(data: bytes, size: int) -> list[int]:
    """Return bit b of all bytes as integer b, by transposing 8 by 8 bits across eight parts of `size` bytes."""
    planes = [_number(data[start : start + size]) for start in range(0, 8 * size, size)]
    for shift, pattern in ((4, 0x0F), (2, 0x33), (1, 0x55)):
        mask = _number(bytes([pattern]) * size)
        for low in range(8):
            if not low & shift:
                high = low + shift
                swapped = ((planes[low] >> shift) ^ planes[high]) & mask
                planes[high] ^= swapped
                planes[low] ^= swapped << shift
    return planes

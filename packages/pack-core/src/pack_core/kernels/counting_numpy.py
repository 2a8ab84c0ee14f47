"""Counting expert ids with NumPy; imported only when these kernels are chosen."""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

#: Ids at a time: their 64-bit copies stay in a core's cache.
_AT_ONCE = 1 << 16


def count(
    ids: memoryview, shape: tuple[int, int, int], selected: Sequence[int], owners: Sequence[int], places: int
) -> "array[int] | None":
    """Return how many ids of each selected layer go to each place, or None when one of them is no expert.

    As `pack_core.kernels.counting_python.count`: each layer's ids are moved to a range of their own, so that one
    `bincount` over some rows counts all layers; experts are folded to places at the end.

    >>> count(memoryview(bytes([0, 1, 3, 1])), (2, 1, 2), [0], [0, 0, 1, 1], 2)
    array('i', [3, 1])
    """
    rows, _, top_k = shape
    experts, chosen = len(owners), np.asarray(selected, dtype=np.intp)
    routes = np.asarray(ids).reshape(shape)
    counts = np.zeros(len(chosen) * experts, dtype=np.int64)
    offsets = (np.arange(len(chosen)) * experts)[None, :, None]
    at_once = max(1, _AT_ONCE // (len(chosen) * top_k))
    for start in range(0, rows, at_once):
        # A copy, 64 bits wide, of the selected layers alone.
        copied = routes[start : start + at_once].take(chosen, axis=1).astype(np.int64)
        # Read as unsigned a negative id is a huge one, so that one maximum checks both ends.
        if copied.view(np.uint64).max() >= experts:
            return None
        copied += offsets
        counts += np.bincount(copied.reshape(-1), minlength=len(counts))
    return _as_array(_folded(counts.reshape(-1, experts), owners, places))


def fold(counts: "array[int]", owners: Sequence[int], places: int) -> "array[int]":
    """Return `[rows, experts]` counts added up over the experts of each place, `[rows, places]`, both flat.

    >>> fold(array("i", [1, 2, 3, 4]), [0, 1], 3)
    array('i', [1, 2, 0, 3, 4, 0])
    """
    return _as_array(_folded(np.asarray(counts).reshape(-1, len(owners)), owners, places))


def columns(counts: "array[int]", row: int) -> tuple[list[int], list[int]]:
    """Return the sum and the largest of every column of `[samples, row]` counts.

    >>> columns(array("i", [3, 1, 0, 4]), 2)
    ([3, 5], [3, 4])
    """
    table = np.asarray(counts).reshape(-1, row)
    return table.sum(axis=0, dtype=np.int64).tolist(), table.max(axis=0).tolist()


def _folded(counts: NDArray[np.signedinteger], owners: Sequence[int], places: int) -> NDArray[np.signedinteger]:
    if tuple(owners) == tuple(range(places)):
        return counts
    table = np.asarray(owners)
    order = np.argsort(table, kind="stable")
    present, starts = np.unique(table[order], return_index=True)
    folded = np.zeros((len(counts), places), dtype=counts.dtype)
    folded[:, present] = np.add.reduceat(counts[:, order], starts, axis=1)
    return folded


def _as_array(counts: NDArray[np.signedinteger]) -> "array[int]":
    flat = array("i")
    flat.frombytes(counts.astype(np.intc).tobytes())
    return flat

"""The number crunching, twice: in plain Python, which is always there, and with NumPy, which is faster."""

from array import array
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Protocol, cast

from pack_core.errors import PackError


class Counting(Protocol):
    """What counts expert ids; `pack_core.kernels.counting_python` says what each function does."""

    def count(
        self, ids: memoryview, shape: tuple[int, int, int], selected: Sequence[int], owners: Sequence[int], places: int
    ) -> "array[int] | None":
        """Return the counts of one sample, `[len(selected), places]` flat, or None when an id is no expert."""

    def fold(self, counts: "array[int]", owners: Sequence[int], places: int) -> "array[int]":
        """Return `[rows, experts]` counts added up over the experts of each place."""

    def columns(self, counts: "array[int]", row: int) -> tuple[list[int], list[int]]:
        """Return the sum and the largest of every column of `[samples, row]` counts."""


def choose_kernels(name: str | None) -> str:
    """Return the kernels to use: the ones named, or by default NumPy's where it is installed.

    Raises:
        PackError: there are none of that name, or NumPy is named but not installed.

    >>> choose_kernels("python")
    'python'
    """
    if name not in (None, "python", "numpy"):
        raise PackError(f"kernels are {name!r}; use 'python', 'numpy', or None for the faster of those there")
    installed = name != "python" and find_spec("numpy") is not None
    if name == "numpy" and not installed:
        raise PackError("kernels are 'numpy' but NumPy is not installed; install it (pack-core[numpy]) or use 'python'")
    return "numpy" if installed else "python"


def counting(name: str | None = None) -> Counting:
    """Return the functions that count expert ids, by the name of the kernels.

    >>> counting("python").count(memoryview(bytes([0, 2])), (1, 1, 2), [0], [0, 1, 2], 3)
    array('i', [1, 0, 1])
    """
    if choose_kernels(name) == "numpy":
        from pack_core.kernels import counting_numpy

        return cast(Counting, counting_numpy)
    from pack_core.kernels import counting_python

    return cast(Counting, counting_python)


def column_figures(counts: "array[int]", row: int, kernels: str | None = None) -> tuple[list[int], list[int]]:
    """Return the sum and the largest of every column of `[samples, row]` counts.

    >>> column_figures(array("i", [3, 1, 0, 4]), 2, "python")
    ([3, 5], [3, 4])
    """
    return counting(kernels).columns(counts, row)

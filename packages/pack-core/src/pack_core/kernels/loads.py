"""What the number crunching of the search must offer, whatever it is written in."""

from array import array
from collections.abc import Sequence
from typing import Protocol

import attrs

from pack_core.kernels import choose_kernels
from pack_core.search.construct import Growth
from pack_core.search.layout import Change, Layout

#: The estimate of a swap that cannot be: above every real one.
FAR = 2**62

_SCALE = 2**56


@attrs.frozen
class Weights:
    """What one unit of expert, token and pair work is worth, as integers, so that every kernel ranks alike."""

    expert: int
    token: int
    pair: int

    @classmethod
    def of(cls, expert: int, token: int, pair: int) -> "Weights":
        """Return the weights that make each work of arrival order worth the same; 0 where there is none.

        >>> Weights.of(0, 2**50, 2**55)
        Weights(expert=0, token=64, pair=2)
        """
        return cls(*(_SCALE // work if work else 0 for work in (expert, token, pair)))


@attrs.frozen
class Figures:
    """Of every dispatch, the sums over layers of its largest load and of all its loads; and the largest load of all."""

    peaks: Sequence[int]
    totals: Sequence[int]
    largest: int


class Loads(Protocol):
    """The expert loads of one layout; see `PythonLoads`, which says what each method means."""

    @property
    def work(self) -> int:
        """Expert work."""
        ...

    def score(self, swaps: Sequence[Sequence[Change]]) -> list[int]:
        """Return the expert work each of the swaps would give, alone."""
        ...

    def apply(self, changes: Sequence[Change]) -> None:
        """Carry out the changes of one swap."""
        ...

    def figures(self) -> Figures:
        """Return the sums and the largest load that the guard needs."""
        ...

    def loads_of(self, pack: int, changes: Sequence[Change] = ()) -> list[list[int]]:
        """Return a pack's loads, `[layers][replicas * destinations]`, after some changes if any."""
        ...

    def screen(
        self, layout: Layout, donors: Sequence[int], near: Sequence[Sequence[int]], weights: Weights
    ) -> list[tuple[int, int]]:
        """Return the best partner of each donor, of all samples and of those near its length."""
        ...


class Kernel(Protocol):
    """The counts of one optimizer step, and what is computed from them."""

    def loads(self, layout: Layout) -> Loads:
        """Return the loads of a layout."""
        ...

    def growth(self, replicas: int) -> Growth:
        """Return empty replicas to deal samples to."""
        ...


def kernel_of(counts: "array[int]", samples: int, destinations: int, kernels: str | None) -> Kernel:
    """Return the kernel over counts `[samples, layers, destinations]`, flat."""
    if choose_kernels(kernels) == "numpy":
        from pack_core.kernels import loads_numpy

        return loads_numpy.NumpyKernel(counts, samples, destinations)
    from pack_core.kernels import loads_python

    return loads_python.PythonKernel(counts, samples, destinations)

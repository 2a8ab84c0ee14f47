"""What the number crunching of packing must offer, whatever it is written in."""

from array import array
from collections.abc import Sequence
from typing import Protocol, cast

import attrs

from pack_core.kernels import choose_kernels
from pack_core.lengths import Lengths

#: Fewer documents than this are packed sooner in plain Python than NumPy takes to be called.
FEW = 2_048


@attrs.frozen
class Counts:
    """Documents by what they take: `sizes` strictly falling, and how many documents take each.

    >>> Counts([5, 2], [1, 3]).documents
    4
    """

    sizes: list[int]
    counts: list[int]

    @property
    def documents(self) -> int:
        """Number of documents."""
        return sum(self.counts)


@attrs.frozen
class Steps:
    """How documents ranked longest first go into packs, whole groups at once.

    Attributes:
        rows: `[steps, 4]`, flat. A row `(first, packs, each, held)` hands the next `packs * each` documents out, `each`
            to every pack from `first` on, which hold `held` documents so far.
        packs: packs in all.

    >>> Steps([0, 2, 1, 0, 0, 1, 1, 1], packs=2).packs  # one document to each of two packs, then one more to the first
    2
    """

    rows: list[int]
    packs: int


@attrs.frozen
class Pieces:
    """What goes into packs: whole documents, or pieces of them.

    Attributes:
        tokens: tokens of each piece, `[pieces]`.
        documents: whose it is, `[pieces]`; None where piece i is of document i.
        starts: its first token in the document, `[pieces]`; None where all are 0.
    """

    tokens: Sequence[int]
    documents: Sequence[int] | None = None
    starts: Sequence[int] | None = None


class Kernel(Protocol):
    """The functions, over rows of whatever type the kernel reads; `packing_python` gives an example of each."""

    def read(self, lengths: Lengths, ids: Sequence[str | int] | None) -> tuple[Sequence[int], int]:
        """Return the lengths as a row that was checked, and the longest of them, 0 where there is none."""

    def whole(self, tokens: Sequence[int]) -> "array[int]":
        """Return a row as 64-bit integers."""

    def rises(self, row: "array[int]") -> bool:
        """Return whether each value is more than the one before."""

    def rounded(self, tokens: Sequence[int], align: int) -> Sequence[int]:
        """Return how many steps of `align` tokens each takes."""

    def totals(self, sizes: Sequence[int]) -> list[int]:
        """Return 0 and the running totals."""

    def listed(self, sizes: Sequence[int]) -> Sequence[int]:
        """Return what a loop reads fastest."""

    def over(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        """Return the places of those over the limit."""

    def without(self, tokens: Sequence[int], places: Sequence[int]) -> Pieces:
        """Return all documents but these."""

    def clipped(self, tokens: Sequence[int], limit: int) -> Pieces:
        """Return the documents, none over the limit."""

    def cut(self, tokens: Sequence[int], limit: int) -> Pieces:
        """Return the documents, those over the limit in pieces of that many tokens and a rest."""

    def take(self, values: Sequence[int], places: Sequence[int]) -> "array[int]":
        """Return the values at some places."""

    def partial(
        self, pieces: Pieces, tokens: Sequence[int], order: "array[int]"
    ) -> "tuple[array[int], array[int], array[int]]":
        """Return the places in an order of what is no whole document, and where each of these starts and stops."""

    def group(self, sizes: Sequence[int]) -> tuple[Counts, Sequence[int]]:
        """Return the documents counted by size, and ranked by it, longest first, in arrival order on ties."""

    def count(self, sizes: Sequence[int]) -> Counts:
        """Return the documents counted by size."""

    def lay(self, ranked: Sequence[int], steps: Steps) -> "tuple[array[int], array[int]]":
        """Return the order and offsets that the steps give."""

    def offsets_of(self, owners: Sequence[int], packs: int) -> "tuple[array[int], array[int]]":
        """Return the order and offsets of documents whose pack is known; arrival order inside a pack."""


def packing_kernel(name: str | None, documents: int | None = None) -> Kernel:
    """Return the kernel of that name; None takes NumPy where it is installed and there are documents enough for it."""
    if name is None and documents is not None and documents < FEW:
        name = "python"
    if choose_kernels(name) == "numpy":
        from pack_core.kernels import packing_numpy

        return cast(Kernel, packing_numpy)
    from pack_core.kernels import packing_python

    return cast(Kernel, packing_python)

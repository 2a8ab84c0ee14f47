"""Samples in packs: of one row of samples, and of every rank in one optimizer step."""

from array import array
from collections.abc import Iterator
from itertools import pairwise

import attrs

from pack_core.errors import PackError

_SHOWN_SAMPLES = 24


@attrs.frozen(repr=False)
class Packing:
    """Packs over n samples, compressed as `cu_seqlens` is: two flat rows of integers, whatever the number of packs.

    Pack p holds the samples `order[offsets[p]:offsets[p + 1]]`. `len()` is the number of packs; `packing[p]` and
    iteration give lists of sample indices.

    Attributes:
        order: indices of samples, `[n]`, int64.
        offsets: where each pack starts, `[packs + 1]`, int64; starts at 0, strictly increases, ends at n.

    Raises:
        PackError: the offsets do not cut `order` into packs that hold something.

    >>> packing = Packing(array("q", [0, 1, 2, 3]), array("q", [0, 3, 4]))
    >>> len(packing), packing[0], list(packing)
    (2, [0, 1, 2], [[0, 1, 2], [3]])
    >>> packing
    Packing([[0, 1, 2], [3]])
    """

    order: "array[int]"
    offsets: "array[int]"

    def __attrs_post_init__(self) -> None:
        """Refuse offsets that leave a sample out or a pack empty."""
        offsets = self.offsets
        if not offsets or offsets[0] != 0 or offsets[-1] != len(self.order):
            ends = f"{offsets[0]} to {offsets[-1]}" if offsets else "nothing"
            raise PackError(f"offsets span {ends}; they must span 0 to {len(self.order)}, the number of samples")
        for p, (start, stop) in enumerate(pairwise(offsets)):
            if start >= stop:
                raise PackError(f"pack {p} spans {start} to {stop}; every pack must hold at least one sample")

    def __len__(self) -> int:
        """Return the number of packs."""
        return len(self.offsets) - 1

    def __getitem__(self, p: int) -> list[int]:
        """Return the sample indices of pack p; negative p counts from the end, as in a list."""
        place = p + len(self) if p < 0 else p
        if not 0 <= place < len(self):
            raise IndexError(f"pack {p} does not exist; there are {len(self)} packs")
        return self.order[self.offsets[place] : self.offsets[place + 1]].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the sample indices of each pack."""
        for start, stop in pairwise(self.offsets):
            yield self.order[start:stop].tolist()

    def __repr__(self) -> str:
        """Show the packs, or only their number when they are many."""
        if len(self.order) > _SHOWN_SAMPLES:
            return f"<Packing of {len(self.order):,} samples in {len(self):,} packs>"
        return f"Packing({list(self)})"


@attrs.frozen
class Schedule:
    """The packs of one optimizer step: `packs[rank][p]` is a tuple of indices into the planned samples.

    >>> step = Schedule((((0, 2), (4,)), ((1,), (3, 5))))
    >>> step.packs_per_rank, step.packs[1][0]
    (2, (1,))
    """

    packs: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def packs_per_rank(self) -> int:
        """Number of forwards of this step on every rank."""
        return max(map(len, self.packs), default=0)

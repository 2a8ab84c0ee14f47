"""Samples in packs: of one row of samples, and of every rank in one optimizer step."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise

import attrs

from pack_core.errors import PackError
from pack_core.kernels.packing import packing_kernel

_SHOWN_SAMPLES = 24


@attrs.frozen
class Lost:
    """Tokens that are in no pack, by document.

    Attributes:
        documents: indices, rising, `[lost]`, int64.
        tokens: how many of each, `[lost]`, int64.

    >>> Lost(array("q", [3]), array("q", [120])).total
    120
    """

    documents: "array[int]" = attrs.field(factory=lambda: array("q"))
    tokens: "array[int]" = attrs.field(factory=lambda: array("q"))

    def __attrs_post_init__(self) -> None:
        """Refuse a document without its tokens."""
        if len(self.documents) != len(self.tokens):
            raise PackError(f"{len(self.documents):,} documents but {len(self.tokens):,} counts of tokens were given")

    @property
    def total(self) -> int:
        """Tokens in all."""
        return sum(self.tokens)

    def __len__(self) -> int:
        """Return the number of documents that lost tokens."""
        return len(self.documents)


@attrs.frozen
class Parts:
    """What in an order is not a whole document: tokens `starts[i]` up to `stops[i]` of `order[places[i]]`.

    Attributes:
        places: rising, `[parts]`, int64.
        starts: `[parts]`, int64.
        stops: `[parts]`, int64.

    >>> len(Parts(array("q", [0]), array("q", [0]), array("q", [100])))
    1
    """

    places: "array[int]" = attrs.field(factory=lambda: array("q"))
    starts: "array[int]" = attrs.field(factory=lambda: array("q"))
    stops: "array[int]" = attrs.field(factory=lambda: array("q"))

    def __attrs_post_init__(self) -> None:
        """Refuse a place without where its part starts and stops."""
        if not len(self.places) == len(self.starts) == len(self.stops):
            given = f"{len(self.places):,} places, {len(self.starts):,} starts and {len(self.stops):,} stops"
            raise PackError(f"{given} were given; there must be one of each a part")

    def __len__(self) -> int:
        """Return the number of parts."""
        return len(self.places)


@attrs.frozen(repr=False)
class Packing:
    """Packs over n documents, compressed as `cu_seqlens` is: two flat rows of integers, whatever the number of packs.

    Pack p holds the documents `order[offsets[p]:offsets[p + 1]]`. `len()` is the number of packs; `packing[p]` and
    iteration give lists of indices. What an overlong document lost or was cut into is in three short tables.

    Attributes:
        order: indices of documents, `[n]`, int64; of a document that was split, once for each part.
        offsets: where each pack starts, `[packs + 1]`, int64; starts at 0, strictly increases, ends at n.
        dropped: the documents in no pack, with all their tokens.
        truncated: the documents that were cut short, with the tokens past the cut.
        parts: the places in `order` that hold no whole document, those cut short among them.

    Raises:
        PackError: the offsets do not cut `order` into packs that hold something, or a part has no place there.

    >>> packing = Packing(array("q", [0, 1, 2, 3]), array("q", [0, 3, 4]))
    >>> len(packing), packing[0], list(packing)
    (2, [0, 1, 2], [[0, 1, 2], [3]])
    >>> packing
    Packing([[0, 1, 2], [3]])
    """

    order: "array[int]"
    offsets: "array[int]"
    dropped: Lost = attrs.field(factory=Lost, kw_only=True)
    truncated: Lost = attrs.field(factory=Lost, kw_only=True)
    parts: Parts = attrs.field(factory=Parts, kw_only=True)

    def __attrs_post_init__(self) -> None:
        """Refuse offsets that leave a document out or a pack empty."""
        offsets = self.offsets
        if not offsets or offsets[0] != 0 or offsets[-1] != len(self.order):
            ends = f"{offsets[0]} to {offsets[-1]}" if offsets else "nothing"
            raise PackError(f"offsets span {ends}; they must span 0 to {len(self.order)}, the number of samples")
        if not packing_kernel(None, len(offsets)).rises(offsets):
            p = next(p for p, (start, stop) in enumerate(pairwise(offsets)) if start >= stop)
            raise PackError(
                f"pack {p} spans {offsets[p]} to {offsets[p + 1]}; every pack must hold at least one sample"
            )
        if self.parts.places and (
            not packing_kernel(None, len(self.parts)).rises(self.parts.places)
            or self.parts.places[0] < 0
            or self.parts.places[-1] >= len(self.order)
        ):
            raise PackError(f"parts must lie at rising places from 0 to {len(self.order) - 1} of the order")

    @property
    def split(self) -> "array[int]":
        """The documents that were cut into parts without losing any, rising."""
        return array("q", sorted({self.order[place] for place in self.parts.places} - {*self.truncated.documents}))

    def sizes(self, tokens: Sequence[int]) -> "array[int]":
        """Return the tokens at each place of the order, `[n]`, given the tokens of each document.

        >>> Packing(array("q", [1, 0]), array("q", [0, 2])).sizes([3, 5])
        array('q', [5, 3])
        """
        sizes = array("q", map(tokens.__getitem__, self.order))
        for place, start, stop in zip(self.parts.places, self.parts.starts, self.parts.stops, strict=True):
            sizes[place] = stop - start
        return sizes

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

"""How far a packing is from what no packing can beat, and where its room went."""

from array import array
from collections import deque
from itertools import accumulate, pairwise, repeat

import attrs

from pack_core.bounding import Floors, floors
from pack_core.errors import PackError
from pack_core.kernels.packing import packing_kernel
from pack_core.lengths import Lengths, as_integer
from pack_core.types import Packing


@attrs.frozen
class Waste:
    """Room of the packs that holds no token, in tokens, by cause; the causes add up to all of it.

    Attributes:
        alignment: documents rounded up to the alignment.
        remainder: the end of each pack that is no whole step of the alignment.
        unavoidable: what is left when the documents fill as few packs as the lower bound says.
        packs: the room of the packs over the lower bound; a better packing may save it, or none may.
    """

    alignment: int
    remainder: int
    unavoidable: int
    packs: int

    @property
    def total(self) -> int:
        """Tokens of room in all that hold nothing."""
        return self.alignment + self.remainder + self.unavoidable + self.packs


@attrs.frozen
class Certificate:
    """What a packing achieved, beside what is possible with its documents and parts.

    Attributes:
        packs: packs it has.
        floors: lower bounds on that.
        tokens: tokens they hold.
        room: tokens they could hold.
        waste: where the difference went.
        dropped: tokens of documents in no pack.
        truncated: tokens cut off the ends of documents.

    >>> from pack_core import certify, pack
    >>> found = certify(pack([6, 6, 6], capacity=10), [6, 6, 6], capacity=10)  # 18 tokens, and no two fit together
    >>> found.packs, found.floors.continuous, found.over, found.fill
    (3, 2, 0, 0.6)
    """

    packs: int
    floors: Floors
    tokens: int
    room: int
    waste: Waste
    dropped: int
    truncated: int

    @property
    def over(self) -> int:
        """Packs over the largest lower bound; 0 proves that no packing has fewer."""
        return self.packs - self.floors.packs

    @property
    def fill(self) -> float:
        """Share of the room that holds tokens; 1 where there are no packs."""
        return self.tokens / self.room if self.room else 1.0


def certify(
    packing: Packing,
    lengths: Lengths,
    *,
    capacity: int,
    max_documents: int | None = None,
    align: int = 1,
    kernels: str | None = None,
) -> Certificate:
    """Return how good a packing is, after checking that it keeps its promises.

    The lower bounds are over the documents and parts as they lie in the packs: they say nothing of cutting otherwise.

    Args:
        packing: from `pack`.
        lengths: tokens of each document, `[documents]`, those it was made from.
        capacity: most tokens a pack may hold.
        max_documents: most documents a pack may hold, or None.
        align: tokens every document's room is rounded up to a multiple of.
        kernels: `"python"` or `"numpy"`, with the same result; None takes NumPy where it is installed.

    Raises:
        PackError: a pack is over the capacity or `max_documents`, a document's tokens are not all there once or counted
            as dropped or truncated, or an argument is no whole number of at least 1.

    >>> from pack_core import pack
    >>> lengths = [6, 6, 4, 3, 3]
    >>> found = certify(pack(lengths, capacity=10), lengths, capacity=10)
    >>> found.packs, found.floors.packs, found.over, found.waste.total
    (3, 3, 0, 8)
    """
    capacity, align = as_integer(capacity, "capacity"), as_integer(align, "align")
    cap = None if max_documents is None else as_integer(max_documents, "max_documents")
    kernel = packing_kernel(kernels, len(packing.order))
    given = kernel.whole(kernel.read(lengths, None)[0])
    _check_places(packing, len(given))
    sizes = packing.sizes(given)
    _check_tokens(packing, given, sizes)
    units = kernel.whole(kernel.rounded(sizes, align)) if sizes else sizes
    _check_packs(packing, units, capacity // align, align, cap)
    tokens, rounded = sum(sizes), sum(units) * align
    usable = capacity // align * align
    packs = len(packing)
    found = floors(kernel.count(units), capacity // align, cap or len(units)) if sizes else Floors(0, 0, 0, 0, 0)
    waste = Waste(
        alignment=rounded - tokens,
        remainder=packs * (capacity - usable),
        unavoidable=found.packs * usable - rounded,
        packs=(packs - found.packs) * usable,
    )
    lost = packing.dropped.total, packing.truncated.total
    return Certificate(packs, found, tokens, packs * capacity, waste, *lost)


def _check_places(packing: Packing, documents: int) -> None:
    for name, row in (("order", packing.order), ("dropped", packing.dropped.documents)):
        if row and (min(row) < 0 or max(row) >= documents):
            raise PackError(
                f"{name} holds documents {min(row)} to {max(row)} but lengths are 0 to {documents - 1}; "
                "give the lengths the packing was made from"
            )


def _check_tokens(packing: Packing, given: "array[int]", sizes: "array[int]") -> None:
    """Check that each document's tokens lie in the packs, from its first to where it was cut off, none twice."""
    short = dict(zip(packing.truncated.documents, packing.truncated.tokens, strict=True))
    short |= dict(zip(packing.dropped.documents, packing.dropped.tokens, strict=True))
    pieces: dict[int, list[tuple[int, int]]] = {document: [] for document in short}
    parts = packing.parts
    for place, start, stop in zip(parts.places, parts.starts, parts.stops, strict=True):
        pieces.setdefault(packing.order[place], []).append((start, stop))
    for document, held in pieces.items():
        reached = 0
        for start, stop in sorted(held):
            if start != reached or stop <= start:
                raise PackError(f"document {document} has parts {sorted(held)}; they must follow one another from 0")
            reached = stop
        if reached + short.get(document, 0) != given[document]:
            raise PackError(
                f"document {document} has {given[document]:,} tokens: {reached:,} are in packs as parts and "
                f"{short.get(document, 0):,} are counted as lost"
            )
    cut = sum(map(pieces.__contains__, packing.order)) if pieces else 0
    if cut != len(parts):
        raise PackError(
            f"{cut:,} places hold documents that were cut or dropped, but {len(parts):,} are named as parts; "
            "a document lies in the packs whole or in parts, and not at all when it was dropped"
        )
    found = bytearray(len(given))
    deque(map(found.__setitem__, packing.order, repeat(1)), 0)
    whole = len(packing.order) - len(parts)
    kept = len(given) - len(pieces)
    if whole != kept or sum(found) != kept + sum(1 for held in pieces.values() if held):
        raise PackError(
            f"{kept:,} documents should lie whole in the packs, each once; {whole:,} places hold whole documents, "
            f"and {len(given) - sum(found):,} documents have none"
        )


def _check_packs(packing: Packing, units: "array[int]", capacity: int, align: int, most: int | None) -> None:
    totals = [0, *accumulate(units)]
    for p, (start, stop) in enumerate(pairwise(packing.offsets)):
        if totals[stop] - totals[start] > capacity:
            raise PackError(
                f"pack {p} takes {(totals[stop] - totals[start]) * align:,} tokens of room; "
                f"the capacity allows {capacity * align:,}"
            )
        if most is not None and stop - start > most:
            raise PackError(f"pack {p} holds {stop - start:,} documents; max_documents is {most:,}")

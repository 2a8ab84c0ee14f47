"""How many packs documents need at least, from their sizes alone."""

from itertools import accumulate

import attrs

from pack_core.kernels.packing import Counts

_FUNCTIONS = 24


@attrs.frozen
class Floors:
    """Lower bounds on the number of packs; none can be beaten, so neither can the largest.

    Attributes:
        continuous: all room filled, `ceil(sum / capacity)`.
        large: documents over half the capacity, no two of which share a pack.
        martello_toth: the bound L2 of Martello and Toth (1990): the large, and what the middling ones need beside them.
        fekete_schepers: the best of 24 of their functions (2001), which count in k-ths of a pack what is over
            one (k + 1)-th of it: of ten equal documents that fit by threes it knows that four packs are needed.
        documents: `ceil(documents / max_documents)`.

    >>> Floors(2, 1, 2, 3, 1).packs
    3
    """

    continuous: int
    large: int
    martello_toth: int
    fekete_schepers: int
    documents: int

    @property
    def packs(self) -> int:
        """The largest of them."""
        return max(self.continuous, self.large, self.martello_toth, self.fekete_schepers, self.documents)


def floors(counts: Counts, capacity: int, most: int) -> Floors:
    """Return the lower bounds for documents by size, none over the capacity.

    >>> floors(Counts([6, 4, 3], [2, 1, 2]), 10, 10)  # 22 in tens are 3; the two 6 are large
    Floors(continuous=3, large=2, martello_toth=3, fekete_schepers=3, documents=1)
    """
    pairs = list(zip(counts.sizes, counts.counts, strict=True))
    tokens = sum(size * amount for size, amount in pairs)
    large = sum(amount for size, amount in pairs if 2 * size > capacity)
    continuous, two = -(-tokens // capacity), _martello_toth(counts, capacity)
    dual = max(-(-_dual(pairs, capacity, k) // (k * capacity)) for k in range(1, _FUNCTIONS + 1))
    return Floors(continuous, large, two, dual, -(-counts.documents // most))


def _dual(pairs: list[tuple[int, int]], capacity: int, k: int) -> int:
    """Return the documents in units of which a pack holds `k * capacity`, by the k-th function.

    A size that is no whole number of (k + 1)-ths counts as so many k-ths as it has whole (k + 1)-ths. Those over a
    (k + 1)-th number at most k in a pack, so no pack counts for more than it holds.
    """
    whole = 0
    for size, amount in pairs:
        parts, over = divmod((k + 1) * size, capacity)
        whole += amount * (parts * capacity if over else k * size)
    return whole


def _martello_toth(counts: Counts, capacity: int) -> int:
    """Try every size up to half the capacity as the least that counts.

    With a least size of `small`, documents over `capacity - small` have a pack alone, the other large ones one each
    with some room left, and what the documents from `small` to half the capacity exceed that room by needs more packs.
    """
    sizes, amounts = counts.sizes, counts.counts
    many = [0, *accumulate(amounts)]
    tokens = [0, *accumulate(size * amount for size, amount in zip(sizes, amounts, strict=True))]
    halves = sum(2 * size > capacity for size in sizes)
    best = many[halves]
    alone = halves
    # From the largest small size down: fewer and fewer of the large documents are too large for company.
    for small in range(halves + 1, len(sizes) + 1):
        while alone and sizes[alone - 1] + sizes[small - 1] <= capacity:
            alone -= 1
        room = (many[halves] - many[alone]) * capacity - (tokens[halves] - tokens[alone])
        over = tokens[small] - tokens[halves] - room
        best = max(best, many[halves] + max(0, -(-over // capacity)))
    return best

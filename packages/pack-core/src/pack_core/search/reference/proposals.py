"""The swaps that the reference's search tries next. Needs NumPy."""

import numpy as np
import numpy.typing as npt

from pack_core.search.reference.state import Block, Counts, State

_ATTEMPTS = 32
_HOT = 8
_HEAVY = 4
_CLOSEST = 8
_COMPLEMENTARY = 8
_EXACT_FLOAT = 2**51


def propose(block: Block, state: State, generator: np.random.Generator) -> list[tuple[int, int]]:
    """Return up to 32 pairs of positions to swap, none twice; the search takes them from the end.

    Every fourth attempt is a random pair. The others take one of the eight loads that are furthest above the mean of
    their pack and layer, one of the four samples that add most to it, and for that one a partner elsewhere: one of the
    eight whose exchange would lower the sum of squared loads most. Even attempts look only among the partners of the
    nearest lengths.
    """
    samples = len(state.order)
    if samples < 2:
        return []
    view = _View(block, state)
    pairs: dict[tuple[int, int], None] = {}
    for attempt in range(_ATTEMPTS):
        if attempt % 4 == 3:
            first, second = generator.choice(samples, size=2, replace=False).tolist()
        else:
            first = view.donor(generator)
            partners = view.partners(first, near=attempt % 2 == 0)
            if not len(partners):
                continue
            second = int(partners[generator.integers(len(partners))])
        pairs[min(first, second), max(first, second)] = None
    return list(pairs)


class _View:
    """One state as the proposals look at it; `dispatch` numbers the packs of all replicas, `replica * packs + pack`."""

    def __init__(self, block: Block, state: State) -> None:
        self.order = np.array(state.order)
        self.lengths = np.array(block.lengths)[self.order]
        self.counts = block.counts
        self.dispatch = _dispatches(block, state)
        self.shape = state.loads.shape
        replicas, packs, layers, destinations = self.shape
        # Times their number, so that the mean needs no fraction.
        mean = state.loads.sum(axis=(0, 3), keepdims=True)
        excess = state.loads * (replicas * destinations) - mean
        self.hot = np.argsort(-excess, axis=None, kind="stable")[:_HOT]
        self.cross = _cross(block, state.loads.reshape(replicas * packs, layers * destinations))[self.order]

    def donor(self, generator: np.random.Generator) -> int:
        """Return a position that adds much to one of the hottest loads."""
        entry = int(self.hot[generator.integers(len(self.hot))])
        replica, pack, layer, destination = np.unravel_index(entry, self.shape)
        donors = np.flatnonzero(self.dispatch == replica * self.shape[1] + pack)
        added = self.counts[self.order[donors], layer, destination]
        heavy = donors[np.argsort(-added, kind="stable")[:_HEAVY]]
        return int(heavy[generator.integers(len(heavy))])

    def partners(self, donor: int, *, near: bool) -> npt.NDArray[np.intp]:
        """Return the positions in other dispatches that complement a donor best, the best first."""
        home = self.dispatch[donor]
        others = np.flatnonzero(self.dispatch != home)
        if near:
            distance = np.abs(self.lengths[others] - self.lengths[donor])
            closest = max(_CLOSEST, len(self.order) // 4)
            others = others[np.argsort(distance, kind="stable")[:closest]]
        away = self.dispatch[others]
        # The change of the sum of squared loads, to first order: (c_partner - c_donor) * (load_home - load_away).
        score = self.cross[others, home] - self.cross[others, away] - self.cross[donor, home] + self.cross[donor, away]
        return others[np.argsort(score, kind="stable")[:_COMPLEMENTARY]]


def _dispatches(block: Block, state: State) -> npt.NDArray[np.intp]:
    """Number of the dispatch that each position is part of, `[samples]`."""
    ranks = block.topology.ranks
    numbers = np.empty(len(state.order), np.intp)
    for rank, column in enumerate(state.columns):
        first = block.topology.replica(rank) * state.packs_per_rank
        numbers[rank::ranks] = np.repeat(np.arange(state.packs_per_rank), np.diff(column.offsets)) + first
    return numbers


def _cross(block: Block, loads: Counts) -> npt.NDArray[np.float64] | Counts:
    """Dot product of every sample's counts with every dispatch's loads, `[samples, dispatches]`, without rounding.

    Floats multiply far faster, but only whole numbers that they hold exactly come out the same on every machine.
    """
    counts = block.counts.reshape(len(block.counts), -1)
    if int(counts.sum(axis=1).max()) * int(loads.max()) < _EXACT_FLOAT:
        product: npt.NDArray[np.float64] = counts.astype(np.float64) @ loads.T.astype(np.float64)
        return product
    return counts @ loads.T

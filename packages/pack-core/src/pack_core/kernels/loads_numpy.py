"""Expert loads of one layout in NumPy: what `loads_python` computes, many swaps at a time."""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pack_core.kernels.loads import FAR, Figures, Weights
from pack_core.search.layout import Change, Layout

Whole = NDArray[np.int64]
Counts = NDArray[np.int32] | NDArray[np.int64]


class NumpyKernel:
    """Counts as `[samples, destinations, layers]`, in 32 bits where no sum is wider."""

    def __init__(self, counts: "array[int]", samples: int, destinations: int) -> None:
        """Copy the counts, layers last."""
        wide = np.asarray(counts).reshape(samples, len(counts) // samples // destinations, destinations)
        narrow = int(wide.sum(dtype=np.int64)) < 2**31
        last = wide.transpose(0, 2, 1)
        self._table: Counts = np.ascontiguousarray(last, np.int32) if narrow else np.ascontiguousarray(last, np.int64)
        self._by_place = self._table.transpose(2, 1, 0).copy()

    def loads(self, layout: Layout) -> "NumpyLoads":
        """Return the loads of a layout."""
        return NumpyLoads(self._table, self._by_place, layout)

    def growth(self, replicas: int) -> "NumpyGrowth":
        """Return empty replicas to deal samples to."""
        return NumpyGrowth(self._table, replicas)


class NumpyGrowth:
    """See `pack_core.search.construct.Growth`."""

    def __init__(self, table: Counts, replicas: int) -> None:
        """Start with nothing dealt."""
        self._table = table
        self._loads = np.zeros((replicas, *table.shape[1:]), table.dtype)
        self._peaks = [0] * replicas
        every = table.max(axis=1).sum(axis=1, dtype=np.int64) * table.shape[1] - table.sum(axis=(1, 2), dtype=np.int64)
        self._unevenness: list[int] = every.tolist()

    def unevenness(self, sample: int) -> int:
        """Return by how much the largest destinations of a sample, times their number, exceed all it brings."""
        return self._unevenness[sample]

    def of(self, replica: int, sample: int) -> int:
        """Return by how much a sample would raise the largest loads of a replica, summed over layers."""
        raised = self._loads[replica] + self._table[sample]
        return int(raised.max(axis=0).sum(dtype=np.int64)) - self._peaks[replica]

    def add(self, replica: int, sample: int) -> None:
        """Give a sample to a replica."""
        self._loads[replica] += self._table[sample]
        self._peaks[replica] = int(self._loads[replica].max(axis=0).sum(dtype=np.int64))


class NumpyLoads:
    """How many expert choices every destination executes, for each replica and pack of a layout.

    Args:
        counts: `[samples, destinations, layers]`: layers last, so that the largest destination is found along them.
        by_place: the same as `[layers, destinations, samples]`: what all samples bring to one place lies together.
        layout: the packs; each replica holds `destinations` neighbouring ranks.
    """

    def __init__(self, counts: Counts, by_place: Counts, layout: Layout) -> None:
        """Add up the loads of the layout."""
        self._counts, self._by_place = counts, by_place
        samples, self._destinations, layers = counts.shape
        self._replicas = layout.rules.ranks // self._destinations
        self._lengths = np.asarray(layout.lengths, np.int64)
        rank, pack = np.asarray(layout.rank_of), np.asarray(layout.pack_of)
        self._loads = np.zeros((self._replicas, layout.packs, self._destinations, layers), counts.dtype)
        np.add.at(self._loads, (rank // self._destinations, pack), counts)
        self._peaks = self._loads.max(axis=2)
        self._others = np.zeros_like(self._peaks)
        self._pack_work = np.zeros(layout.packs, np.int64)
        self._prices = np.zeros((self._replicas, layout.packs, samples), np.int64)
        self._hot = np.full((layout.packs, layers), -1)
        for p in range(layout.packs):
            self._settle(p)

    @property
    def work(self) -> int:
        """Expert work: over packs and layers, the sum of the most loaded destination of any replica."""
        return int(self._pack_work.sum())

    def score(self, swaps: Sequence[Sequence[Change]]) -> list[int]:
        """Return the expert work each of the swaps would give, alone."""
        simple = [number for number, changes in enumerate(swaps) if _is_exchange(changes)]
        works = dict(zip(simple, self._exchanged([swaps[number] for number in simple]), strict=True))
        return [works[number] if number in works else self._score(changes) for number, changes in enumerate(swaps)]

    def apply(self, changes: Sequence[Change]) -> None:
        """Carry out the changes of one swap."""
        for (replica, p), load in self._moved(changes).items():
            self._loads[replica, p] = load
            self._peaks[replica, p] = load.max(axis=0)
        for p in {p for _, p, _, _ in changes}:
            self._settle(p)

    def figures(self) -> Figures:
        """Return of every dispatch the sums over layers of its largest load and of all its loads, and the largest."""
        return Figures(
            self._peaks.sum(axis=2, dtype=np.int64).ravel().tolist(),
            self._loads.sum(axis=(2, 3), dtype=np.int64).ravel().tolist(),
            int(self._loads.max(initial=0)),
        )

    def loads_of(self, pack: int, changes: Sequence[Change] = ()) -> list[list[int]]:
        """Return the loads of all replicas' destinations in every layer of a pack, `[layers][replicas * places]`."""
        rows = self._loads[:, pack].copy()
        for (replica, p), load in self._moved(changes).items():
            if p == pack:
                rows[replica] = load
        listed: list[list[int]] = rows.reshape(self._replicas * self._destinations, -1).T.tolist()
        return listed

    def screen(
        self, layout: Layout, donors: Sequence[int], near: Sequence[Sequence[int]], weights: Weights
    ) -> list[tuple[int, int]]:
        """Return, for each donor, its best partner of all samples and of those near its length; -1 where none fits."""
        estimates = self._estimates(layout, np.asarray(donors), weights)
        chosen = []
        for row, close in zip(estimates, near, strict=True):
            best = int(row.argmin())
            closest = close[int(row[np.asarray(close)].argmin())] if len(close) else -1
            chosen.append((best if row[best] < FAR else -1, closest if closest >= 0 and row[closest] < FAR else -1))
        return chosen

    def _estimates(self, layout: Layout, donors: Whole, weights: Weights) -> Whole:
        """`[donors, samples]`; every sum is of integers and stays under 2**62, so the order of adding is free."""
        rank, pack = np.asarray(layout.rank_of), np.asarray(layout.pack_of)
        replica, everyone = rank // self._destinations, np.arange(len(rank))
        own = self._prices[replica, pack, everyone]
        expert = self._prices[replica[donors], pack[donors]] - own[donors][:, None]
        expert = expert + self._prices[replica[:, None], pack[:, None], donors].T - own
        more = self._lengths - self._lengths[donors][:, None]
        tokens = np.asarray(layout.tokens)[pack, rank]
        capacity = layout.rules.capacity
        estimate = expert * weights.expert
        for squares, rows, change, weight in (
            (False, layout.tokens, more, weights.token),
            (True, layout.squares, more * (self._lengths + self._lengths[donors][:, None]), weights.pair),
        ):
            table = np.asarray(rows, np.int64)
            other = np.asarray(layout.largest_without(squares), np.int64)[pack, rank]
            held, most = table[pack, rank], table.max(axis=1)[pack]
            here = np.maximum(other[donors][:, None], held[donors][:, None] + change) - most[donors][:, None]
            estimate += (here + np.maximum(other, held - change) - most) * weight
        slot = rank * layout.packs + pack
        impossible = (slot == slot[donors][:, None]) | (tokens[donors][:, None] + more > capacity)
        estimate[impossible | (tokens - more > capacity)] = FAR
        found: Whole = estimate
        return found

    def _exchanged(self, swaps: Sequence[Sequence[Change]]) -> list[int]:
        """The works of swaps that exchange one sample for one between two packs."""
        if not swaps:
            return []
        a, p, first, b, q, second = np.array(
            [(one[0], one[1], one[2][0], other[0], other[1], other[2][0]) for one, other in swaps]
        ).T
        g, h = a // self._destinations, b // self._destinations
        change = self._counts[second] - self._counts[first]
        here = (self._loads[g, p] + change).max(axis=1)
        there = (self._loads[h, q] - change).max(axis=1)
        apart = np.maximum(self._others[g, p], here).sum(1, dtype=np.int64) - self._pack_work[p]
        apart += np.maximum(self._others[h, q], there).sum(1, dtype=np.int64) - self._pack_work[q]
        works = apart + self.work
        works[(g == h) & (p == q)] = self.work
        for number in np.flatnonzero((g != h) & (p == q)).tolist():
            rows = self._peaks[:, p[number]].copy()
            rows[g[number]], rows[h[number]] = here[number], there[number]
            works[number] = self.work - self._pack_work[p[number]] + rows.max(axis=0).sum(dtype=np.int64)
        listed: list[int] = works.tolist()
        return listed

    def _score(self, changes: Sequence[Change]) -> int:
        moved = self._moved(changes)
        work = self.work
        for pack in {p for _, p in moved}:
            rows = self._peaks[:, pack].copy()
            for (replica, p), load in moved.items():
                if p == pack:
                    rows[replica] = load.max(axis=0)
            work += int(rows.max(axis=0).sum(dtype=np.int64)) - int(self._pack_work[pack])
        return work

    def _moved(self, changes: Sequence[Change]) -> dict[tuple[int, int], Counts]:
        """The loads of the dispatches that the changes touch."""
        moved: dict[tuple[int, int], Counts] = {}
        for rank, p, removed, added in changes:
            where = (rank // self._destinations, p)
            load = moved.get(where)
            load = self._loads[where].copy() if load is None else load
            for index in removed:
                load -= self._counts[index]
            for index in added:
                load += self._counts[index]
            moved[where] = load
        return moved

    def _settle(self, p: int) -> None:
        """Bring what follows from the loads of a pack up to date: its work, the peaks without a replica, its prices."""
        peaks = self._peaks[:, p]
        top = peaks.max(axis=0)
        self._pack_work[p] = top.sum(dtype=np.int64)
        if self._replicas > 1:
            second = np.partition(peaks, -2, axis=0)[-2]
            self._others[:, p] = np.where((peaks == top) & (second < top), second, top)
        # Only layers whose most loaded place is another one change the prices.
        replicas = (peaks == top).argmax(axis=0)
        layers = np.arange(len(top))
        hot = replicas * self._destinations + self._loads[replicas, p, :, layers].argmax(axis=1)
        (changed,) = np.nonzero(hot != self._hot[p])
        for places, sign in ((self._hot[p, changed], -1), (hot[changed], 1)):
            for replica in np.unique(places // self._destinations).tolist():
                here = places // self._destinations == replica
                if replica >= 0:
                    rows = self._by_place[changed[here], places[here] % self._destinations]
                    self._prices[replica, p] += sign * rows.sum(axis=0, dtype=np.int64)
        self._hot[p] = hot


def _is_exchange(changes: Sequence[Change]) -> bool:
    """Whether exactly one sample goes each way between two packs."""
    if len(changes) != 2:
        return False
    (_, _, out, come), (_, _, out_there, come_there) = changes
    return len(out) == len(come) == 1 and tuple(out) == tuple(come_there) and tuple(come) == tuple(out_there)

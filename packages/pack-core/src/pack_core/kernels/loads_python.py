"""Expert loads of one layout in plain Python: the obvious one, always there, equal to the last index to NumPy's."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from operator import add, itemgetter, sub

from pack_core.kernels.loads import FAR, Figures, Weights
from pack_core.search.layout import Change, Layout

_Rows = dict[tuple[int, int], list[int]]


class PythonKernel:
    """Counts `[samples, layers, destinations]` as one list a sample."""

    def __init__(self, counts: "array[int]", samples: int, destinations: int) -> None:
        """Take the counts apart."""
        width = len(counts) // samples
        self._rows = [counts[at * width : (at + 1) * width].tolist() for at in range(samples)]
        self._destinations = destinations

    def loads(self, layout: Layout) -> "PythonLoads":
        """Return the loads of a layout."""
        return PythonLoads(self._rows, self._destinations, layout)

    def growth(self, replicas: int) -> "PythonGrowth":
        """Return empty replicas to deal samples to."""
        return PythonGrowth(self._rows, self._destinations, replicas)


class PythonGrowth:
    """See `pack_core.search.construct.Growth`."""

    def __init__(self, rows: Sequence[Sequence[int]], destinations: int, replicas: int) -> None:
        """Start with nothing dealt."""
        self._rows, self._destinations = rows, destinations
        self._loads = [[0] * len(rows[0]) for _ in range(replicas)]
        self._peaks = [0] * replicas

    def unevenness(self, sample: int) -> int:
        """Return by how much the largest destinations of a sample, times their number, exceed all it brings."""
        row = self._rows[sample]
        return self._peak(row) * self._destinations - sum(row)

    def of(self, replica: int, sample: int) -> int:
        """Return by how much a sample would raise the largest loads of a replica, summed over layers."""
        return self._peak(list(map(add, self._loads[replica], self._rows[sample]))) - self._peaks[replica]

    def add(self, replica: int, sample: int) -> None:
        """Give a sample to a replica."""
        self._loads[replica] = list(map(add, self._loads[replica], self._rows[sample]))
        self._peaks[replica] = self._peak(self._loads[replica])

    def _peak(self, load: Sequence[int]) -> int:
        return sum(_largest(load, self._destinations))


class PythonLoads:
    """How many expert choices every destination executes, for each replica and pack of a layout.

    Args:
        counts: `[samples]` rows of `[layers * destinations]`.
        destinations: places of a layer, the expert parallel degree; 1 where there are no counts.
        layout: the packs; each replica holds `destinations` neighbouring ranks.
    """

    def __init__(self, counts: Sequence[Sequence[int]], destinations: int, layout: Layout) -> None:
        """Add up the loads of the layout."""
        self._counts, self._destinations = counts, destinations
        self._replicas = layout.rules.ranks // destinations
        width = len(counts[0])
        self._loads: _Rows = {}
        for replica in range(self._replicas):
            for p in range(layout.packs):
                ranks = range(replica * destinations, (replica + 1) * destinations)
                held = [counts[index] for rank in ranks for index in layout.members(rank, p)]
                self._loads[replica, p] = [sum(column) for column in zip(*held, strict=True)] or [0] * width
        self._peaks = {where: _largest(load, self._destinations) for where, load in self._loads.items()}
        self._pack_work = [self._work_of(p, {}) for p in range(layout.packs)]
        self._prices: dict[tuple[int, int], list[int]] = {}
        for p in range(layout.packs):
            self._price(p)

    @property
    def work(self) -> int:
        """Expert work: over packs and layers, the sum of the most loaded destination of any replica."""
        return sum(self._pack_work)

    def score(self, swaps: Sequence[Sequence[Change]]) -> list[int]:
        """Return the expert work each of the swaps would give, alone."""
        return [self._score(changes) for changes in swaps]

    def apply(self, changes: Sequence[Change]) -> None:
        """Carry out the changes of one swap."""
        moved = self._moved(changes)
        self._loads.update(moved)
        self._peaks.update({where: _largest(load, self._destinations) for where, load in moved.items()})
        for p in {p for _, p in moved}:
            self._pack_work[p] = self._work_of(p, {})
            self._price(p)

    def figures(self) -> Figures:
        """Return of every dispatch the sums over layers of its largest load and of all its loads, and the largest."""
        return Figures(
            [sum(peaks) for peaks in self._peaks.values()],
            [sum(load) for load in self._loads.values()],
            max((max(load, default=0) for load in self._loads.values()), default=0),
        )

    def loads_of(self, pack: int, changes: Sequence[Change] = ()) -> list[list[int]]:
        """Return the loads of all replicas' destinations in every layer of a pack, `[layers][replicas * places]`."""
        moved, size = self._moved(changes), self._destinations
        rows = [moved.get((g, pack), self._loads[g, pack]) for g in range(self._replicas)]
        return [[load for row in rows for load in row[at : at + size]] for at in range(0, len(rows[0]), size)]

    def screen(
        self, layout: Layout, donors: Sequence[int], near: Sequence[Sequence[int]], weights: Weights
    ) -> list[tuple[int, int]]:
        """Return, for each donor, its best partner of all samples and of those near its length; -1 where none fits.

        A swap is estimated at fixed boundaries: attention exactly, as if the other pack stood still; expert work by
        what the two samples bring to the layers' present most loaded destinations.
        """
        estimate = self._estimator(layout, weights)
        samples, chosen = range(len(self._counts)), []
        for donor, close in zip(donors, near, strict=True):
            row = estimate(donor)
            best = min(samples, key=row.__getitem__)
            closest = min(close, key=row.__getitem__, default=-1)
            chosen.append((best if row[best] < FAR else -1, closest if closest >= 0 and row[closest] < FAR else -1))
        return chosen

    def _estimator(self, layout: Layout, weights: Weights) -> "_Estimator":
        return _Estimator(layout, weights, self._prices, self._destinations)

    def _score(self, changes: Sequence[Change]) -> int:
        moved = self._moved(changes)
        peaks = {where: _largest(load, self._destinations) for where, load in moved.items()}
        return self.work + sum(self._work_of(p, peaks) - self._pack_work[p] for p in {p for _, p in moved})

    def _moved(self, changes: Sequence[Change]) -> _Rows:
        """The loads of the dispatches that the changes touch."""
        moved: _Rows = {}
        for rank, p, removed, added in changes:
            where = (rank // self._destinations, p)
            load: Iterable[int] = moved.get(where, self._loads[where])
            for index in removed:
                load = map(sub, load, self._counts[index])
            for index in added:
                load = map(add, load, self._counts[index])
            moved[where] = list(load)
        return moved

    def _work_of(self, p: int, peaks: Mapping[tuple[int, int], list[int]]) -> int:
        rows = [peaks.get((g, p), self._peaks[g, p]) for g in range(self._replicas)]
        return sum(rows[0]) if len(rows) == 1 else sum(map(max, *rows))

    def _price(self, p: int) -> None:
        """What each sample brings (or would) to the layers whose most loaded destination is here."""
        size = self._destinations
        hot: list[list[int]] = [[] for _ in range(self._replicas)]
        for layer, at in enumerate(range(0, len(self._loads[0, p]), size)):
            top = max(self._peaks[g, p][layer] for g in range(self._replicas))
            g = next(g for g in range(self._replicas) if self._peaks[g, p][layer] == top)
            hot[g].append(self._loads[g, p].index(top, at))
        for g, places in enumerate(hot):
            self._prices[g, p] = _taken(self._counts, places)


class _Estimator:
    """The estimates of one donor's swaps with every sample."""

    def __init__(
        self, layout: Layout, weights: Weights, prices: Mapping[tuple[int, int], list[int]], destinations: int
    ) -> None:
        self._layout, self._weights, self._prices, self._destinations = layout, weights, prices, destinations
        self._others = layout.largest_without(squares=False), layout.largest_without(squares=True)
        self._largest = [max(row) for row in layout.tokens], [max(row) for row in layout.squares]

    def __call__(self, donor: int) -> list[int]:
        layout, weights = self._layout, self._weights
        a, p = layout.rank_of[donor], layout.pack_of[donor]
        here = self._prices[a // self._destinations, p]
        length, own, capacity = layout.lengths[donor], here[donor], layout.rules.capacity
        (other_tokens, other_squares), (most_tokens, most_squares) = self._others, self._largest
        result = []
        for partner, size in enumerate(layout.lengths):
            b, q = layout.rank_of[partner], layout.pack_of[partner]
            more = size - length
            tokens, tokens_there = layout.tokens[p][a] + more, layout.tokens[q][b] - more
            if (a == b and p == q) or tokens > capacity or tokens_there > capacity:
                result.append(FAR)
                continue
            there = self._prices[b // self._destinations, q]
            squared = more * (size + length)
            expert = here[partner] - own + there[donor] - there[partner]
            token = max(other_tokens[p][a], tokens) - most_tokens[p]
            token += max(other_tokens[q][b], tokens_there) - most_tokens[q]
            pair = max(other_squares[p][a], layout.squares[p][a] + squared) - most_squares[p]
            pair += max(other_squares[q][b], layout.squares[q][b] - squared) - most_squares[q]
            result.append(expert * weights.expert + token * weights.token + pair * weights.pair)
        return result


def _largest(load: Sequence[int], destinations: int) -> list[int]:
    """The most loaded destination of each layer."""
    if destinations == 1:
        return list(load)
    return list(map(max, *(load[d::destinations] for d in range(destinations))))


def _taken(counts: Sequence[Sequence[int]], places: Sequence[int]) -> list[int]:
    if not places:
        return [0] * len(counts)
    if len(places) == 1:
        return [row[places[0]] for row in counts]
    take = itemgetter(*places)
    return [sum(take(row)) for row in counts]

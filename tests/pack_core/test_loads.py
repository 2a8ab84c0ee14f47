"""Expert loads of a layout, in plain Python and in NumPy, against nested loops."""

import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from pack_core.kernels.loads import FAR, Figures, Loads, Weights, kernel_of
from pack_core.search.layout import Layout, Rules, Swap
from support.search_oracles import drawn_counts, expert_work, lay, loads_of

pytest.importorskip("numpy")

KERNELS = ["python", "numpy"]
Counts = list[list[list[int]]]

#: Ranks, destinations, layers, rows of samples, factor of the counts: two replicas, many, one; no layers; a factor
#: that 32 bits do not hold when summed.
SHAPES = [(4, 2, 3, 5, 1), (6, 2, 2, 4, 1), (8, 4, 3, 3, 1), (6, 1, 2, 4, 1), (12, 2, 1, 2, 1)]
SHAPES += [(2, 2, 3, 6, 1), (3, 1, 0, 5, 1), (1, 1, 0, 9, 1), (4, 2, 3, 5, 100_000_000)]


def made(counts: Counts, layout: Layout, kernels: str, places: int) -> Loads:
    flat = array("i", [number for rows in counts for row in rows for number in row])
    return kernel_of(flat, len(counts), places, kernels).loads(layout)


class Case:
    """A random layout with random counts."""

    def __init__(self, shape: tuple[int, int, int, int, int], seed: int, method: str = "tokens") -> None:
        ranks, self.places, layers, rows, factor = shape
        draw = self.draw = random.Random(seed)
        self.lengths = [draw.randint(1, 20) for _ in range(ranks * rows)]
        drawn = drawn_counts(draw, self.lengths, layers, self.places)
        self.counts = [[[number * factor for number in row] for row in sample] for sample in drawn]
        self.rules = Rules(ranks, draw.randint(25, 45), method, None)
        self.layout = Layout(draw.sample(range(ranks * rows), ranks * rows), self.lengths, self.rules)

    def loads(self, kernels: str) -> Loads:
        return made(self.counts, self.layout, kernels, self.places)

    def slow(self, order: Sequence[int]) -> list[list[list[list[int]]]]:
        rules = self.rules
        laid = lay(order, self.lengths, rules.ranks, rules.capacity, rules.equalize)
        return loads_of(laid, self.counts, self.places)

    def swaps(self, wanted: int) -> list[Swap]:
        """Some swaps that keep the number of packs."""
        found: list[Swap] = []
        for _ in range(20 * wanted):
            swap = self.layout.weigh(*self.draw.sample(range(len(self.lengths)), 2))
            if isinstance(swap, Swap) and swap.layout is None and len(found) < wanted:
                found.append(swap)
        return found


def after(order: Sequence[int], swap: Swap) -> list[int]:
    exchanged = {swap.first: swap.second, swap.second: swap.first}
    return [exchanged.get(index, index) for index in order]


@pytest.mark.parametrize("kernels", KERNELS)
def test_four_samples_on_two_replicas(kernels: str) -> None:
    # One pack, replicas of ranks 0 1 and 2 3. Loads [10, 8] and [5, 1]: 10 counts. Samples 1 and 3 swapped: [10, 3] and
    # [5, 6]. Samples 0 and 2: [5, 8] and [10, 1]; samples 0 and 3: [0, 7] and [15, 2].
    counts = [[[10, 2]], [[0, 6]], [[5, 0]], [[0, 1]]]
    layout = Layout(range(4), [4] * 4, Rules(4, 4, "tokens", None))
    loads = made(counts, layout, kernels, 2)
    assert loads.work == 10
    assert loads.loads_of(0) == [[10, 8, 5, 1]]
    assert loads.figures() == Figures([10, 5], [18, 6], 10)
    swaps = [layout.weigh(1, 3), layout.weigh(0, 2), layout.weigh(0, 3)]
    changes = [swap.changes for swap in swaps if isinstance(swap, Swap)]
    assert loads.score(changes) == [10, 10, 15]
    assert loads.loads_of(0, changes[2]) == [[0, 7, 15, 2]]
    # Destination 0 of replica 0 is the only one that costs: sample 0 brings 10 to it, sample 2 would bring 5, sample 3
    # nothing. Sample 1 saves nothing with 0 (the same replica) nor with 3; ties go to the first.
    weights = Weights(1, 0, 0)
    assert loads.screen(layout, [0, 1], [[2], []], weights) == [(3, 2), (0, -1)]
    loads.apply(changes[2])
    assert loads.work == 15
    assert loads.loads_of(0) == [[0, 7, 15, 2]]


def check(case: Case, loads: Loads, order: Sequence[int]) -> None:
    slow = case.slow(order)
    assert loads.work == expert_work(slow)
    dispatches = [dispatch for replica in slow for dispatch in replica]
    figures = loads.figures()
    assert list(figures.peaks) == [sum(max(layer) for layer in dispatch) for dispatch in dispatches]
    assert list(figures.totals) == [sum(map(sum, dispatch)) for dispatch in dispatches]
    assert figures.largest == max((load for one in dispatches for layer in one for load in layer), default=0)
    for p in range(len(slow[0])):
        assert loads.loads_of(p) == rows(slow, p)


def rows(slow: list[list[list[list[int]]]], p: int) -> list[list[int]]:
    return [[load for replica in slow for load in replica[p][layer]] for layer in range(len(slow[0][0]))]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["tokens", "balanced"])
def test_loads_and_scores_are_those_of_nested_loops(
    shape: tuple[int, int, int, int, int], method: str, kernels: str
) -> None:
    paths = set()
    for seed in range(4):
        case = Case(shape, seed, method)
        loads, order = case.loads(kernels), case.layout.order()
        check(case, loads, order)
        swaps = case.swaps(12)
        slow = [case.slow(after(order, swap)) for swap in swaps]
        assert loads.score([swap.changes for swap in swaps]) == list(map(expert_work, slow))
        for swap, expected in zip(swaps, slow, strict=True):
            for p in range(case.layout.packs):
                assert loads.loads_of(p, swap.changes) == rows(expected, p)
        check(case, loads, order)  # scoring touched nothing
        paths |= {swap.path for swap in swaps}
    assert paths


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_after_hundreds_of_swaps_the_loads_are_those_of_nested_loops(
    shape: tuple[int, int, int, int, int], kernels: str
) -> None:
    case, applied, seen = Case(shape, 3), 0, set()
    loads = case.loads(kernels)
    for _ in range(2000):
        if applied == 200:
            break
        for swap in case.swaps(1):
            loads.apply(swap.changes)
            case.layout.apply(swap)
            applied += 1
            seen.add(swap.path)
        if applied % 10 == 0:
            check(case, loads, case.layout.order())
            fresh = case.loads(kernels)
            donors, near = range(len(case.lengths)), [range(len(case.lengths))] * len(case.lengths)
            weights = Weights(7, 3, 2)
            screened = [one.screen(case.layout, donors, near, weights) for one in (loads, fresh)]
            assert screened[0] == screened[1]  # the prices were kept up to date
    assert applied == 200
    assert "fixed" in seen


def slow_estimate(case: Case, donor: int, partner: int, weights: Weights) -> int | None:
    """What a swap at fixed boundaries is estimated to change, in the words of the documentation; None: impossible."""
    layout, lengths, places = case.layout, case.lengths, case.places
    order = layout.order()
    laid = lay(order, lengths, case.rules.ranks, case.rules.capacity, case.rules.equalize)
    loads = loads_of(laid, case.counts, places)

    def where(index: int) -> tuple[int, int]:
        return next((r, p) for r, packs in enumerate(laid) for p, one in enumerate(packs) if index in one)

    (a, p), (b, q) = where(donor), where(partner)
    if (a, p) == (b, q):
        return None
    more = lengths[partner] - lengths[donor]
    if sum(lengths[i] for i in laid[a][p]) + more > case.rules.capacity:
        return None
    if sum(lengths[i] for i in laid[b][q]) - more > case.rules.capacity:
        return None

    def price(index: int, rank: int, pack: int) -> int:
        """What a sample brings to the layers whose most loaded destination is in this replica, first ones on ties."""
        total = 0
        for layer in range(len(case.counts[0])):
            flat = [load for replica in loads for load in replica[pack][layer]]
            hottest = flat.index(max(flat))
            if hottest // places == rank // places:
                total += case.counts[index][layer][hottest % places]
        return total

    expert = price(partner, a, p) - price(donor, a, p) + price(donor, b, q) - price(partner, b, q)

    def attention(power: int) -> int:
        """The change of both packs' largest rank, each as if the other pack stood still."""
        change = 0
        for rank, pack, out, come in ((a, p, donor, partner), (b, q, partner, donor)):
            held = [sum(lengths[i] ** power for i in packs[pack]) for packs in laid]
            largest = max(held)
            held[rank] += lengths[come] ** power - lengths[out] ** power
            change += max(held) - largest
        return change

    return expert * weights.expert + attention(1) * weights.token + attention(2) * weights.pair


def slow_screen(case: Case, donor: int, near: Sequence[int], weights: Weights) -> tuple[int, int]:
    def best(partners: Sequence[int]) -> int:
        estimates = [(slow_estimate(case, donor, partner, weights), partner) for partner in partners]
        possible = [(estimate, at) for at, (estimate, _) in enumerate(estimates) if estimate is not None]
        return partners[min(possible)[1]] if possible else -1

    return best(range(len(case.lengths))), best(near)


@pytest.mark.parametrize("shape", SHAPES)
def test_partners_are_those_of_the_slow_estimate(shape: tuple[int, int, int, int, int]) -> None:
    for seed in range(3):
        case = Case(shape, seed)
        weights = Weights(*(case.draw.randint(0, 2**20) for _ in range(3)))
        donors = case.draw.sample(range(len(case.lengths)), min(6, len(case.lengths)))
        near = [case.draw.sample(range(len(case.lengths)), case.draw.randint(0, 6)) for _ in donors]
        expected = [slow_screen(case, donor, close, weights) for donor, close in zip(donors, near, strict=True)]
        for kernels in KERNELS:
            assert case.loads(kernels).screen(case.layout, donors, near, weights) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_every_estimate_of_both_kernels_is_the_slow_one(shape: tuple[int, int, int, int, int]) -> None:
    import numpy as np

    case = Case(shape, 5)
    samples, weights = range(len(case.lengths)), Weights(11, 5, 3)
    expected = [[slow_estimate(case, donor, partner, weights) for partner in samples] for donor in samples]
    far = [[FAR if one is None else one for one in row] for row in expected]
    python: Any = case.loads("python")
    estimator = python._estimator(case.layout, weights)
    assert [estimator(donor) for donor in samples] == far
    numpy: Any = case.loads("numpy")
    assert numpy._estimates(case.layout, np.asarray(samples), weights).tolist() == far


def test_large_and_small_counts_are_summed_in_64_and_32_bits() -> None:
    from pack_core.kernels.loads_numpy import NumpyKernel

    def table(counts: Sequence[int], samples: int, destinations: int) -> Any:
        return NumpyKernel(array("i", counts), samples, destinations)._table

    assert table([2**30, 2**30 - 1], 2, 1).dtype.itemsize == 4
    assert table([2**30, 2**30], 2, 1).dtype.itemsize == 8
    # Counts of two samples, two layers, two destinations: layers go last.
    assert table(range(8), 2, 2).tolist() == [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]


def test_weights_make_each_work_of_arrival_worth_the_same() -> None:
    assert Weights.of(2**10, 2**20, 2**30) == Weights(2**46, 2**36, 2**26)
    assert Weights.of(0, 0, 3) == Weights(0, 0, 2**56 // 3)

"""Orders made at once, the guard, and the objective: by hand, then against slow versions."""

import random
from array import array
from fractions import Fraction
from typing import Any

import pytest
from pack_core import Search
from pack_core.filling import dealt as by_length
from pack_core.kernels.loads import kernel_of
from pack_core.search.construct import by_experts, full, level
from pack_core.search.guard import Standing, standing, worse
from pack_core.search.improve import _baseline, _Candidate
from pack_core.search.layout import Layout, Rules
from pack_core.search.objective import Objective
from support.search_oracles import drawn_counts, drawn_lengths, lay, seven


def flat(counts: list[list[list[int]]]) -> list[list[int]]:
    return [[number for row in one for number in row] for one in counts]


def dealt(lengths: list[int], counts: list[list[list[int]]], degree: int, ranks: int, kernels: str) -> list[list[int]]:
    table = array("i", [number for one in counts for row in one for number in row])
    growth = kernel_of(table, len(lengths), degree, kernels).growth(ranks // degree)
    return by_experts(lengths, growth, degree, ranks)


def test_six_samples_are_dealt_to_two_ranks() -> None:
    # 6 and 5 go to ranks 0 and 1; 4 to the lighter rank 1, 3 to rank 0: 9 each. 2 goes to rank 0, which then holds
    # 6 3 | 2 in packs of 10, and 1 to rank 1, which holds 5 4 1 in one.
    lengths, rules = [6, 5, 4, 3, 2, 1], Rules(2, 10, "tokens", None)
    columns = by_length(lengths, 2)
    assert columns == [[0, 3, 4], [1, 2, 5]]
    assert full(columns, lengths, rules) == [0, 1, 3, 2, 4, 5]
    # Level, rank 0 holds 6 | 3 2 and rank 1, over as many packs, 5 | 4 1, of which 4 1 costs less than 5.
    assert level(columns, lengths, rules) == [0, 1, 3, 2, 4, 5]
    # Full, 4 3 | 3 needs two packs of 7 and so does 4 2 1 | 3 ... but level they are 4 | 3 3 and 4 | 3 2 1 (of 14).
    assert level([[0, 2, 3], [1, 4, 5]], [4, 4, 3, 3, 3, 1], Rules(2, 7, "tokens", None)) == [2, 1, 3, 4, 0, 5]


def test_a_rank_that_cannot_be_level_is_full() -> None:
    # Two packs of 6 hold 3 3 | 2 2 2, but not 3 2 2 | 3 2, which would take 7.
    assert full([[0, 1, 2, 3, 4]], [3, 3, 2, 2, 2], Rules(1, 6, "tokens", None)) == [0, 1, 2, 3, 4]
    assert level([[0, 1, 2, 3, 4]], [3, 3, 2, 2, 2], Rules(1, 6, "tokens", None)) == [0, 1, 2, 3, 4]


def test_packs_stand_by_falling_sums_of_squares() -> None:
    # First-fit gives 6 | 5 5, of 36 and 50.
    assert full([[0, 1, 2]], [6, 5, 5], Rules(1, 10, "tokens", None)) == [1, 2, 0]
    # With one sample a pack: 36, 25, 25.
    assert full([[2, 0, 1]], [5, 5, 6], Rules(1, 10, "tokens", 1)) == [2, 0, 1]


@pytest.mark.parametrize("kernels", ["python", "numpy"])
def test_samples_that_need_other_destinations_go_together(kernels: str) -> None:
    # The two that are uneven choose first: sample 2 goes to replica 0, sample 3, which needs the other destination,
    # raises nothing there and joins it. Samples 0 and 1 take what is left.
    counts = [[[5, 5]], [[5, 5]], [[9, 0]], [[0, 9]]]
    assert dealt([4] * 4, counts, 2, 4, kernels) == [[2], [3], [0], [1]]
    # Inside a replica the longer sample goes to the rank with fewer tokens; at first that is the first one.
    assert dealt([4, 4, 3, 4], counts, 2, 4, kernels) == [[3], [2], [0], [1]]


def spread(column: list[int], lengths: list[int], rules: Rules, count: int) -> list[list[int]] | None:
    packs: list[list[int]] = [[] for _ in range(count)]
    for index in column:
        open_ones = [p for p in range(count) if rules.max_documents is None or len(packs[p]) < rules.max_documents]
        if not open_ones:
            return None
        emptiest = min(open_ones, key=lambda p: (sum(lengths[i] for i in packs[p]), p))
        if sum(lengths[i] for i in packs[emptiest]) + lengths[index] > rules.capacity:
            return None
        packs[emptiest].append(index)
    return packs if all(packs) else None


def first_fit(column: list[int], lengths: list[int], rules: Rules) -> list[list[int]]:
    packs: list[list[int]] = []
    for index in column:
        for one in packs:
            short = rules.max_documents is None or len(one) < rules.max_documents
            if short and sum(lengths[i] for i in one) + lengths[index] <= rules.capacity:
                one.append(index)
                break
        else:
            packs.append([index])
    return packs


def aligned(packs: list[list[int]], lengths: list[int]) -> list[int]:
    ranked = sorted(range(len(packs)), key=lambda p: (-sum(lengths[i] ** 2 for i in packs[p]), p))
    return [index for p in ranked for index in packs[p]]


def slow_columns(lengths: list[int], ranks: int, counts: list[list[list[int]]] | None, degree: int) -> list[list[int]]:
    replicas = ranks // degree
    columns: list[list[int]] = [[] for _ in range(ranks)]
    loads = [[[0] * degree for _ in counts[0]] for _ in range(replicas)] if counts else []

    def tokens(rank: int) -> int:
        return sum(lengths[i] for i in columns[rank])

    def peak(load: list[list[int]]) -> int:
        return sum(map(max, load))

    waiting = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    while waiting:
        deal, waiting = waiting[:ranks], waiting[ranks:]
        groups: list[list[int]] = [[] for _ in range(replicas)]
        if counts is None:
            groups = [deal]
        else:
            for i in sorted(deal, key=lambda i: (-sum(degree * max(row) - sum(row) for row in counts[i]), i)):
                weight = {
                    g: sum(map(tokens, range(g * degree, (g + 1) * degree))) + sum(lengths[j] for j in groups[g])
                    for g in range(replicas)
                    if len(groups[g]) < degree
                }
                best = None
                for g in sorted(weight, key=lambda g: (weight[g], g))[:4]:
                    more = [
                        [a + b for a, b in zip(*rows, strict=True)] for rows in zip(loads[g], counts[i], strict=True)
                    ]
                    raised = peak(more) - peak(loads[g])
                    if best is None or (raised, g) < best[:2]:
                        best = (raised, g, more)
                assert best is not None
                groups[best[1]].append(i)
                loads[best[1]] = best[2]
        size = ranks // len(groups)
        for g, members in enumerate(groups):
            seats = sorted(range(g * size, (g + 1) * size), key=lambda rank: (tokens(rank), rank))
            for rank, i in zip(seats, sorted(members, key=lambda i: (-lengths[i], i)), strict=True):
                columns[rank].append(i)
    return columns


def slow_order(columns: list[list[int]], lengths: list[int], rules: Rules, leveled: bool) -> list[int]:
    filled = [first_fit(column, lengths, rules) for column in columns]
    packs = filled
    if leveled:
        spreads = [spread(column, lengths, rules, max(map(len, filled))) for column in columns]
        packs = [one or other for one, other in zip(spreads, filled, strict=True)]
    rows = [aligned(one, lengths) for one in packs]
    return [rows[rank][place] for place in range(len(rows[0])) for rank in range(rules.ranks)]


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (4, 2), (12, 2), (8, 4), (6, 3)])
def test_constructed_orders_are_those_of_the_slow_version(shape: tuple[int, int]) -> None:
    ranks, degree = shape
    for seed in range(12):
        draw = random.Random(seed)
        lengths = drawn_lengths(draw, ranks * draw.randint(1, 5), 30)
        counts = drawn_counts(draw, lengths, draw.randint(1, 3), degree)
        rules = Rules(ranks, max(lengths) + draw.randint(0, 50), "tokens", draw.choice([None, 1, 3]))
        columns = by_length(lengths, ranks)
        assert columns == slow_columns(lengths, ranks, None, 1)
        assert full(columns, lengths, rules) == slow_order(columns, lengths, rules, False)
        assert level(columns, lengths, rules) == slow_order(columns, lengths, rules, True)
        if degree > 1:
            for kernels in ("python", "numpy"):
                assert dealt(lengths, counts, degree, ranks, kernels) == slow_columns(lengths, ranks, counts, degree)


def test_each_guarded_figure_is_named_where_it_alone_is_worse() -> None:
    names = ["packs_per_rank", "critical_work_proxy", "skew_mean", "skew_max", "max_slot_assignments"]
    names += ["attention_token_work", "attention_pair_work"]
    limit = (3, 100, 1.5, 2.0, 40, 70, 600)
    assert worse(limit, limit) == []
    for at, name in enumerate(names):
        by = 1e-9 if isinstance(limit[at], float) else 1
        up, down = ([*limit[:at], limit[at] + sign * by, *limit[at + 1 :]] for sign in (1, -1))
        assert worse(tuple(up), limit) == [name]  # type: ignore[arg-type]
        assert worse(tuple(down), limit) == []  # type: ignore[arg-type]


ARRIVAL: Standing = (3, 100, 1.5, 2.0, 40, 70, 600)


@pytest.mark.parametrize(
    ("figures", "value", "options", "chosen"),
    [
        ((2, 100, 1.6, 2.0, 44, 70, 600), 300, {}, "length"),  # fewer packs, though the load of a dispatch grows
        ((2, 100, 1.6, 2.0, 44, 70, 600), 300, {"guard": "reference"}, "arrival"),
        ((2, 100, 1.5, 2.0, 40, 70, 600), 300, {"guard": "reference"}, "length"),
        ((2, 100, 1.6, 2.0, 44, 70, 600), 300, {"max_slot_assignments": 43}, "arrival"),
        ((2, 100, 1.6, 2.0, 44, 70, 600), 300, {"max_slot_assignments": 44}, "length"),
        ((3, 90, 1.6, 2.0, 44, 70, 600), 299, {}, "length"),
        ((2, 101, 1.0, 1.0, 30, 35, 300), 200, {}, "arrival"),  # expert work is worse
        ((2, 50, 1.0, 1.0, 30, 71, 300), 200, {}, "arrival"),
        ((2, 50, 1.0, 1.0, 30, 35, 601), 200, {}, "arrival"),
        ((4, 50, 1.0, 1.0, 30, 35, 300), 200, {}, "arrival"),
        ((3, 100, 1.5, 2.0, 39, 70, 600), 300, {}, "arrival"),  # no better, and arrival came first
        ((3, 100, 1.5, 2.0, 39, 70, 600), 300, {"max_slot_assignments": 39}, "length"),  # arrival is over the limit
    ],
)
def test_the_baseline_has_the_fewest_packs_and_no_work_worse_than_arrival(
    figures: Standing, value: int, options: dict[str, Any], chosen: str
) -> None:
    candidates = [_Candidate("arrival", (0, 1), ARRIVAL, 300), _Candidate("length", (1, 0), figures, value)]
    assert _baseline(candidates, Search(**options)).name == chosen


@pytest.mark.parametrize("kernels", ["python", "numpy"])
def test_the_guarded_figures_are_those_of_nested_loops(kernels: str) -> None:
    pytest.importorskip("numpy")
    for seed in range(20):
        draw = random.Random(seed)
        ranks, degree = draw.choice([(4, 2), (8, 4), (6, 2), (3, 1)])
        lengths = drawn_lengths(draw, ranks * 4, 20)
        counts = drawn_counts(draw, lengths, 2, degree)
        order = draw.sample(range(len(lengths)), len(lengths))
        layout = Layout(order, lengths, Rules(ranks, 40, "tokens", None))
        table = array("i", [number for row in flat(counts) for number in row])
        found = standing(layout, kernel_of(table, len(lengths), degree, kernels).loads(layout))
        assert found == pytest.approx(
            seven(lay(order, lengths, ranks, 40, "tokens"), lengths, counts, degree), rel=1e-12
        )


def test_the_objective_is_the_sum_of_the_three_quotients() -> None:
    # 2/4 + 3/6 + 5/10 is 1.5, on the denominator 4 * 6 * 10.
    assert Objective(4, 6, 10).value(2, 3, 5) == 360
    draw = random.Random(0)
    for _ in range(50):
        of = [draw.choice([0, draw.randint(1, 10**9)]) for _ in range(3)]
        now = [draw.randint(0, 10**9) for _ in range(3)]
        whole = [max(one, 1) for one in of]
        value = sum(Fraction(one, other) for one, other in zip(now, whole, strict=True))
        assert Objective(*of).value(*now) == value * whole[0] * whole[1] * whole[2]

"""Balanced plans: what they may never make worse, and how near to the best possible they come."""

import math
import random
from array import array
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_core import Plan, Sample, Search, Topology, TopologyError, headroom, plan, verify
from pack_core.filling import dealt as by_length
from pack_core.kernels.loads import kernel_of
from pack_core.search.construct import by_experts, full, level
from pack_core.search.layout import Rules
from support.search_oracles import (
    dispatch,
    drawn_counts,
    drawn_lengths,
    every_order,
    lay,
    named,
    no_worse,
    seven,
)

Counts = list[list[list[int]]]

#: Without routes every expert figure is 0, and every skew 1.
NONE: Counts = [[[0]]]


def balanced(
    lengths: Sequence[int], ranks: int, degree: int, capacity: int, counts: Counts | None, **options: Any
) -> Plan:
    options = {"step_samples": len(lengths), "pack_order": "balanced"} | options
    known = None if counts is None else dispatch(counts)
    return plan(named(lengths), topology=Topology(ranks, degree), capacity=capacity, counts=known, **options)


def test_four_samples_on_two_ranks() -> None:
    # In arrival order rank 0 holds 9 and 9, two packs, so rank 1 runs its 1 and 1 in two as well: 18 tokens to wait
    # for. Dealt longest first, each rank holds a 9 and a 1: one full pack, 10 tokens, which no order goes below.
    made = balanced([9, 1, 9, 1], 2, 1, 10, None)
    assert made.order == (0, 2, 1, 3)
    assert made.steps[0].packs == (((0, 1),), ((2, 3),))
    assert [(one.packs_per_rank, one.attention_token_work) for one in (*made.arrival, *made.work)] == [(2, 18), (1, 10)]
    (trace,) = made.traces
    assert (trace.baseline, trace.stop, trace.attempts, trace.order) == ("length", "lower_bound", 0, (0, 2, 1, 3))


def test_sixteen_samples_of_two_kinds() -> None:
    # Kinds [12, 0] and [2, 10], two after two: 8 samples of each, 8 * 14 + 8 * 10 choices; at best destination 0 of
    # both replicas executes 56 over the two packs. In arrival order replica 0 holds the first kind alone: 48 a pack.
    counts = [[[12, 0]] if i % 4 < 2 else [[2, 10]] for i in range(16)]
    made = balanced([6] * 16, 4, 2, 12, counts)
    before, after = made.arrival[0], made.work[0]
    assert (before.critical_work_proxy, before.max_slot_assignments) == (96, 48)
    assert (after.critical_work_proxy, after.max_slot_assignments) == (56, 28)
    assert (after.skew_mean, after.skew_max) == (pytest.approx(28 / 24), pytest.approx(28 / 24))
    assert made.bounds[0].critical_work_proxy == 56
    assert made.traces[0].stop == "lower_bound"


def test_an_order_at_the_bound_that_the_guard_refuses_ends_nothing() -> None:
    # One pack, replicas of ranks 0 1 and 2 3. As they arrive: [15 10] and [1 2], largest over mean 1.2 and 1.33. With
    # 0 and 2 together [9 9] and [7 3]: 9, the bound (sample 0 alone brings it), but 1.4. With 0 and 3 together [10 7]
    # and [6 5]: 10, at 1.18 and 1.09. That is the best the guard admits.
    made = balanced([16, 9, 2, 1], 4, 2, 38, [[[9, 7]], [[6, 3]], [[0, 2]], [[1, 0]]])
    assert made.bounds[0].critical_work_proxy == 9
    assert (made.arrival[0].critical_work_proxy, made.work[0].critical_work_proxy) == (15, 10)
    assert made.work[0].skew_max == pytest.approx(20 / 17)
    assert made.traces[0].stop == "stagnation"
    assert set(made.traces[0].rejections) == {"skew_max"}


def lays_of(made: Plan, lengths: Sequence[int], number: int) -> list[list[list[int]]]:
    size = made.step_samples
    return [[[i - number * size for i in one] for one in packs] for packs in made.steps[number].packs]


def baseline_order(
    name: str, lengths: Sequence[int], rules: Rules, counts: Counts | None, degree: int
) -> Sequence[int]:
    if name == "arrival":
        return range(len(lengths))
    dealt, _, leveled = name.partition(", ")
    if dealt == "expert":
        assert counts is not None
        flat = array("i", [number for one in counts for row in one for number in row])
        growth = kernel_of(flat, len(lengths), degree, "python").growth(rules.ranks // degree)
        columns = by_experts(lengths, growth, degree, rules.ranks)
    else:
        columns = by_length(lengths, rules.ranks)
    return (level if leveled else full)(columns, lengths, rules)


def check_step(made: Plan, lengths: Sequence[int], counts: Counts | None, number: int) -> None:
    """The step's packs are those of its order; nothing guarded is worse than the baseline or arrival order."""
    ranks, degree = made.topology.ranks, made.topology.expert_parallel if counts else 1
    start = number * made.step_samples
    held = list(lengths[start : start + made.step_samples])
    table = counts[start : start + made.step_samples] if counts else NONE * len(held)
    trace = made.traces[number]
    assert sorted(trace.order) == list(range(made.step_samples))
    assert made.order[start : start + made.step_samples] == tuple(start + place for place in trace.order)
    rules = Rules(ranks, made.capacity, made.equalize, made.max_documents)

    def figures(order: Sequence[int]) -> tuple[float, ...]:
        return seven(lay(order, held, ranks, rules.capacity, rules.equalize, rules.max_documents), held, table, degree)

    found, arrival = figures(trace.order), figures(range(len(held)))
    limit = figures(baseline_order(trace.baseline, held, rules, table if counts else None, degree))
    assert lays_of(made, lengths, number) == lay(
        trace.order, held, ranks, rules.capacity, rules.equalize, rules.max_documents
    )
    assert no_worse(found, limit)
    for which in (0, 1, 5, 6):
        assert limit[which] <= arrival[which]
    work, least = made.work[number], made.bounds[number]
    if trace.stop == "lower_bound":
        assert (found[1], found[5], found[6]) == (
            least.critical_work_proxy or 0,
            least.attention_token_work,
            least.attention_pair_work,
        )
    assert (work.packs_per_rank, work.attention_token_work, work.attention_pair_work) == (found[0], found[5], found[6])
    if counts:
        assert (work.critical_work_proxy, work.max_slot_assignments) == (found[1], found[4])
        assert (work.skew_mean, work.skew_max) == (pytest.approx(found[2]), pytest.approx(found[3]))


@settings(max_examples=300)
@given(st.integers(0, 2**32))
def test_a_balanced_plan_keeps_every_promise(seed: int) -> None:
    draw = random.Random(seed)
    ranks, degree = draw.choice([(1, 1), (2, 1), (3, 1), (4, 2), (6, 2), (4, 4), (6, 3)])
    size = ranks * draw.randint(1, 4)
    lengths = drawn_lengths(draw, size * draw.randint(1, 2) + draw.randrange(size), draw.choice([4, 30]))
    routed = ranks > degree > 1 and draw.random() < 0.8
    counts = drawn_counts(draw, lengths, draw.randint(1, 3), degree) if routed else None
    if counts and draw.random() < 0.1:
        counts = [[[0] * degree for _ in rows] for rows in counts]  # nothing is routed at all
    options: dict[str, Any] = {
        "equalize": draw.choice(["tokens", "samples", "balanced"]),
        "max_documents": draw.choice([None, None, 1, 2, 4]),
        "search": Search(proposals=draw.choice([0, 5, 60]), kernels=draw.choice([None, "python"])),
    }
    made = balanced(lengths, ranks, degree, max(lengths) + draw.randint(0, 40), counts, step_samples=size, **options)
    assert verify(made, named(lengths), dispatch(counts) if counts else None) == []
    assert len(made.steps) == len(made.traces) == len(lengths) // size
    whole = len(made.steps) * size
    assert made.tail == made.order[whole:] == tuple(range(whole, len(lengths)))
    for number in range(len(made.steps)):
        check_step(made, lengths, counts, number)


@pytest.mark.parametrize("seed", range(12))
def test_the_guard_of_the_reference_holds_everything_to_arrival_order(seed: int) -> None:
    draw = random.Random(seed)
    lengths = drawn_lengths(draw, 24, 30)
    counts = drawn_counts(draw, lengths, 2, 2)
    made = balanced(lengths, 4, 2, 45, counts, search=Search(proposals=100, guard="reference"))
    found, arrival = (
        seven(lay(order, lengths, 4, 45, "tokens"), lengths, counts, 2) for order in (made.traces[0].order, range(24))
    )
    assert no_worse(found, arrival)


# Against every order there is.


def objective(figures: Sequence[float], arrival: Sequence[float]) -> Fraction:
    return sum((Fraction(figures[at], max(arrival[at], 1)) for at in (1, 5, 6)), Fraction())  # type: ignore[arg-type]


def is_best(lengths: Sequence[int], counts: Counts | None, ranks: int, degree: int, capacity: int) -> bool:
    """Whether the plan's objective is the lowest of all orders the guard admits; its bounds and guard always hold."""
    made = balanced(lengths, ranks, degree, capacity, counts)
    table = counts or NONE * len(lengths)
    (trace,), (least,) = made.traces, made.bounds
    check_step(made, lengths, counts, 0)

    def figures(order: Sequence[int]) -> tuple[float, ...]:
        return seven(lay(order, lengths, ranks, capacity, "tokens"), lengths, table, degree)

    rules = Rules(ranks, capacity, "tokens", None)
    limit = figures(baseline_order(trace.baseline, lengths, rules, counts, degree))
    arrival, best = figures(range(len(lengths))), None
    for order in every_order(len(lengths), ranks, degree):
        found = figures(order)
        assert found[0] >= least.packs_per_rank
        assert found[1] >= (least.critical_work_proxy or 0)
        assert found[5] >= least.attention_token_work
        assert found[6] >= least.attention_pair_work
        if no_worse(found, limit):
            value = objective(found, arrival)
            best = value if best is None else min(best, value)
    assert best is not None
    reached = objective(figures(trace.order), arrival)
    assert reached >= best
    assert trace.proposals <= 1024
    return reached == best


#: Samples, ranks, destinations (1: no routes) and how many random blocks of that kind.
KINDS = [(4, 4, 2, 100), (4, 2, 1, 50), (6, 2, 1, 40), (6, 3, 1, 30), (8, 4, 2, 6)]


@pytest.mark.parametrize(("samples", "ranks", "degree", "blocks"), KINDS)
def test_the_plan_is_the_best_of_all_orders(samples: int, ranks: int, degree: int, blocks: int) -> None:
    best = 0
    for seed in range(blocks):
        draw = random.Random(seed)
        lengths = drawn_lengths(draw, samples, 20)
        counts = drawn_counts(draw, lengths, draw.randint(1, 2), degree) if degree > 1 else None
        best += is_best(lengths, counts, ranks, degree, max(lengths) + draw.randint(0, 30))
    assert best >= 0.95 * blocks


def test_every_order_is_told_apart_but_for_names() -> None:
    # 8 samples on 2 replicas of 2 ranks: 8! orders, 2 * 2 * 2 names for each.
    assert len(set(every_order(8, 4, 2))) == math.factorial(8) // 8
    assert len(set(every_order(4, 2, 1))) == 12


# Long-tailed lengths.


def panel(samples: int, longest: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [min(longest, max(64, round(draw.lognormvariate(math.log(longest / 4), 0.8)))) for _ in range(samples)]


@pytest.mark.parametrize(
    ("samples", "ranks", "capacity", "many"),
    [(64, 8, 6144, 4), (128, 4, 6144, 14), (256, 8, 6144, 13), (256, 8, 12288, 13)],
)
def test_long_tailed_lengths_need_at_most_one_pack_over_the_bound(
    samples: int, ranks: int, capacity: int, many: int
) -> None:
    for seed in range(3):
        made = balanced(panel(samples, capacity, seed), ranks, 1, capacity, None, search=Search(proposals=256))
        (before,), (after,), (least,) = made.arrival, made.work, made.bounds
        assert before.packs_per_rank >= many
        assert after.packs_per_rank <= least.packs_per_rank + 1
        assert after.packs_per_rank <= 0.8 * before.packs_per_rank
        report = made.report(0)
        for name in ("attention_token_work", "attention_pair_work"):
            removed = report.removed(name)
            assert removed is not None
            assert removed > (65 if samples == 64 else 90)


def test_headroom_is_the_report_of_a_plan_without_a_search() -> None:
    lengths = panel(64, 6144, 1)
    (report,) = headroom(named(lengths), topology=Topology(8), capacity=6144, step_samples=64)
    made = balanced(lengths, 8, 1, 6144, None, search=Search(proposals=0))
    assert made.traces[0].proposals == made.traces[0].attempts == 0
    assert report == made.report(0)
    assert report.after.packs_per_rank < report.before.packs_per_rank


# What cannot be balanced.


@pytest.mark.parametrize(("ranks", "degree"), [(4, 1), (4, 4)])
def test_counts_on_ranks_that_cannot_even_them_out_are_refused(ranks: int, degree: int) -> None:
    counts = [[[1] * degree]] * 4
    with pytest.raises(TopologyError, match=f"{ranks} ranks with expert_parallel {degree} leave no expert load"):
        balanced([1] * 4, ranks, degree, 8, counts)
    # In arrival order they are counted all the same.
    made = balanced([1] * 4, ranks, degree, 8, counts, pack_order="arrival")
    assert made.work[0].critical_work_proxy == (1 if degree == 1 else 4)


def test_unknown_orders_and_counts_of_others_are_refused() -> None:
    with pytest.raises(ValueError, match="pack_order is 'random'; it must be one of 'arrival', 'balanced'"):
        balanced([1] * 4, 2, 1, 8, None, pack_order="random")
    with pytest.raises(ValueError, match="there are 4 samples but counts of 3"):
        balanced([1] * 4, 4, 2, 8, [[[1, 1]]] * 3)


def test_lengths_whose_squares_64_bits_do_not_hold_are_balanced_alike() -> None:
    samples = [Sample(i, 2**40 + i * 2**33) for i in range(8)]
    made = [
        plan(
            samples,
            topology=Topology(2),
            capacity=2**42,
            step_samples=8,
            pack_order="balanced",
            search=Search(proposals=64, kernels=kernels),
        )
        for kernels in ("python", None)
    ]
    assert made[0].digest == made[1].digest
    assert made[0].traces == made[1].traces

"""Work and bounds."""

import random
from array import array
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pack_core import (
    Bounds,
    CountError,
    DispatchCounts,
    PackError,
    Sample,
    Schedule,
    Topology,
    Work,
    bounds,
    dispatch_loads,
    fold,
    owners,
    plan,
    schedule,
    work,
)
from pack_core.work import placed_critical_work
from support.core_oracles import assignments, work_of
from support.search_oracles import dispatch, drawn_counts, drawn_lengths, expert_work, seven
from support.search_oracles import loads_of as slow_loads


def test_lengths_two_to_nine_on_four_ranks() -> None:
    # One pack a rank: tokens 2+6 3+7 4+8 5+9 = 8 10 12 14, squares 40 58 80 106; the largest rank counts.
    lengths = list(range(2, 10))
    step = schedule(lengths, 4, 20, order=range(8))
    assert work(step, lengths, 20) == Work(
        packs_per_rank=1,
        attention_token_work=14,
        attention_pair_work=106,
        model_tokens=44,
        max_pack_tokens=14,
        fill_fraction=44 / 80,
    )


def test_sixteen_equal_samples() -> None:
    # Four samples of 6 a rank, two a pack: two packs of 12 tokens, 36 + 36 squares.
    lengths = [6] * 16
    step = schedule(lengths, 4, 12, order=range(16))
    assert work(step, lengths, 12) == Work(2, 24, 144, 96, 12, 1.0)


def test_squares_are_of_samples_not_of_rows() -> None:
    assert work(Schedule((((0, 1),),)), [3, 4], 10).attention_pair_work == 25


def test_each_pack_waits_for_its_own_slowest_rank() -> None:
    # Pack 0: 9 against 1. Pack 1: 2 against 8. The sum of the largest is 17, though no rank has more than 11.
    assert work(Schedule((((0,), (2,)), ((1,), (3,)))), [9, 1, 2, 8], 10).attention_token_work == 17


@pytest.mark.parametrize("packs", [(), ((),), (((0,),), ()), (((0,),), ((1,), (2,)))])
def test_unequal_or_missing_packs_have_no_work(packs: tuple[tuple[tuple[int, ...], ...], ...]) -> None:
    with pytest.raises(CountError, match="every rank must have the same number"):
        work(Schedule(packs), [1, 1, 1], 10)


def test_a_sample_without_a_length_has_no_work() -> None:
    with pytest.raises(PackError, match="holds sample 3 but there are 2 lengths"):
        work(Schedule((((0, 3),),)), [1, 1], 10)


@pytest.mark.parametrize(
    ("lengths", "ranks", "capacity", "expected"),
    [
        (list(range(2, 10)), 4, 20, Bounds(1, 11, 81)),  # 44 tokens / 4; 9 * 9, over 284 squares / 4
        ([6] * 16, 4, 12, Bounds(2, 24, 144)),  # met exactly by the step above
        ([1, 1, 1, 90], 4, 100, Bounds(1, 90, 8100)),  # the longest sample, not the mean
        ([5, 5, 5], 2, 5, Bounds(2, 8, 38)),  # rounded up
    ],
)
def test_bounds_worked_by_hand(lengths: list[int], ranks: int, capacity: int, expected: Bounds) -> None:
    assert bounds(lengths, ranks, capacity) == expected


@pytest.mark.parametrize(("lengths", "ranks", "capacity"), [([], 1, 1), ([1], 0, 1), ([1], 1, 0)])
def test_bounds_of_nothing_are_refused(lengths: list[int], ranks: int, capacity: int) -> None:
    with pytest.raises(PackError):
        bounds(lengths, ranks, capacity)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(9, 14))
def test_no_assignment_of_all_beats_the_bounds(lengths: list[int], capacity: int) -> None:
    ranks = 2
    low = bounds(lengths, ranks, capacity)
    fitting = 0
    for packs in (1, 2):
        for laid in assignments(len(lengths), ranks, packs):
            if any(sum(lengths[i] for i in one) > capacity for rank in laid for one in rank):
                continue
            fitting += 1
            token, pair = work_of(laid, lengths)
            assert packs >= low.packs_per_rank
            assert token >= low.attention_token_work
            assert pair >= low.attention_pair_work
    assert fitting or sum(lengths) > capacity


def test_some_assignment_meets_the_bounds() -> None:
    lengths = [4, 3, 2, 1]  # 4 + 1 and 3 + 2
    best = min(work_of(laid, lengths)[0] for laid in assignments(4, 2, 1))
    assert best == bounds(lengths, 2, 10).attention_token_work == 5


# Expert work.


def two_replicas() -> tuple[Schedule, list[int], DispatchCounts]:
    """Four ranks, two destinations, two packs of one sample a rank; two layers.

    Loads, replica by replica: pack 0 [4 6][3 5] and [1 1][9 0], pack 1 [2 2][1 1] and [0 0][0 0].
    """
    rows = [[4, 0, 3, 0], [0, 6, 0, 5], [1, 0, 9, 0], [0, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1], [0] * 4, [0] * 4]
    step = Schedule((((0,), (4,)), ((1,), (5,)), ((2,), (6,)), ((3,), (7,))))
    return step, [5] * 8, DispatchCounts((2, 5), 4, 2, array("i", [number for row in rows for number in row]))


def test_loads_of_two_replicas() -> None:
    step, _, counts = two_replicas()
    assert dispatch_loads(step, counts) == [[[[4, 6], [3, 5]], [[2, 2], [1, 1]]], [[[1, 1], [9, 0]], [[0, 0], [0, 0]]]]


def test_expert_work_worked_by_hand() -> None:
    step, lengths, counts = two_replicas()
    found = work(step, lengths, 5, counts)
    # Pack 0: 6 in the first layer and 9 in the second, of different replicas. Pack 1: 2 and 1.
    assert found.critical_work_proxy == 6 + 9 + 2 + 1
    assert (found.dispatches, found.max_slot_assignments) == (4, 9)
    # Largest over mean, layers summed: (6 + 5) / 9, (2 + 1) / 3, (1 + 9) / 5.5 and, where nothing goes, 1.
    assert found.skew_mean == pytest.approx((11 / 9 + 1 + 10 / 5.5 + 1) / 4)
    assert found.skew_max == pytest.approx(10 / 5.5)
    assert (found.packs_per_rank, found.attention_token_work) == (2, 10)


def test_expert_bounds_worked_by_hand() -> None:
    _, lengths, counts = two_replicas()
    # Totals of the layers: [7 9] and [14 6]. Two replicas: 9 / 2 is 5, but sample 1 alone brings 6; 14 / 2 is 7, but
    # sample 2 alone brings 9. Spread evenly over four ranks: 16 / 4 and 20 / 4.
    found = bounds(lengths, 4, 5, counts)
    assert (found.critical_work_proxy, found.even_critical_work, found.routing_floor) == (6 + 9, 4 + 5, 6)
    assert bounds(lengths, 4, 5).routing_floor is None


def test_a_floor_of_uneven_routing_is_what_no_packing_removes() -> None:
    # All of 8 samples bring 3 to destination 0 and 1 to destination 1: 24 / 2 replicas is 12, evenly 32 / 4 is 8.
    counts = DispatchCounts((0,), 1, 2, array("i", [3, 1] * 8))
    found = bounds([1] * 8, 4, 8, counts)
    assert (found.critical_work_proxy, found.even_critical_work, found.routing_floor) == (12, 8, 4)


def test_what_placing_experts_anew_could_remove() -> None:
    # Experts 0 1 | 2 3 bring 9 + 8 and 1 + 2. Longest first, two each: 9 to the first, 8 to the second, 2 to the
    # second (lighter), 1 to the first, the only one with room: 10 and 10.
    counts = DispatchCounts((0,), 1, 4, array("i", [9, 8, 1, 2]))
    assert placed_critical_work(counts, 2, 1) == 10
    # Over two replicas half of that, but one sample's expert 0 stays whole: 9.
    assert placed_critical_work(counts, 2, 2) == 9
    # Room counts before lightness: 9 | 1, then 1 to the second, and the last 1 must go to the first.
    assert placed_critical_work(DispatchCounts((0,), 1, 4, array("i", [1, 1, 9, 1])), 2, 1) == 10
    # Layers are placed apart and added up.
    assert placed_critical_work(DispatchCounts((0, 1), 2, 2, array("i", [4, 1, 2, 2, 0, 3, 1, 0])), 2, 1) == 4 + 3


def test_counts_per_expert_give_the_bound_of_another_placement() -> None:
    counts = DispatchCounts((0,), 1, 4, array("i", [9, 8, 1, 2] * 8))
    samples = [Sample(i, 4) for i in range(8)]
    options: dict[str, Any] = {"topology": Topology(4, 2), "capacity": 8, "step_samples": 8}
    (found,) = plan(samples, counts=counts, **options).bounds
    # 8 * 17 over two replicas; placed anew 8 * 10.
    assert (found.critical_work_proxy, found.placed_critical_work) == (68, 40)
    (found,) = plan(samples, counts=fold(counts, owners(4, 2)), **options).bounds
    assert (found.critical_work_proxy, found.placed_critical_work) == (68, None)


def test_a_table_of_owners_decides_where_experts_are() -> None:
    counts = fold(DispatchCounts((0,), 1, 4, array("i", [9, 8, 1, 2] * 4)), [0, 1, 1, 0])
    (found,) = plan(
        [Sample(i, 4) for i in range(4)], topology=Topology(4, 2), capacity=8, step_samples=4, counts=counts
    ).work
    # Both replicas hold two samples, each of [11, 9].
    assert (found.critical_work_proxy, found.skew_max) == (22, pytest.approx(1.1))


@given(st.integers(0, 10**6))
def test_no_assignment_of_all_beats_the_expert_bound(seed: int) -> None:
    draw = random.Random(seed)
    counts = drawn_counts(draw, [draw.randint(1, 9) for _ in range(4)], draw.randint(1, 2), 2)
    least = bounds([1] * 4, 4, 4, dispatch(counts))
    found = [expert_work(slow_loads(laid, counts, 2)) for laid in assignments(4, 4, 1)]
    assert min(found) >= (least.critical_work_proxy or 0) >= (least.even_critical_work or 0)


def test_expert_figures_are_those_of_nested_loops() -> None:
    for seed in range(40):
        draw = random.Random(seed)
        ranks, degree = draw.choice([(4, 2), (6, 3), (2, 1), (4, 4)])
        lengths = drawn_lengths(draw, ranks * 4, 20)
        counts = drawn_counts(draw, lengths, draw.randint(1, 3), degree)
        step = schedule(lengths, ranks, 40, order=range(len(lengths)))
        laid = [[list(one) for one in packs] for packs in step.packs]
        found = work(step, lengths, 40, dispatch(counts))
        assert dispatch_loads(step, dispatch(counts)) == slow_loads(laid, counts, degree)
        assert (
            found.packs_per_rank,
            found.critical_work_proxy,
            pytest.approx(found.skew_mean),
            pytest.approx(found.skew_max),
            found.max_slot_assignments,
            found.attention_token_work,
            found.attention_pair_work,
        ) == seven(laid, lengths, counts, degree)
        assert found.dispatches == ranks // degree * found.packs_per_rank


def test_counts_of_other_samples_or_more_places_than_a_replica_are_refused() -> None:
    step, lengths, counts = two_replicas()
    with pytest.raises(PackError, match="there are 8 lengths but counts of 7 samples"):
        work(step, lengths, 5, counts.take(range(7)))
    with pytest.raises(PackError, match="there are 7 lengths but counts of 8 samples"):
        bounds(lengths[:7], 4, 5, counts)
    unfolded = attrs.evolve(counts, layers=(0,), routed_layers=1, places=4)
    for call in (lambda: bounds(lengths, 2, 5, unfolded), lambda: dispatch_loads(Schedule(step.packs[:2]), unfolded)):
        with pytest.raises(CountError, match="2 ranks are no whole replicas of 4 destinations; fold the counts"):
            call()

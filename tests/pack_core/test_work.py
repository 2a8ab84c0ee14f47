"""Work and bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pack_core import Bounds, CountError, PackError, Schedule, Topology, Work, bounds, schedule, work
from support.core_oracles import assignments, work_of


def test_lengths_two_to_nine_on_four_ranks() -> None:
    # One pack a rank: tokens 2+6 3+7 4+8 5+9 = 8 10 12 14, squares 40 58 80 106; the largest rank counts.
    lengths = list(range(2, 10))
    step = schedule(lengths, range(8), topology=Topology(4, 2), capacity=20)
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
    step = schedule(lengths, range(16), topology=Topology(4, 2), capacity=12)
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

"""What ranks tell each other: an error of one is an error of all, and nobody hangs."""

import pytest
from pack_miles.training.collectives import World
from support import miles_ranks
from support.ranks import World as Ranks


@pytest.fixture(scope="module")
def two_ranks() -> Ranks:
    with Ranks(2) as ranks:
        yield ranks


def test_what_fails_on_one_rank_fails_on_all_with_the_same_words(two_ranks: Ranks) -> None:
    told = two_ranks.run(miles_ranks.fail_on_one, 2, timeout=30)
    assert told == ["rank 1: ValueError: sample 'q17/3' is broken"] * 2


def test_ranks_that_differ_all_raise_the_same_error(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(miles_ranks.differ, 2, timeout=30)
    assert first == second
    assert "step differs between ranks: rank 0 has 1, rank 1 has 2" in first
    assert "samples differs" not in first


def test_one_process_needs_no_group() -> None:
    alone = World(0, 1)
    alone.same({"samples": 3})
    assert alone.gather("x") == ["x"]
    assert alone.total([1.5, 2]) == [1.5, 2.0]
    with pytest.raises(ZeroDivisionError):
        alone.agreed(lambda: 1 // 0)


@pytest.mark.parametrize(
    ("lengths", "capacity", "packs"),
    [
        # Rank 0 needs two packs for 56, 45, 44; rank 1 for 56, 44, 44 as well.
        ([56, 56, 45, 44, 44, 44], 100, [[[0], [2, 4]], [[1, 3], [5]]]),
        # Rank 1 needs two packs; rank 0 would need one and splits it, at half its samples.
        ([17, 87, 19, 13, 23, 89, 29, 11], 128, [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]),
    ],
)
def test_columns_take_the_largest_pack_count(
    two_ranks: Ranks, lengths: list[int], capacity: int, packs: list[list[list[int]]]
) -> None:
    told = two_ranks.run(miles_ranks.columns, 2, lengths, capacity, len(lengths) // 2, timeout=30)
    assert told == [[own] for own in packs]


def test_packs_never_cross_an_optimizer_step(two_ranks: Ranks) -> None:
    told = two_ranks.run(miles_ranks.columns, 2, [5] * 8, 100, 2, timeout=30)
    assert told == [[[[0, 2]], [[4, 6]]], [[[1, 3]], [[5, 7]]]]


def test_a_sample_over_the_limit_on_one_rank_is_named_on_both(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(miles_ranks.columns, 2, [5, 5, 5, 120], 100, 2, timeout=30)
    assert first == second
    assert "rank 1" in first
    assert "sample 3 (position 1) has 120 tokens" in first


def test_differences_are_averaged_over_all_ranks(two_ranks: Ranks) -> None:
    # Three tokens differ by 0 on rank 0 and by 0.1 on rank 1.
    assert two_ranks.run(miles_ranks.compare_apart, 2, False, timeout=30) == [(6, 0.05, 0.1)] * 2
    told = two_ranks.run(miles_ranks.compare_apart, 2, True, timeout=30)
    assert told == ["rank 1: ValueError: scoring and training cover different tokens"] * 2

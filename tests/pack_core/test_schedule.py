"""One optimizer step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pack_core import CountError, LengthError, PackError, schedule
from support.core_oracles import step_of
from support.packing_oracles import fit


def packs_of(lengths: list[int], ranks: int, capacity: int, **options: object) -> list[list[list[int]]]:
    step = schedule(lengths, ranks, capacity, order=range(len(lengths)), **options)  # type: ignore[arg-type]
    return [[list(one) for one in packs] for packs in step.packs]


@pytest.mark.parametrize("equalize", ["tokens", "samples", "balanced"])
def test_two_ranks_split_up_to_the_larger_count(equalize: str) -> None:
    # Rank 0 holds 17 19 23 29, one pack of 88. Rank 1 holds 87 13 89 11, two packs. So rank 0 is split once: by
    # samples in the middle, by tokens where the larger part is 52 (36 | 52).
    assert packs_of([17, 87, 19, 13, 23, 89, 29, 11], 2, 128, equalize=equalize) == [
        [[0, 2], [4, 6]],
        [[1, 3], [5, 7]],
    ]


def test_each_rank_packs_its_own_column() -> None:
    # Rank 0 holds 56 45 44 (56 + 45 is one over the limit), rank 1 holds 56 44 44 (56 + 44 just fits).
    assert packs_of([56, 56, 45, 44, 44, 44], 2, 100) == [[[0], [2, 4]], [[1, 3], [5]]]


def test_without_an_order_packs_are_as_few_as_first_fit_decreasing_needs_by_hand() -> None:
    # Longest first into packs of 40: 20 19 | 18 15 7 | 14 13 12 | 10 10 5 5 5 3 2, one for each of four ranks.
    lengths = [14, 13, 12, 20, 3, 10, 10, 5, 7, 5, 15, 18, 19, 5, 2]
    step = schedule(lengths, 4, 40)
    assert [len(packs) for packs in step.packs] == [1] * 4
    assert sorted(index for packs in step.packs for pack in packs for index in pack) == list(range(15))
    assert max(sum(lengths[index] for index in pack) for packs in step.packs for pack in packs) <= 40


@given(
    lengths=st.lists(st.integers(1, 40), min_size=8, max_size=40),
    ranks=st.integers(1, 4),
    capacity=st.integers(40, 60),
    cap=st.sampled_from([None, 3]),
)
def test_without_an_order_packs_are_never_more_than_first_fit_decreasing_needs(
    lengths: list[int], ranks: int, capacity: int, cap: int | None
) -> None:
    needed = len(fit(lengths, capacity, cap, best=False, decreasing=True))
    few = -(-needed // ranks)
    try:
        step = schedule(lengths, ranks, capacity, max_documents=cap)
    except CountError:
        assert ranks * few > len(lengths)
        return
    assert {len(packs) for packs in step.packs} == {len(step.packs[0])}
    assert len(step.packs[0]) <= few
    held = [pack for packs in step.packs for pack in packs]
    assert sorted(index for pack in held for index in pack) == list(range(len(lengths)))
    assert all(pack and sum(lengths[index] for index in pack) <= capacity for pack in held)
    assert max(map(len, held)) <= (cap or len(lengths))


@pytest.mark.parametrize("equalize", ["tokens", "samples", "balanced"])
def test_the_worst_rank_sets_the_count(equalize: str) -> None:
    # Ranks 2 and 3 hold four nines and need four packs of one; ranks 0 and 1 hold four twos and needed one pack.
    assert packs_of([2, 2, 9, 9] * 4, 4, 12, equalize=equalize) == [
        [[rank], [4 + rank], [8 + rank], [12 + rank]] for rank in range(4)
    ]


def test_one_document_a_pack_gives_every_rank_its_column() -> None:
    assert packs_of([1, 2, 3, 4], 2, 100, max_documents=1) == [[[0], [2]], [[1], [3]]]


def test_positions_follow_the_order_given() -> None:
    step = schedule([10, 20, 30, 40, 50], 2, 90, order=[4, 0, 3, 1])
    assert step.packs == (((4, 3),), ((0, 1),))


@pytest.mark.parametrize("count", [0, 3, 5])
def test_ranks_must_hold_the_same_number(count: int) -> None:
    with pytest.raises(CountError, match=f"{count} samples do not give 2 ranks the same number each; use a positive"):
        packs_of([1] * count, 2, 10)


def test_a_sample_in_the_order_twice_is_refused() -> None:
    with pytest.raises(PackError, match="order holds sample 1 at positions 0 and 2"):
        schedule([1, 1, 1, 1], 2, 10, order=[1, 0, 1, 2])


@pytest.mark.parametrize("order", [[0, 4], [-1, 0]])
def test_an_unknown_sample_in_the_order_is_refused(order: list[int]) -> None:
    with pytest.raises(PackError, match="there are 2 samples, 0 to 1"):
        schedule([1, 1], 2, 10, order=order)


def test_a_too_long_sample_is_named() -> None:
    with pytest.raises(LengthError, match=r"sample 'c' \(position 1\) has 99 tokens"):
        schedule([1, 1, 99], 2, 10, order=[0, 2], ids=["a", "b", "c"])
    with pytest.raises(LengthError, match=r"sample 2 \(position 1\) has 99 tokens"):
        schedule([1, 1, 99], 2, 10, order=[0, 2])


@given(
    st.integers(1, 4).flatmap(
        lambda ranks: st.tuples(
            st.just(ranks),
            st.integers(1, 6).flatmap(
                lambda rows: st.lists(st.integers(1, 15), min_size=rows * ranks, max_size=rows * ranks)
            ),
        )
    ),
    st.integers(15, 40),
    st.none() | st.integers(1, 3),
    st.sampled_from(["tokens", "samples"]),
)
def test_a_step_is_the_slow_version(case: tuple[int, list[int]], capacity: int, cap: int | None, equalize: str) -> None:
    ranks, lengths = case
    made = packs_of(lengths, ranks, capacity, equalize=equalize, max_documents=cap)
    assert made == step_of(lengths, ranks, capacity, equalize, cap)

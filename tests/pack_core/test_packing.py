"""Lengths to packs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pack_core import LengthError, PackError, pack
from support.core_oracles import complaints, next_fit

#: Lengths, capacity, packs; worked by hand.
WORKED = [
    ([300, 200, 400, 600], 1024, [[0, 1, 2], [3]]),
    ([5, 8, 6, 7], 16, [[0, 1], [2, 3]]),
    ([15, 15, 2, 2], 16, [[0], [1], [2, 3]]),
    ([17, 87, 19, 13, 23, 89, 29, 11], 128, [[0, 1, 2], [3, 4, 5], [6, 7]]),
    ([17, 19, 23, 29], 128, [[0, 1, 2, 3]]),
    ([87, 13, 89, 11], 128, [[0, 1], [2, 3]]),
    ([16], 16, [[0]]),
    ([8, 8, 8, 8], 16, [[0, 1], [2, 3]]),
    ([9, 1, 9, 1, 9, 1], 10, [[0, 1], [2, 3], [4, 5]]),
    ([10, 1, 10, 1], 10, [[0], [1], [2], [3]]),
    # It never looks back: the 1 would fit beside the first 8, but that pack is closed.
    ([8, 9, 1, 1], 10, [[0], [1, 2], [3]]),
]


@pytest.mark.parametrize(("lengths", "capacity", "packs"), WORKED)
def test_next_fit_gives_the_packs_worked_by_hand(lengths: list[int], capacity: int, packs: list[list[int]]) -> None:
    assert list(pack(lengths, capacity=capacity)) == list(pack(lengths, capacity)) == packs


def test_a_pack_may_be_exactly_full_and_not_one_token_more() -> None:
    assert len(pack([10, 6], capacity=16)) == 1
    assert len(pack([10, 7], capacity=16)) == 2


def test_one_document_a_pack_is_the_unpacked_path() -> None:
    assert list(pack([1, 1, 1], capacity=100, max_documents=1)) == [[0], [1], [2]]


def test_the_cap_of_documents_closes_a_pack() -> None:
    assert list(pack([1, 1, 1, 1, 1], capacity=100, max_documents=2)) == [[0, 1], [2, 3], [4]]


def test_the_longest_sample_is_the_least_capacity() -> None:
    with pytest.raises(LengthError) as caught:
        pack([16, 17], capacity=16)
    assert str(caught.value) == (
        "the sample at position 1 has 17 tokens but capacity (packing_max_tokens) is 16; "
        "raise packing_max_tokens to 17 or more, or drop the sample"
    )


def test_a_too_long_sample_is_named_by_its_id() -> None:
    with pytest.raises(LengthError, match=r"sample 'q17/3' \(position 1\) has 8,112 tokens but .* is 6,144; raise"):
        pack([10, 8112], capacity=6144, ids=["q17/2", "q17/3"])


def test_nothing_to_pack_is_an_error() -> None:
    with pytest.raises(PackError, match="no lengths to pack"):
        pack([], capacity=16)


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True, None, "16"])
def test_a_capacity_is_a_positive_whole_number(capacity: object) -> None:
    with pytest.raises(PackError, match="capacity is"):
        pack([1], capacity=capacity)  # type: ignore[arg-type]


@pytest.mark.parametrize("cap", [0, -3, 2.0, False])
def test_a_cap_of_documents_is_a_positive_whole_number(cap: object) -> None:
    with pytest.raises(PackError, match="max_documents is"):
        pack([1], capacity=4, max_documents=cap)  # type: ignore[arg-type]


def test_an_unknown_strategy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PackError, match="strategy is 'best'; it must be one of 'next_fit'"):
        pack([1], capacity=4, strategy="best")


def test_ids_must_match_the_lengths() -> None:
    with pytest.raises(LengthError, match="2 lengths but 1 ids"):
        pack([1, 2], capacity=4, ids=["a"])


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=30),
    st.integers(20, 60),
    st.none() | st.integers(1, 5),
)
def test_next_fit_is_the_slow_version(lengths: list[int], capacity: int, cap: int | None) -> None:
    packs = list(pack(lengths, capacity=capacity, max_documents=cap))
    assert packs == next_fit(lengths, capacity, cap)
    assert complaints(packs, lengths, len(packs), capacity, cap) == []


def test_a_million_samples_are_two_flat_rows() -> None:
    packing = pack(range(1, 1_000_001), capacity=1_000_000)
    assert len(packing.order) == 1_000_000
    assert packing.offsets[-1] == 1_000_000
    assert packing.order.itemsize == packing.offsets.itemsize == 8

"""Packs to exactly as many packs as are wanted."""

import random
import time
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_core import CountError, PackError, Packing, equalize, pack
from support.core_oracles import complaints, smallest_largest, split_by_samples, split_by_tokens

METHODS = ["tokens", "samples", "balanced"]


def cut(
    lengths: list[int], capacity: int, count: int, method: str, max_documents: int | None = None
) -> list[list[int]]:
    packing = pack(lengths, capacity=capacity, max_documents=max_documents)
    return list(equalize(packing, lengths, count=count, method=method, max_documents=max_documents))


def test_three_of_two_packs_of_the_front_page() -> None:
    # [300 200 400 | 600]: the first has 900. Cut after one: 300 | 600. After two: 500 | 400, larger part 500: there.
    assert cut([300, 200, 400, 600], 1024, 3, "tokens") == [[0, 1], [2], [3]]
    # Most samples is the same pack; half of three samples is one.
    assert cut([300, 200, 400, 600], 1024, 3, "samples") == [[0], [1, 2], [3]]
    # 600 tokens alone are the largest pack whatever is done; 300 200 fit under that, 300 200 400 do not.
    assert cut([300, 200, 400, 600], 1024, 3, "balanced") == [[0, 1], [2], [3]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lengths", [[5, 8, 6, 7], [15, 15, 2, 2]])
def test_the_reference_example_is_cut_to_three(lengths: list[int], method: str) -> None:
    # [5 8 | 6 7] has packs of 13 and 13 tokens, of two samples each: the first is split. [15 | 15 | 2 2] is three
    # already. Cut anew, 5 8 6 7 cannot do better than 13 either.
    assert cut(lengths, 16, 3, method) == [[0], [1], [2, 3]]


def test_by_samples_does_not_look_at_tokens() -> None:
    # Two samples of 3,000 tokens lose to three of 10.
    assert cut([3000, 3000, 10, 10, 10], 6000, 3, "samples") == [[0, 1], [2], [3, 4]]
    assert cut([3000, 3000, 10, 10, 10], 6000, 3, "tokens") == [[0], [1], [2, 3, 4]]


def test_by_samples_halves_again_and_again_first_on_ties() -> None:
    lengths = [1] * 5
    assert cut(lengths, 5, 2, "samples") == [[0, 1], [2, 3, 4]]
    assert cut(lengths, 5, 3, "samples") == [[0, 1], [2], [3, 4]]
    assert cut(lengths, 5, 4, "samples") == [[0], [1], [2], [3, 4]]


def test_by_tokens_ties_go_to_the_earliest_pack_and_boundary() -> None:
    assert cut([4, 4, 4, 4], 8, 3, "tokens") == [[0], [1], [2, 3]]
    # 2 | 1 2 and 2 1 | 2 both have a larger part of 3: the earlier boundary.
    assert cut([2, 1, 2], 5, 2, "tokens") == [[0], [1, 2]]


def test_by_tokens_passes_over_a_heavy_single_sample() -> None:
    assert cut([90, 1, 1], 90, 3, "tokens") == [[0], [1], [2]]


def test_balanced_cuts_anew_where_splitting_keeps_old_boundaries() -> None:
    lengths = [7, 1, 1, 1, 4]
    assert list(pack(lengths, capacity=10)) == [[0, 1, 2, 3], [4]]
    assert cut(lengths, 10, 2, "tokens") == [[0, 1, 2, 3], [4]]  # 10 and 4 tokens, nothing left to split
    assert cut(lengths, 10, 2, "balanced") == [[0], [1, 2, 3, 4]]  # 7 and 7


def test_balanced_spreads_what_the_largest_pack_leaves_free() -> None:
    # 100 tokens alone are the largest pack whatever is done; the ones are split as evenly as may be.
    assert cut([1] * 8 + [100], 108, 3, "balanced") == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_balanced_keeps_the_cap_of_documents() -> None:
    lengths = [1, 1, 1, 1, 100]
    assert cut(lengths, 100, 3, "balanced", max_documents=2) == [[0, 1], [2, 3], [4]]
    # Free of the cap three packs of at most 50 tokens would do; with it the largest must be 51.
    lengths = [1, 1, 1, 50, 50]
    assert cut(lengths, 100, 3, "balanced", max_documents=2) == [[0, 1], [2, 3], [4]]
    assert cut(lengths, 100, 3, "balanced") == [[0, 1, 2], [3], [4]]


@pytest.mark.parametrize("method", METHODS)
def test_as_many_packs_as_samples_are_single_samples(method: str) -> None:
    assert cut([5, 1, 7, 2], 20, 4, method) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("method", METHODS)
def test_fewer_packs_than_there_are_is_an_error(method: str) -> None:
    with pytest.raises(CountError, match=r"cannot bring 2 packs to 1: packs are split, never merged; ask for .* 2 or"):
        cut([5, 8, 6, 7], 16, 1, method)


@pytest.mark.parametrize("method", METHODS)
def test_more_packs_than_samples_is_an_error(method: str) -> None:
    with pytest.raises(
        CountError, match=r"cannot cut 4 samples into 5 packs: one would be empty; ask for .* 4 or fewer"
    ):
        cut([5, 8, 6, 7], 16, 5, method)


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PackError, match="method is 'even'; it must be one of 'tokens', 'samples', 'balanced'"):
        cut([1, 2], 4, 2, "even")


def test_lengths_of_other_samples_are_refused() -> None:
    with pytest.raises(PackError, match="holds 2 samples but 3 lengths"):
        equalize(pack([1, 2], capacity=4), [1, 2, 3], count=2)


def test_an_index_without_a_length_is_refused() -> None:
    stray = Packing(array("q", [0, 7]), array("q", [0, 2]))
    with pytest.raises(PackError, match="indices 0 to 7 but lengths are 0 to 1"):
        equalize(stray, [1, 2], count=2)


def test_plain_lists_are_no_packing() -> None:
    with pytest.raises(PackError, match="packing is a list; give the Packing that pack returned"):
        equalize([[0, 1]], [3, 4], count=2)  # type: ignore[arg-type]


def test_a_cap_that_the_packs_already_break_is_refused() -> None:
    with pytest.raises(PackError, match="max_documents is 1 but a pack already holds 3"):
        equalize(pack([1, 2, 3], capacity=9), [1, 2, 3], count=3, max_documents=1)


def test_any_order_is_kept() -> None:
    lengths = [5, 1, 9, 2]
    shuffled = Packing(array("q", [2, 0, 3, 1]), array("q", [0, 4]))
    # In that order the lengths are 9 5 2 1.
    assert list(equalize(shuffled, lengths, count=2)) == [[2], [0, 3, 1]]
    assert list(equalize(shuffled, lengths, count=3, method="balanced")) == [[2], [0], [3, 1]]


def test_the_packing_given_is_left_as_it_was() -> None:
    packing = pack([5, 8, 6, 7], capacity=16)
    before = list(packing)
    equalize(packing, [5, 8, 6, 7], count=4)
    assert list(packing) == before


@st.composite
def cases(draw: st.DrawFn, most: int = 24) -> tuple[list[int], int, int, int | None]:
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=most))
    capacity = draw(st.integers(12, 40))
    cap = draw(st.none() | st.integers(1, 6))
    count = draw(st.integers(len(pack(lengths, capacity=capacity, max_documents=cap)), len(lengths)))
    return lengths, capacity, count, cap


@given(cases())
def test_splitting_is_the_slow_version(case: tuple[list[int], int, int, int | None]) -> None:
    lengths, capacity, count, cap = case
    packs = list(pack(lengths, capacity=capacity, max_documents=cap))
    assert cut(lengths, capacity, count, "tokens", cap) == split_by_tokens(packs, lengths, count)
    assert cut(lengths, capacity, count, "samples", cap) == split_by_samples(packs, count)


@settings(max_examples=300)
@given(cases(most=9))
def test_balanced_is_the_best_of_all_cuts(case: tuple[list[int], int, int, int | None]) -> None:
    lengths, capacity, count, cap = case
    packs = cut(lengths, capacity, count, "balanced", cap)
    assert complaints(packs, lengths, count, capacity, cap) == []
    assert max(sum(lengths[i] for i in one) for one in packs) == smallest_largest(lengths, count, cap)


@given(cases(), st.sampled_from(METHODS))
def test_equalizing_breaks_no_invariant(case: tuple[list[int], int, int, int | None], method: str) -> None:
    lengths, capacity, count, cap = case
    assert complaints(cut(lengths, capacity, count, method, cap), lengths, count, capacity, cap) == []


@given(cases(most=12))
def test_balanced_is_never_larger_than_splitting(case: tuple[list[int], int, int, int | None]) -> None:
    lengths, capacity, count, cap = case
    largest = {
        method: max(sum(lengths[i] for i in one) for one in cut(lengths, capacity, count, method, cap))
        for method in METHODS
    }
    assert largest["balanced"] <= min(largest.values())


@pytest.mark.parametrize("method", METHODS)
def test_a_hundred_thousand_samples_take_seconds(method: str) -> None:
    # Looking through all packs for each split, as the slow version does, would take hours.
    draw = random.Random(3)
    lengths = [draw.randint(1, 4096) for _ in range(100_000)]
    packing = pack(lengths, capacity=8192)
    start = time.process_time()
    result = equalize(packing, lengths, count=90_000, method=method)
    assert time.process_time() - start < 20
    assert len(result) == 90_000


def test_packs_that_lack_documents_or_hold_parts_are_not_cut_further() -> None:
    for overlong in ("drop", "truncate", "split"):
        packing = pack([9, 3, 2], capacity=4, overlong=overlong)
        with pytest.raises(PackError, match="only packs of whole documents, all of them, can be cut further"):
            equalize(packing, [9, 3, 2], count=4)

"""Which documents every strategy puts together, and that both kernels agree."""

import random
from array import array
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_core import LengthError, PackError, Packing, pack
from pack_core.kernels import packing_numpy
from support.packing_oracles import OVERLONG, STRATEGIES, cut_row, faults, fit, pieces

#: Strategy, lengths, packs of ten tokens; worked by hand.
WORKED = [
    # 6 | 7 joins no one | 4 and 3 | 5 does not fit with them.
    ("next_fit", [6, 7, 4, 3, 5, 2], [[0], [1], [2, 3], [4, 5]]),
    # The 4 goes back to the 6 and the 3 to the 7.
    ("first_fit", [6, 7, 4, 3, 5, 2], [[0, 2], [1, 3], [4, 5]]),
    ("first_fit", [4, 7, 3, 5, 1], [[0, 2, 4], [1], [3]]),
    # The 3 leaves 3 beside the 4, and nothing beside the 7.
    ("best_fit", [4, 7, 3, 5, 1], [[0, 3, 4], [1, 2]]),
    # Room for 4 twice: the earlier pack.
    ("best_fit", [6, 6, 4], [[0, 2], [1]]),
    # 8 | 7 | 5 4, then 3 to the 7, 2 to the 8, 1 to the rest of 5 4.
    ("first_fit_decreasing", [2, 5, 4, 7, 1, 3, 8], [[6, 0], [3, 5], [1, 2, 4]]),
    ("best_fit_decreasing", [2, 5, 4, 7, 1, 3, 8], [[6, 0], [3, 5], [1, 2, 4]]),
    # Equal documents stay as they came.
    ("first_fit_decreasing", [3, 3, 3, 3, 3], [[0, 1, 2], [3, 4]]),
    # 6 | 4 4 leaves 2, more than the first... the 2 still goes to the first pack with room.
    ("first_fit_decreasing", [6, 4, 4, 2], [[0, 1], [2, 3]]),
    # 5 4 | 4 3 2 | 2 by decreasing length; 5 3 2 | 4 4 2 has no gap.
    ("first_fit_decreasing", [5, 4, 4, 3, 2, 2], [[0, 1], [2, 3, 4], [5]]),
    ("best_fit_decreasing", [5, 4, 4, 3, 2, 2], [[0, 1], [2, 3, 4], [5]]),
    ("fewest", [5, 4, 4, 3, 2, 2], [[0, 3, 4], [1, 2, 5]]),
]

KERNELS = ["python", "numpy"]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("strategy", "lengths", "packs"), WORKED)
def test_the_packs_worked_by_hand(strategy: str, lengths: list[int], packs: list[list[int]], kernels: str) -> None:
    assert list(pack(lengths, capacity=10, strategy=strategy, kernels=kernels)) == packs


def test_best_fit_decreasing_takes_the_tightest_pack_and_first_fit_the_first() -> None:
    # In thirteens: 8 leaves 5, 6 6 leave 1. The 1 fits both.
    assert list(pack([8, 6, 6, 1], capacity=13, strategy="first_fit_decreasing")) == [[0, 3], [1, 2]]
    assert list(pack([8, 6, 6, 1], capacity=13, strategy="best_fit_decreasing")) == [[0], [1, 2, 3]]


@pytest.mark.parametrize("kernels", KERNELS)
def test_one_row_is_cut_where_packs_are_full(kernels: str) -> None:
    packing = pack([6, 8, 3], capacity=10, strategy="concat_split", kernels=kernels)
    assert pieces(packing, [6, 8, 3]) == [[(0, 0, 6), (1, 0, 4)], [(1, 4, 8), (2, 0, 3)]]
    assert packing.split == array("q", [1])
    assert not packing.truncated
    assert not packing.dropped


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_is_too_long_is_dropped_cut_short_or_split_and_listed(kernels: str) -> None:
    lengths = [11, 3, 25]
    dropped = pack(lengths, capacity=10, overlong="drop", kernels=kernels)
    assert list(dropped) == [[1]]
    assert (dropped.dropped.documents.tolist(), dropped.dropped.tokens.tolist()) == ([0, 2], [11, 25])
    assert dropped.dropped.total == 36
    short = pack(lengths, capacity=10, overlong="truncate", kernels=kernels)
    assert pieces(short, lengths) == [[(0, 0, 10)], [(1, 0, 3)], [(2, 0, 10)]]
    assert (short.truncated.documents.tolist(), short.truncated.tokens.tolist()) == ([0, 2], [1, 15])
    assert not short.split
    split = pack(lengths, capacity=10, overlong="split", kernels=kernels)
    assert pieces(split, lengths) == [
        [(0, 0, 10)],
        [(0, 10, 11), (1, 0, 3)],
        [(2, 0, 10)],
        [(2, 10, 20)],
        [(2, 20, 25)],
    ]
    assert split.split.tolist() == [0, 2]
    decreasing = pack(lengths, capacity=10, overlong="split", strategy="best_fit_decreasing", kernels=kernels)
    assert pieces(decreasing, lengths) == [
        [(0, 0, 10)],
        [(2, 0, 10)],
        [(2, 10, 20)],
        [(2, 20, 25), (1, 0, 3), (0, 10, 11)],
    ]


def test_every_document_dropped_leaves_no_pack() -> None:
    packing = pack([11, 12], capacity=10, overlong="drop", strategy="best_fit_decreasing")
    assert len(packing) == 0
    assert packing.dropped.total == 23


@pytest.mark.parametrize("kernels", KERNELS)
def test_room_is_taken_in_steps_of_the_alignment(kernels: str) -> None:
    # In steps of four a pack of ten has two; 3, 5 and 1 take one, two and one.
    assert list(pack([3, 5, 1], capacity=10, align=4, kernels=kernels)) == [[0], [1], [2]]
    assert list(pack([3, 5, 1], capacity=10, align=4, strategy="first_fit", kernels=kernels)) == [[0, 2], [1]]
    assert list(pack([3, 5, 1], capacity=10, align=4, strategy="fewest", kernels=kernels)) == [[1], [0, 2]]
    with pytest.raises(
        LengthError, match="position 1 has 9 tokens, which take more than the capacity of 10 when round"
    ):
        pack([3, 9], capacity=10, align=4, kernels=kernels)
    cut = pack([3, 9], capacity=10, align=4, overlong="truncate", kernels=kernels)
    assert pieces(cut, [3, 9]) == [[(0, 0, 3)], [(1, 0, 8)]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_too_long_is_an_error_unless_said_otherwise(strategy: str) -> None:
    with pytest.raises(LengthError, match=r"sample 'b' \(position 1\) has 11 tokens but capacity"):
        pack([3, 11], capacity=10, strategy=strategy, ids=["a", "b"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"overlong": "cut"}, "overlong is 'cut'; it must be one of 'error', 'drop', 'truncate', 'split'"),
        ({"align": 0}, "align is 0"),
        ({"align": 11}, "align is 11 but capacity is 10"),
        ({"attempts": -1}, "attempts is -1"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"kernels": "rust"}, "kernels are 'rust'"),
    ],
)
def test_an_option_that_cannot_be_is_refused(option: dict[str, object], message: str) -> None:
    with pytest.raises(PackError, match=message):
        pack([1, 2], capacity=10, **option)  # type: ignore[arg-type]


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=40) | st.lists(st.integers(1, 60), min_size=1, max_size=40)


@settings(max_examples=300)
@given(
    LENGTHS,
    st.integers(1, 130),
    st.none() | st.integers(1, 5),
    st.sampled_from([1, 1, 3, 8]),
    st.booleans(),
    st.booleans(),
)
def test_fitting_strategies_are_the_textbooks_pack_for_pack(
    lengths: list[int], capacity: int, most: int | None, align: int, best: bool, decreasing: bool
) -> None:
    rooms = [-(-length // align) for length in lengths]
    capacity = max([capacity, *(align * room for room in rooms)])
    strategy = ("best_fit" if best else "first_fit") + "_decreasing" * decreasing
    expected = fit(rooms, capacity // align, most, best=best, decreasing=decreasing)
    for kernels in KERNELS:
        found = pack(lengths, capacity=capacity, strategy=strategy, max_documents=most, align=align, kernels=kernels)
        assert list(found) == expected


@pytest.mark.parametrize("strategy", ["first_fit", "best_fit", "first_fit_decreasing", "best_fit_decreasing"])
@pytest.mark.parametrize("shape", ["narrow", "wide", "long", "half", "equal"])
def test_four_thousand_documents_are_the_textbooks_too(strategy: str, shape: str) -> None:
    draw = random.Random(f"{strategy} {shape}")
    low, high = {"narrow": (1, 60), "wide": (1, 1000), "long": (400, 1000), "half": (501, 1000), "equal": (330, 330)}[
        shape
    ]
    lengths = [draw.randint(low, high) for _ in range(4_000)]
    expected = fit(lengths, 1_000, best="best" in strategy, decreasing="decreasing" in strategy)
    for kernels in KERNELS:
        assert list(pack(lengths, capacity=1_000, strategy=strategy, kernels=kernels)) == expected


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
    st.integers(8, 30),
    st.none() | st.integers(1, 3),
    st.sampled_from([1, 2, 4, 5]),
    st.sampled_from(STRATEGIES),
)
def test_whatever_is_asked_every_token_is_packed_once_or_counted_lost(
    lengths: list[int], capacity: int, most: int | None, align: int, strategy: str
) -> None:
    for overlong in OVERLONG:
        if overlong == "error" and max(lengths) > capacity // align * align:
            continue
        asked = {"strategy": strategy, "overlong": overlong, "max_documents": most, "align": align}
        plain = pack(lengths, capacity=capacity, kernels="python", **asked)  # type: ignore[arg-type]
        assert faults(plain, lengths, capacity, overlong, most, align) == []
        assert pack(lengths, capacity=capacity, kernels="numpy", **asked) == plain  # type: ignore[arg-type]
        assert pack(lengths, capacity=capacity, kernels="python", **asked) == plain  # type: ignore[arg-type]
        packs = pieces(plain, lengths)
        if strategy == "concat_split" and overlong in ("error", "split"):
            assert packs == cut_row(lengths, capacity, most, align)
        for held in packs:
            if "decreasing" in strategy or strategy == "fewest":
                # Longest room first; as they arrive where rooms are the same.
                assert held == sorted(held, key=lambda piece: ((piece[1] - piece[2]) // align, piece))
            else:
                assert held == sorted(held)


def test_more_documents_than_the_tree_of_first_fit_begins_with() -> None:
    draw = random.Random(5)
    lengths = [draw.randint(300, 1000) for _ in range(3_000)]
    packing = pack(lengths, capacity=1_000, strategy="first_fit")
    assert len(packing) > 2_048
    assert list(packing) == fit(lengths, 1_000, best=False, decreasing=False)


@pytest.mark.parametrize("capacity", [70_000, 2**40])
def test_lengths_of_more_than_sixteen_bits_are_ranked_alike(capacity: int) -> None:
    draw = random.Random(capacity)
    lengths = [draw.randint(1, capacity) for _ in range(3_000)]
    lengths += lengths[:500]
    expected = fit(lengths, capacity, best=True, decreasing=True)
    for kernels in KERNELS:
        assert list(pack(lengths, capacity=capacity, strategy="best_fit_decreasing", kernels=kernels)) == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lengths_are_read_and_never_written(strategy: str) -> None:
    given = array("i", [5, 4, 4, 3, 2, 2, 30])
    pack(given, capacity=10, strategy=strategy, overlong="split", align=2, kernels="numpy")
    assert given == array("i", [5, 4, 4, 3, 2, 2, 30])


@pytest.mark.parametrize(
    ("documents", "longest"),
    [
        *[(1, 1), (2, 1), (3_000, 7), (5_000, 2**16), (5_000, 2**19), (4_097, 2**20)],
        *[(2**18, 2**15), (2**18 + 1, 2**15), (200_000, 20_000)],
    ],
)
def test_documents_are_ranked_alike_by_values_and_by_places(
    documents: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longest first, as they come on ties; from (5,000, 2**19) on a length and a place do not fit 32 bits together."""
    lengths = random.Random(5).choices(range(1, longest + 1), k=documents)
    wanted = sorted(range(documents), key=lambda place: -lengths[place])
    for sorts_values in (True, False):
        monkeypatch.setattr(packing_numpy, "_SORTS_VALUES", sorts_values)
        counts, ranked = packing_numpy.group(np.array(lengths, np.uint32))
        assert ranked.tolist() == wanted
        assert list(zip(counts.sizes, counts.counts, strict=True)) == sorted(Counter(lengths).items(), reverse=True)


@pytest.mark.parametrize("lengths", [[2**32], [2**32 - 1], [2**31, 1], [2**32, 2**32 - 1]])
def test_lengths_of_as_many_bits_as_a_code_are_ranked_too(lengths: list[int]) -> None:
    for kernels in ("numpy", "python"):
        packing = pack(lengths, capacity=2**34, strategy="best_fit_decreasing", kernels=kernels)
        assert list(packing) == [list(range(len(lengths)))]


def test_narrow_lengths_do_not_wrap() -> None:
    numpy = pytest.importorskip("numpy")
    lengths = numpy.array([255, 250, 6, 1], dtype=numpy.uint8)
    for strategy in STRATEGIES:
        for align in (1, 8):
            asked = {"capacity": 256, "strategy": strategy, "align": align}
            assert pack(lengths, kernels="numpy", **asked) == pack([255, 250, 6, 1], kernels="python", **asked)


def test_parts_must_lie_in_the_order() -> None:
    packing = pack([9], capacity=4, overlong="split")
    with pytest.raises(PackError, match="parts must lie at rising places from 0 to 1"):
        Packing(packing.order[:2], array("q", [0, 2]), parts=packing.parts)

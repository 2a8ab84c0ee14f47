"""Lower bounds, what a packing lacks to them, and the search that closes the gap."""

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_core import PackError, Packing, certify, pack
from pack_core.types import Lost, Parts
from support.packing_oracles import STRATEGIES, fewest_capped, fewest_packs


def test_the_bounds_worked_by_hand() -> None:
    # 33 tokens in tens are four packs; three documents are over half. A 5 fits beside no 6: three packs, and two of 5s.
    lengths = [6, 6, 6, 5, 5, 5]
    found = certify(pack(lengths, capacity=10, strategy="best_fit_decreasing"), lengths, capacity=10)
    assert (found.floors.continuous, found.floors.large, found.floors.martello_toth) == (4, 3, 5)
    assert (found.packs, found.floors.packs, found.over) == (5, 5, 0)
    assert found.fill == 33 / 50
    assert found.waste.unavoidable == found.waste.total == 17


def test_seven_documents_that_fit_by_threes_need_three_packs() -> None:
    # 7 times 30 in hundreds are 2.1 packs, and none is large; four of them, each over a fourth, fit no pack.
    found = certify(pack([30] * 7, capacity=100), [30] * 7, capacity=100).floors
    assert (found.continuous, found.large, found.martello_toth, found.fekete_schepers) == (3, 0, 3, 3)
    found = certify(pack([30] * 10, capacity=100), [30] * 10, capacity=100).floors
    assert (found.continuous, found.martello_toth, found.fekete_schepers) == (3, 3, 4)


def test_documents_a_pack_are_a_bound_too() -> None:
    found = certify(pack([1] * 7, capacity=10, max_documents=3), [1] * 7, capacity=10, max_documents=3)
    assert (found.floors.continuous, found.floors.documents, found.over) == (1, 3, 0)


def test_waste_by_cause_worked_by_hand() -> None:
    # 3, 5 and 1 take 4, 8 and 4 of the usable 8 of ten: two packs suffice, next-fit has three.
    found = certify(pack([3, 5, 1], capacity=10, align=4), [3, 5, 1], capacity=10, align=4)
    waste = found.waste
    assert (found.tokens, found.room, found.over) == (9, 30, 1)
    assert (waste.alignment, waste.remainder, waste.unavoidable, waste.packs) == (7, 6, 0, 8)
    assert waste.total == 21


def test_what_was_lost_is_in_the_certificate() -> None:
    found = certify(pack([11, 3], capacity=10, overlong="drop"), [11, 3], capacity=10)
    assert (found.tokens, found.dropped, found.truncated) == (3, 11, 0)
    found = certify(pack([11, 3], capacity=10, overlong="truncate"), [11, 3], capacity=10)
    assert (found.tokens, found.dropped, found.truncated) == (13, 0, 1)
    nothing = certify(pack([11], capacity=10, overlong="drop"), [11], capacity=10)
    assert (nothing.packs, nothing.over, nothing.fill, nothing.dropped) == (0, 0, 1.0, 11)


@pytest.mark.parametrize(
    ("order", "offsets", "message"),
    [
        ([0, 1, 2], [0, 3], "pack 0 takes 12 tokens of room; the capacity allows 10"),
        ([0, 1, 1], [0, 1, 2, 3], "each once"),
        ([0, 1], [0, 1, 2], "3 documents should lie whole in the packs, each once; 2 places hold"),
        ([0, 1, 3], [0, 1, 2, 3], "order holds documents 0 to 3 but lengths are 0 to 2"),
    ],
)
def test_no_certificate_for_broken_packs(order: list[int], offsets: list[int], message: str) -> None:
    with pytest.raises(PackError, match=message):
        certify(Packing(array("q", order), array("q", offsets)), [6, 4, 2], capacity=10)


def test_no_certificate_for_a_document_that_is_both_dropped_and_packed() -> None:
    packing = Packing(array("q", [0]), array("q", [0, 1]), dropped=Lost(array("q", [0]), array("q", [6])))
    with pytest.raises(PackError, match="1 places hold documents that were cut or dropped, but 0 are named as parts"):
        certify(packing, [6, 4], capacity=10)


def test_no_certificate_for_parts_that_leave_tokens_out() -> None:
    packing = pack([9, 2], capacity=4, overlong="split")
    with pytest.raises(PackError, match="document 0 has 8 tokens: 9 are in packs as parts and 0 are counted as lost"):
        certify(packing, [8, 2], capacity=4)
    with pytest.raises(PackError, match="max_documents is 1"):
        certify(packing, [9, 2], capacity=4, max_documents=1)


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(8, 40),
    st.none() | st.integers(1, 3),
    st.sampled_from([1, 4]),
    st.sampled_from(["drop", "truncate", "split"]),
    st.sampled_from(STRATEGIES),
)
def test_waste_adds_up_and_both_kernels_certify_alike(
    lengths: list[int], capacity: int, most: int | None, align: int, overlong: str, strategy: str
) -> None:
    asked = {"capacity": capacity, "max_documents": most, "align": align}
    packing = pack(lengths, strategy=strategy, overlong=overlong, **asked)  # type: ignore[arg-type]
    found = certify(packing, lengths, kernels="python", **asked)  # type: ignore[arg-type]
    assert certify(packing, lengths, kernels="numpy", **asked) == found  # type: ignore[arg-type]
    waste = found.waste
    assert waste.total == found.room - found.tokens == len(packing) * capacity - found.tokens
    assert min(waste.alignment, waste.remainder, waste.unavoidable, waste.packs) >= 0
    assert found.tokens + found.dropped + found.truncated == sum(lengths)


def instances(count: int, most: int) -> list[tuple[list[int], int]]:
    """Few documents of several kinds; every third fills its packs exactly, which greedy strategies miss most."""
    draw = random.Random(12)
    drawn = []
    for turn in range(count):
        capacity = draw.choice([10, 30, 100, 1000])
        if turn % 3 == 0:
            lengths = []
            while len(lengths) + 4 <= most:
                cuts = sorted(draw.sample(range(1, capacity), draw.choice([2, 3])))
                lengths += [b - a for a, b in zip([0, *cuts], [*cuts, capacity], strict=True)]
            draw.shuffle(lengths)
        else:
            low, high = draw.choice([(1, capacity), (capacity // 5, capacity // 2), (capacity // 4, capacity * 2 // 3)])
            lengths = [draw.randint(max(low, 1), high) for _ in range(draw.randint(1, most))]
        drawn.append((lengths, capacity))
    return drawn


def test_few_documents_are_packed_as_well_as_can_be_and_no_bound_is_beaten() -> None:
    drawn = instances(150, 12)
    decreasing = optimal = 0
    for lengths, capacity in drawn:
        least = fewest_packs(lengths, capacity)
        found = certify(pack(lengths, capacity=capacity, strategy="fewest"), lengths, capacity=capacity)
        assert found.floors.packs <= least <= found.packs
        optimal += found.packs == least
        decreasing += len(pack(lengths, capacity=capacity, strategy="best_fit_decreasing")) == least
    assert optimal >= 0.99 * len(drawn)
    assert decreasing < 0.95 * len(drawn)  # these are cases that tell the two apart


def test_few_documents_with_a_cap_are_packed_as_well_as_can_be() -> None:
    drawn = instances(60, 8)
    optimal = 0
    for turn, (lengths, capacity) in enumerate(drawn):
        most = 2 + turn % 3
        least = fewest_capped(lengths, capacity, most)
        packing = pack(lengths, capacity=capacity, strategy="fewest", max_documents=most)
        found = certify(packing, lengths, capacity=capacity, max_documents=most)
        assert found.floors.packs <= least <= found.packs
        optimal += found.packs == least
    assert optimal >= 0.99 * len(drawn)


def test_patterns_close_a_gap_that_decreasing_strategies_leave() -> None:
    draw = random.Random(3)
    lengths = [draw.randint(30, 400) for _ in range(3_000)]
    decreasing = certify(pack(lengths, capacity=1_000, strategy="best_fit_decreasing"), lengths, capacity=1_000)
    fewest = certify(pack(lengths, capacity=1_000, strategy="fewest"), lengths, capacity=1_000)
    assert decreasing.over > 0
    assert fewest.over == 0


def test_a_cap_that_binds_is_met_where_decreasing_strategies_waste_places() -> None:
    # Two documents a pack: longest with shortest is ten packs, and first fit puts the small ones together.
    lengths = [9] * 10 + [1] * 10
    assert len(pack(lengths, capacity=10, strategy="fewest", max_documents=2)) == 10
    draw = random.Random(9)
    many = [draw.randint(1, 60) for _ in range(800)]
    found = certify(pack(many, capacity=256, strategy="fewest", max_documents=8), many, capacity=256, max_documents=8)
    assert found.over == 0


def test_no_attempts_leave_the_better_of_the_decreasing_strategies() -> None:
    assert len(pack([5, 4, 4, 3, 2, 2], capacity=10, strategy="fewest", attempts=0)) == 3
    assert len(pack([5, 4, 4, 3, 2, 2], capacity=10, strategy="fewest", attempts=1)) == 2


def test_the_same_seed_gives_the_same_packs() -> None:
    draw = random.Random(4)
    lengths = [draw.randint(251, 499) for _ in range(150)]  # triples, hard to fill
    first = pack(lengths, capacity=1_000, strategy="fewest", seed=1, attempts=6, kernels="python")
    assert pack(lengths, capacity=1_000, strategy="fewest", seed=1, attempts=6, kernels="numpy") == first
    assert (
        certify(first, lengths, capacity=1_000).over
        <= certify(pack(lengths, capacity=1_000, strategy="best_fit_decreasing"), lengths, capacity=1_000).over
    )


def test_tables_of_what_was_lost_or_cut_have_columns_of_one_length() -> None:
    with pytest.raises(PackError, match="1 documents but 0 counts of tokens"):
        Lost(array("q", [0]))
    with pytest.raises(PackError, match="1 places, 1 starts and 0 stops were given"):
        Parts(array("q", [0]), array("q", [0]))

"""A step laid out: what a swap would do and what it does, against laying everything out anew."""

import random
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pack_core.search.layout import Layout, Rules, Swap
from support.search_oracles import drawn_lengths, lay

METHODS = ["tokens", "samples", "balanced"]


def works(laid: list[list[list[int]]], lengths: list[int]) -> tuple[int, int]:
    packs = range(len(laid[0]))
    return (
        sum(max(sum(lengths[i] for i in rank[p]) for rank in laid) for p in packs),
        sum(max(sum(lengths[i] ** 2 for i in rank[p]) for rank in laid) for p in packs),
    )


def packs_of(layout: Layout) -> list[list[list[int]]]:
    return [[layout.members(rank, p) for p in range(layout.packs)] for rank in range(layout.rules.ranks)]


def exchanged(order: tuple[int, ...], first: int, second: int) -> list[int]:
    return [second if i == first else first if i == second else i for i in order]


def test_eight_samples_on_two_ranks() -> None:
    # Rank 0 holds 17 19 23 29 in one pack of 88, split at 36 | 52 because rank 1 (87 + 13, 89 + 11) needs two.
    lengths = [17, 87, 19, 13, 23, 89, 29, 11]
    layout = Layout(range(8), lengths, Rules(2, 128, "tokens", None))
    assert packs_of(layout) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert (layout.packs, layout.tokens, layout.token_work) == (2, [[36, 100], [52, 100]], 200)
    assert layout.squares == [[289 + 361, 7569 + 169], [529 + 841, 7921 + 121]]
    assert layout.pair_work == 7738 + 8042
    assert (layout.rank_of, layout.pack_of) == ([0, 1] * 4, [0, 0, 0, 0, 1, 1, 1, 1])
    assert layout.order() == tuple(range(8))
    assert layout.largest_without(squares=False) == [[100, 36], [100, 52]]


def test_swaps_worked_by_hand() -> None:
    # Rank 0 holds 6 3 | 8, rank 1 holds 4 5 | 9, both cut where 10 tokens are full.
    lengths = [6, 4, 3, 5, 8, 9]
    layout = Layout(range(6), lengths, Rules(2, 10, "tokens", None))
    assert packs_of(layout) == [[[0, 2], [4]], [[1, 3], [5]]]
    assert (layout.token_work, layout.pair_work) == (9 + 9, 45 + 81)
    assert layout.weigh(0, 2) == "same_pack"
    # 5 and 3 change places: 11 tokens do not fit in rank 0, which then needs three packs.
    assert layout.weigh(2, 3) == "packs_per_rank"
    # 6 and 4 change places: 7 and 11 tokens: no.
    assert layout.weigh(0, 1) == "packs_per_rank"
    # 8 and 9 change places: nothing is worth more or less, but the packs change.
    assert layout.weigh(4, 5) == Swap(4, 5, "fixed", 18, 126, ((0, 1, (4,), (5,)), (1, 1, (5,), (4,))))
    # 3 and 4 change places: rank 0 holds 6 4 | 8, rank 1 holds 3 5 | 9: 10 and 9 tokens, 52 and 81 squares.
    assert layout.weigh(1, 2) == Swap(1, 2, "fixed", 19, 133, ((1, 0, (1,), (2,)), (0, 0, (2,), (1,))))


@pytest.mark.parametrize(("short", "packs"), [(1, 1), (2, "packs_per_rank")])
def test_a_swap_that_saves_a_pack_lays_everything_out_anew(short: int, packs: int | str) -> None:
    # Rank 0 holds 6 5 (11 tokens, two packs), rank 1 holds 4 and `short`. With 6 for 4 both hold 9 or fewer: one pack.
    lengths = [6, 4, 5, short]
    layout = Layout(range(4), lengths, Rules(2, 10, "tokens", None))
    swap = layout.weigh(2, 3)
    assert isinstance(swap, Swap)
    assert (swap.path, swap.token_work, swap.pair_work) == ("global", max(6 + short, 9), max(36 + short**2, 41))
    assert swap.layout is not None
    assert packs_of(swap.layout) == [[[0, 3]], [[1, 2]]]
    assert layout.packs == 2  # weighing touched nothing


def test_one_rank_can_be_cut_anew() -> None:
    # 6 | 5 3 | 7: with 7 in the place of 5 it is 6 | 7 3 | 5, with 3 in the place of 6 it is 3 5 | 6 | 7.
    layout = Layout(range(4), [6, 5, 3, 7], Rules(1, 10, "tokens", None))
    assert packs_of(layout) == [[[0], [1, 2], [3]]]
    swap = layout.weigh(1, 3)
    assert isinstance(swap, Swap)
    assert (swap.path, swap.changes) == ("fixed", [(0, 1, [1], [3]), (0, 2, [3], [1])])
    swap = layout.weigh(0, 2)
    assert isinstance(swap, Swap)
    assert (swap.path, swap.changes) == ("columns", [(0, 0, [0], [2, 1]), (0, 1, [1, 2], [0])])


def check_every_swap(layout: Layout, lengths: list[int], cap: int | None) -> Counter[str]:
    rules, order = layout.rules, layout.order()
    before = lay(order, lengths, rules.ranks, rules.capacity, rules.equalize, cap)
    assert packs_of(layout) == before
    paths: Counter[str] = Counter()
    for first, second in combinations(range(len(lengths)), 2):
        swap = layout.weigh(first, second)
        after = lay(exchanged(order, first, second), lengths, rules.ranks, rules.capacity, rules.equalize, cap)
        together = any(first in one and second in one for rank in before for one in rank)
        if together:
            assert swap == "same_pack"
        elif len(after[0]) > len(before[0]):
            assert swap == "packs_per_rank"
        else:
            assert isinstance(swap, Swap)
            assert (swap.first, swap.second) == (first, second)
            assert (swap.token_work, swap.pair_work) == works(after, lengths)
            if len(after[0]) < len(before[0]):
                assert swap.path == "global"
                assert swap.layout is not None
                assert packs_of(swap.layout) == after
            else:
                sizes = [[list(map(len, rank)) for rank in laid] for laid in (before, after)]
                assert swap.path == ("fixed" if sizes[0] == sizes[1] else "columns")
                assert changes_of(swap) == differences(before, after)
        paths[swap if isinstance(swap, str) else swap.path] += 1
    assert packs_of(layout) == before
    return paths


Moves = dict[tuple[int, int], tuple[set[int], set[int]]]


def changes_of(swap: Swap) -> Moves:
    found = {(rank, p): (set(removed), set(added)) for rank, p, removed, added in swap.changes}
    assert len(found) == len(swap.changes)
    return found


def differences(before: list[list[list[int]]], after: list[list[list[int]]]) -> Moves:
    moves = {}
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        for p, (one, other) in enumerate(zip(old, new, strict=True)):
            if set(one) != set(other):
                moves[rank, p] = (set(one) - set(other), set(other) - set(one))
    return moves


@pytest.mark.parametrize("method", METHODS)
def test_every_swap_is_what_laying_out_anew_gives(method: str) -> None:
    draw = random.Random(len(method))
    paths: Counter[str] = Counter()
    for _ in range(60):
        ranks = draw.choice([1, 2, 3, 4])
        lengths = drawn_lengths(draw, ranks * draw.randint(1, 16 // ranks), 20)
        cap = draw.choice([None, None, 1, 2, 3])
        order = draw.sample(range(len(lengths)), len(lengths))
        rules = Rules(ranks, max(lengths) + draw.randint(0, 25), method, cap)
        paths += check_every_swap(Layout(order, lengths, rules), lengths, cap)
    assert min(paths[one] for one in ("fixed", "columns", "global", "same_pack", "packs_per_rank")) > 10, paths


@given(st.lists(st.integers(1, 12), min_size=8, max_size=8), st.integers(12, 30), st.sampled_from(METHODS))
def test_every_swap_of_small_steps_is_what_laying_out_anew_gives(
    lengths: list[int], capacity: int, method: str
) -> None:
    check_every_swap(Layout(range(8), lengths, Rules(2, capacity, method, None)), lengths, None)


def cached(layout: Layout) -> dict[str, object]:
    values = dict(vars(layout))
    values["_cuts"] = [(cut.column, list(cut.offsets), cut.needed) for cut in layout._cuts]
    return values


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cap", [None, 3])
def test_after_hundreds_of_swaps_every_cached_value_is_that_of_a_fresh_layout(method: str, cap: int | None) -> None:
    draw = random.Random(17)
    lengths = [draw.randint(1, 30) for _ in range(40)]
    rules = Rules(4, 60, method, cap)
    layout = Layout(range(40), lengths, rules)
    applied: Counter[str] = Counter()
    while applied.total() < 250:
        swap = layout.weigh(*draw.sample(range(40), 2))
        if isinstance(swap, str):
            continue
        order = exchanged(layout.order(), swap.first, swap.second)
        if swap.layout is None:
            layout.apply(swap)
        else:
            layout = swap.layout
        applied[swap.path] += 1
        assert layout.order() == tuple(order)
        assert cached(layout) == cached(Layout(order, lengths, rules))
    assert applied["fixed"] > 20
    assert applied["columns"] > 5


def test_the_largest_of_the_others_is_found_among_equals() -> None:
    # Packs of 5, 5, 3 and 1 tokens: without rank 0 or 1 the largest is still 5.
    layout = Layout(range(4), [5, 5, 3, 1], Rules(4, 5, "tokens", None))
    assert layout.largest_without(squares=False) == [[5, 5, 5, 5]]
    layout = Layout(range(4), [5, 4, 3, 1], Rules(4, 5, "tokens", None))
    assert layout.largest_without(squares=True) == [[16, 25, 25, 25]]

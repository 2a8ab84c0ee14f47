"""Samples to ranks, and steps without an order: by hand, against slow versions, and against every way there is."""

import math
import random
from array import array
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_core import CountError, LengthError, PackError, balance, schedule
from pack_core.balancing import evened
from pack_core.filling import dealt, filled
from support.step_oracles import best_steps, fill, least_largest, step_faults

LINEAR = 24_576


def works_of(lengths: list[int], linear: int = LINEAR) -> list[int]:
    return [linear * length + length**2 for length in lengths]


def test_ten_samples_on_two_ranks() -> None:
    # 10 to 1 sum to 55: 28 and 27 at best. By squares 385: 193 and 192.
    lengths = list(range(10, 0, -1))
    for equal in (True, False):
        shares = balance(lengths, 2, equal_counts=equal)
        assert sorted(sum(lengths[i] for i in share) for share in shares) == [27, 28]
        assert {len(share) for share in shares} == {5} or not equal
    shares = balance(lengths, 2, "quadratic")
    assert max(sum(lengths[i] ** 2 for i in share) for share in shares) <= 194


def test_what_is_evened_out_is_what_was_asked_for() -> None:
    # As tokens 4 and 1 1 1 1 are the same; as squares 16 and 4 are not; as work of 2 a token, 24 and 12.
    lengths = [4, 1, 1, 1, 1]
    assert balance(lengths, 2, equal_counts=False) == ((0,), (1, 2, 3, 4))
    # Of 3 3 2 2 with two samples each, whatever is asked for, 3 2 and 3 2.
    for objective in ("tokens", "quadratic", "work"):
        shares = balance([3, 3, 2, 2], 2, objective)
        assert [sorted((3, 3, 2, 2)[i] for i in share) for share in shares] == [[2, 3], [2, 3]]
    # 6 5 and 4 4 4 weigh 11 and 12; by squares 61 and 48, where 6 4 and 5 4 4 weigh 52 and 57.
    assert balance([6, 5, 4, 4, 4], 2, equal_counts=False) == ((0, 1), (2, 3, 4))
    squares = balance([6, 5, 4, 4, 4], 2, "quadratic", equal_counts=False)
    assert sorted(sum((36, 25, 16, 16, 16)[i] for i in share) for share in squares) == [52, 57]
    # Work lies between the two: with nothing linear it is the square, with very much it is the tokens.
    assert balance([6, 5, 4, 4, 4], 2, "work", equal_counts=False, linear=0) == squares
    assert balance([6, 5, 4, 4, 4], 2, "work", equal_counts=False, linear=10**9) == ((0, 1), (2, 3, 4))


def test_the_best_of_every_way_is_met_or_nearly() -> None:
    draw = random.Random(3)
    met = 0
    for _ in range(60):
        ranks = draw.choice([2, 3])
        lengths = [draw.randint(1, 60) for _ in range(draw.choice([2, 3]) * ranks if ranks == 2 else 6)]
        for equal, objective in product([True, False], ["tokens", "quadratic", "work"]):
            costs = {"tokens": lengths, "quadratic": [n * n for n in lengths], "work": works_of(lengths)}[objective]
            shares = balance(lengths, ranks, objective, equal)
            assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
            assert all(shares)
            largest, best = max(sum(costs[i] for i in share) for share in shares), least_largest(costs, ranks, equal)
            assert best <= largest <= 1.15 * best
            met += largest == best
    assert met >= 0.95 * 360


@settings(max_examples=100)
@given(
    st.integers(1, 5), st.integers(1, 8), st.integers(0, 4), st.sampled_from(["tokens", "quadratic", "work"]), st.data()
)
def test_shares_keep_what_they_promise(ranks: int, rows: int, more: int, objective: str, data: st.DataObject) -> None:
    size = ranks * rows + more
    lengths = data.draw(st.lists(st.integers(1, 500), min_size=size, max_size=size))
    equal = size % ranks == 0
    shares = balance(lengths, ranks, objective, equal)
    assert sorted(i for share in shares for i in share) == list(range(size))
    assert len(shares) == ranks
    assert all(list(share) == sorted(share) and share for share in shares)
    assert not equal or {len(share) for share in shares} == {size // ranks}
    assert balance(array("i", lengths), ranks, objective, equal) == shares
    costs = {"tokens": lengths, "quadratic": [n * n for n in lengths], "work": works_of(lengths)}[objective]
    # No worse than longest first to the lightest, whose largest sum is over the mean by less than one sample.
    if not equal:
        assert max(sum(costs[i] for i in share) for share in shares) < sum(costs) / ranks + max(costs)


@pytest.mark.parametrize(
    ("lengths", "ranks", "options", "message"),
    [
        ([1, 2, 3], 2, {}, "3 samples do not give 2 ranks the same number each; use a multiple of 2"),
        ([1], 2, {"equal_counts": False}, "1 samples cannot give each of 2 ranks a sample, none empty"),
        ([1, 2], 2, {"objective": "time"}, "objective is 'time'; it must be one of 'tokens', 'quadratic', 'work'"),
        ([1, 2], 0, {}, "ranks is 0"),
        ([1, 2], 2, {"linear": -1}, "linear is -1"),
        ([], 1, {}, "0 samples cannot give each of 1 ranks a sample"),
        ([1, 0], 2, {}, "position 1 has length 0"),
    ],
)
def test_what_cannot_be_balanced_is_refused(
    lengths: list[int], ranks: int, options: dict[str, object], message: str
) -> None:
    with pytest.raises(PackError, match=message):
        balance(lengths, ranks, **options)  # type: ignore[arg-type]


def test_a_group_gives_what_brings_two_nearest() -> None:
    # 9 6 and 4 3 differ by 8: 6 for 3 leaves 12 and 10. Full at 9, the second may only take 6 for 4.
    costs = [9, 6, 4, 3]
    assert evened([[0, 1], [2, 3]], costs, costs) == [[3, 0], [2, 1]]
    assert evened([[0, 1], [2, 3]], costs, costs, capacity=9) == [[2, 0], [3, 1]]
    # Alone, a 3 goes from 5 3 to 1; a group of one keeps its one.
    assert evened([[0, 1], [2]], [5, 3, 1], [5, 3, 1]) == [[0], [2, 1]]
    # Where it may not, 5 for 1 leaves 4 and 5.
    assert evened([[0, 1], [2]], [5, 3, 1], [5, 3, 1], most=1) == [[2, 1], [0]]
    assert evened([[0], [1]], [5, 1], [5, 1]) == [[0], [1]]


def test_five_samples_are_filled_together() -> None:
    # 9 and 7 lie beside each other, then 6; the 3 and the 2 fit beside it, as both cost less than it.
    step = schedule([9, 7, 6, 3, 2], 2, 10)
    assert step.packs == (((0,), (3, 4)), ((1,), (2,)))
    # In packs of 12 one position is enough to hold 27: no. In 14 it is: 9 and 7, 6 to the 7, 3 to the 9, 2 to the 9.
    assert schedule([9, 7, 6, 3, 2], 2, 14).packs == (((0, 3, 4),), ((1, 2),))


def test_verls_forty_tokens_in_packs_of_ten() -> None:
    # Five sixes, of which no two fit together, although 30 tokens would fill three packs.
    step = schedule([6, 6, 6, 6, 6], 1, 10)
    assert step.packs_per_rank == 5
    # Seven sevens and one more in eights on two ranks: four packs each.
    assert schedule([7] * 8, 2, 8).packs_per_rank == 4


def test_a_pack_that_would_be_empty_takes_a_sample_of_another() -> None:
    # 8 | 8 on each rank; the 1 opens the third position, which the second rank has nothing for, beside 7 2 or 8 1.
    step = schedule([8, 8, 8, 7, 2, 1, 1], 2, 9, max_documents=2)
    assert step_faults(step.packs, [8, 8, 8, 7, 2, 1, 1], 9, 2) == []
    assert step.packs_per_rank == 2
    step = schedule([5, 5, 5, 5, 5, 5, 1, 1, 1], 3, 6)
    assert (step.packs_per_rank, step_faults(step.packs, [5, 5, 5, 5, 5, 5, 1, 1, 1], 6)) == (2, [])
    step = schedule([5, 5, 5, 1, 1, 5], 3, 7)
    assert (step.packs_per_rank, step_faults(step.packs, [5, 5, 5, 1, 1, 5], 7)) == (2, [])


@pytest.mark.parametrize(
    ("lengths", "ranks", "capacity", "error", "message"),
    [
        ([9, 9, 9], 2, 10, CountError, "3 samples cannot give each of 2 ranks 2 packs, none empty; that takes 4"),
        ([9], 2, 10, CountError, "1 samples cannot give each of 2 ranks a sample"),
        ([3, 11], 2, 10, LengthError, "position 1 has 11 tokens but capacity"),
    ],
)
def test_a_step_that_cannot_be_is_refused(
    lengths: list[int], ranks: int, capacity: int, error: type[PackError], message: str
) -> None:
    with pytest.raises(error, match=message):
        schedule(lengths, ranks, capacity)
    with pytest.raises(PackError, match="linear is -2"):
        schedule([1, 2], 1, 8, linear=-2)


LENGTHS = st.lists(st.integers(1, 40) | st.sampled_from([1, 20, 39, 40]), min_size=1, max_size=40)


@settings(max_examples=200)
@given(LENGTHS, st.integers(1, 4), st.integers(40, 90), st.none() | st.integers(1, 4), st.sampled_from([0, 30, LINEAR]))
def test_every_step_keeps_what_it_promises(
    lengths: list[int], ranks: int, capacity: int, most: int | None, linear: int
) -> None:
    try:
        step = schedule(lengths, ranks, capacity, max_documents=most, linear=linear)
    except CountError:
        # Even the fewest packs, in whole rows of ranks, are more than there are samples; or first-fit's are.
        needed = len(filled(sorted(range(len(lengths)), key=lambda i: -lengths[i]), lengths, capacity, most=most) or [])
        assert len(lengths) < ranks or ranks * -(-needed // ranks) > len(lengths) - ranks
        return
    assert step_faults(step.packs, lengths, capacity, most) == []
    works = works_of(lengths, linear)
    heaviest = [max(sum(works[i] for i in one) for one in packs) for packs in zip(*step.packs, strict=True)]
    assert heaviest == sorted(heaviest, reverse=True)
    assert all(list(one) == sorted(one) for packs in step.packs for one in packs)
    assert schedule(array("q", lengths), ranks, capacity, max_documents=most, linear=linear) == step


@settings(max_examples=300)
@given(
    LENGTHS,
    st.integers(1, 4),
    st.integers(40, 120),
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 8),
    st.sampled_from([0, 30, LINEAR]),
)
def test_filling_together_is_the_slow_version(
    lengths: list[int], ranks: int, capacity: int, most: int | None, count: int | None, linear: int
) -> None:
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    found = filled(order, lengths, capacity, ranks=ranks, count=count, most=most, linear=linear)
    assert found == fill(order, lengths, capacity, ranks, count, most, linear)


def test_small_steps_are_near_the_best_there_is() -> None:
    draw = random.Random(11)
    few, ratios = 0, []
    for _ in range(60):
        ranks, capacity = draw.choice([2, 3]), 60
        lengths = [min(60, int(draw.lognormvariate(3, 0.7)) + 1) for _ in range(8)]
        works = works_of(lengths, 20)
        best = best_steps(lengths, ranks, capacity, works)
        step = schedule(lengths, ranks, capacity, linear=20)
        assert step_faults(step.packs, lengths, capacity) == []
        few += step.packs_per_rank == min(best)
        heaviest = sum(max(sum(works[i] for i in one) for one in packs) for packs in zip(*step.packs, strict=True))
        assert heaviest >= best[step.packs_per_rank]
        ratios.append(heaviest / best[step.packs_per_rank])
    assert few >= 58
    assert sum(ratios) / len(ratios) < 1.03


@pytest.mark.parametrize(("samples", "capacity"), [(512, 32_768), (512, 65_536), (4_096, 32_768), (4_096, 65_536)])
def test_tokens_work_and_positions_are_even_at_once(samples: int, capacity: int) -> None:
    losses: list[float] = []
    ranks_off: list[float] = []
    numpy = pytest.importorskip("numpy")
    for seed in range(20 if samples == 512 else 1):
        drawn = numpy.exp(numpy.random.default_rng(seed).normal(math.log(8_192), 0.8, samples))
        lengths = numpy.clip(drawn, 64, 32_768).astype(int).tolist()
        works = works_of(lengths)
        step = schedule(lengths, 8, capacity)
        assert step_faults(step.packs, lengths, capacity) == []
        assert step.packs_per_rank <= -(-sum(lengths) // (8 * capacity)) + 1
        held = [[sum(works[i] for i in one) for one in packs] for packs in step.packs]
        tokens = [sum(lengths[i] for one in packs for i in one) for packs in step.packs]
        mean = sum(works) / 8
        losses.append(sum(map(max, zip(*held, strict=True))) / mean - 1)
        ranks_off.append(max(map(sum, held)) / mean - 1)
        assert max(tokens) / (sum(lengths) / 8) - 1 < 0.01
    assert sorted(losses)[len(losses) // 2] < (0.01 if samples == 512 else 0.003)
    assert sorted(ranks_off)[len(ranks_off) // 2] < 0.005


def test_dealing_gives_equal_counts_whatever_the_rest() -> None:
    # 9 8 | 7 6 | 5: the 7 joins the 8, the 6 the 9; then 15 and 15, and the 5 goes to the first.
    assert dealt([9, 8, 7, 6, 5], 2) == [[0, 3, 4], [1, 2]]

"""Advantages by group: hand-worked, in any order, and what is refused."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pack_torch import grpo_advantages


def test_two_interleaved_groups_by_hand() -> None:
    assert grpo_advantages([1.0, 10.0, 3.0, 10.0, 2.0], ["a", "b", "a", "b", "a"]) == [-1.0, 0.0, 1.0, 0.0, 0.0]


def test_standard_deviation_is_unbiased_and_kept_from_zero() -> None:
    # Rewards 1 and 3: mean 2, unbiased deviation sqrt(2). A flat group and a single sample are only centred.
    found = grpo_advantages([1.0, 3.0, 5.0, 5.0, 7.0], [0, 0, 1, 1, 2], std_normalization=True)

    scale = math.sqrt(2.0) + 1e-6
    assert found == pytest.approx([-1 / scale, 1 / scale, 0.0, 0.0, 0.0], abs=1e-15)


@given(
    st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 3)), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_any_order_gives_each_sample_the_very_same_advantage(rows, random, normalize) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(rows)))
    random.shuffle(order)

    found = grpo_advantages([r for r, _ in rows], [g for _, g in rows], std_normalization=normalize)
    shuffled = grpo_advantages([rows[i][0] for i in order], [rows[i][1] for i in order], std_normalization=normalize)

    assert shuffled == [found[i] for i in order]


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 3)), min_size=1, max_size=20))
def test_the_standard_library_agrees(rows: list[tuple[int, int]]) -> None:
    found = grpo_advantages([float(r) for r, _ in rows], [g for _, g in rows], std_normalization=True)

    for (reward, group), advantage in zip(rows, found, strict=True):
        mates = [r for r, g in rows if g == group]
        spread = statistics.stdev(mates) if len(mates) > 1 else 0.0
        expected = (reward - statistics.mean(mates)) / (spread + 1e-6 if spread > 0 else 1.0)
        assert advantage == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_nothing_in_nothing_out() -> None:
    assert grpo_advantages([], []) == []


@pytest.mark.parametrize(
    ("rewards", "groups", "message"),
    [
        ([1.0], [], "1 rewards and 0 groups"),
        ([1.0, 2.0], ["a", None], "position 1 has no group"),
        ([1.0, math.nan], ["a", "a"], "position 1 has reward nan"),
        ([math.inf], ["a"], "position 0 has reward inf"),
    ],
)
def test_what_cannot_be_compared_is_refused(rewards: list[float], groups: list[str | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grpo_advantages(rewards, groups)

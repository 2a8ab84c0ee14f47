"""Numerators and denominators of every reduction by hand, over every kind of mask, and of any cut."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_torch import GroupSizes, Normalization, build_batch, group_sizes, normalization, reduce_tokens
from support.loss_cases import (
    RandomStep,
    active_only,
    active_values,
    naive_reduction,
    random_steps,
    rollout,
    row_of_every_mask_kind,
)

REDUCTIONS = ["token", "response", "group", "constant"]

# a: 1 and 4 (one masked between), mean 2.5; b: fully masked; c: empty; d: 3; e: 2 and 6, mean 4.
# a and b are of group p, the others of group q.
VALUES = [1.0, 4.0, 3.0, 2.0, 6.0]


@pytest.mark.parametrize(
    ("reduction", "masked_samples", "numerator", "denominator"),
    [
        ("token", "count", 1 + 4 + 3 + 2 + 6, 5),
        ("token", "skip", 16, 5),
        ("token", "miles", 16, 5 + 2),  # b and c add a token each
        ("response", "count", 2.5 + 0 + 0 + 3 + 4, 5),
        ("response", "skip", 9.5, 3),
        ("response", "miles", 9.5, 5),
        ("group", "count", (2.5 + 0) / 2 + (0 + 3 + 4) / 3, 2),
        ("group", "skip", 2.5 / 1 + (3 + 4) / 2, 2),
        ("group", "miles", (2.5 + 0) / 2 + (0 + 3 + 4) / 3, 2),
        ("constant", "count", 16, 5 * 10),
        ("constant", "skip", 16, 3 * 10),
        ("constant", "miles", 16, 5 * 10),
    ],
)
def test_every_reduction_and_choice_by_hand(
    reduction: str, masked_samples: str, numerator: float, denominator: int
) -> None:
    values, batch = row_of_every_mask_kind(VALUES)
    sizes = group_sizes(batch.rollouts, masked_samples=masked_samples) if reduction == "group" else None

    loss = reduce_tokens(values, batch, reduction=reduction, group_sizes=sizes)
    counts = normalization(batch.rollouts, masked_samples=masked_samples, group_sizes=sizes)

    assert float(loss.numerator.detach()) == pytest.approx(numerator, abs=1e-12)
    assert loss.active_tokens == 5
    assert counts.denominator(reduction, length=10 if reduction == "constant" else None) == denominator


@pytest.mark.parametrize(
    ("reduction", "gradient"),
    [
        ("token", [1, 1, 1, 1, 1]),
        ("constant", [1, 1, 1, 1, 1]),
        ("response", [1 / 2, 1 / 2, 1, 1 / 2, 1 / 2]),
        ("group", [1 / 4, 1 / 4, 1 / 3, 1 / 6, 1 / 6]),
    ],
)
def test_gradients_are_the_weights_and_0_where_masked(reduction: str, gradient: list[float]) -> None:
    values, batch = row_of_every_mask_kind(VALUES)

    sizes = group_sizes(batch.rollouts) if reduction == "group" else None
    reduce_tokens(values, batch, reduction=reduction, group_sizes=sizes).numerator.backward()

    assert active_only(values.grad) == pytest.approx(gradient, abs=1e-15)


@pytest.mark.parametrize("masked_samples", ["count", "skip", "miles"])
def test_a_fully_masked_group_counts_unless_skipped(masked_samples: str) -> None:
    step = [rollout(0, "live", [1]), rollout(1, "dead", [0, 0]), rollout(2, "dead", [])]
    sizes = group_sizes(step, masked_samples=masked_samples)

    counts = normalization(step, masked_samples=masked_samples, group_sizes=sizes)

    assert counts.denominator("group") == (1 if masked_samples == "skip" else 2)
    values = torch.tensor([5.0, torch.nan, torch.nan])
    loss = reduce_tokens(values, build_batch(step, [0, 1, 2]), reduction="group", group_sizes=sizes)
    assert float(loss.numerator) == 5


@settings(deadline=None, max_examples=60)
@given(random_steps(), st.sampled_from(REDUCTIONS))
def test_any_cut_adds_up_to_the_sum_over_samples(step: RandomStep, reduction: str) -> None:
    sizes = group_sizes(step.rollouts) if reduction == "group" else None

    total = sum(
        float(reduce_tokens(values, batch, reduction=reduction, group_sizes=sizes).numerator)
        for values, batch in step.rows()
    )

    losses = [[value for (value,) in own] for own in active_values(step)]
    assert total == pytest.approx(naive_reduction(losses, step.rollouts, reduction), rel=1e-12, abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(random_steps(), st.sampled_from(["count", "skip", "miles"]))
def test_counts_of_ranks_add_up_exactly_also_where_groups_are_cut(step: RandomStep, masked_samples: str) -> None:
    parts = [[step.rollouts[i] for i in pack] for pack in step.packs]
    kind = "skip" if masked_samples == "skip" else "count"

    sizes = sum((group_sizes(part, masked_samples=masked_samples) for part in parts), GroupSizes({}, kind))
    counts = sum(
        (normalization(part, masked_samples=masked_samples, group_sizes=sizes) for part in parts), Normalization()
    )

    assert sizes == group_sizes(step.rollouts, masked_samples=masked_samples)
    assert counts == normalization(step.rollouts, masked_samples=masked_samples, group_sizes=sizes)
    counted = {r.group for r in step.rollouts if bool(r.loss_mask.any()) or kind == "count"}
    assert counts.groups == len(counted)


def test_shares_of_groups_survive_a_collective_in_float64() -> None:
    step = [rollout(i, i % 2, [1]) for i in range(13)]
    sizes = group_sizes(step)

    reduced = sum(float(normalization([one], group_sizes=sizes).groups) for one in step)

    assert Normalization(13, 13, 39, reduced).denominator("group") == 2


def test_a_sample_missing_from_its_group_is_found() -> None:
    step = [rollout(i, "g", [1]) for i in range(3)]
    sizes = group_sizes(step)

    assert normalization(step[:2], group_sizes=sizes).groups == Fraction(2, 3)
    with pytest.raises(ValueError, match=r"make up 0\.666667 groups, not a whole number"):
        normalization(step[:2], group_sizes=sizes).denominator("group")


def test_mistakes_are_named() -> None:
    values, batch = row_of_every_mask_kind(VALUES)
    counts = normalization(batch.rollouts)

    with pytest.raises(ValueError, match=r"group_sizes are missing with reduction 'group'"):
        reduce_tokens(values, batch, reduction="group")
    with pytest.raises(ValueError, match=r"group_sizes are given with reduction 'token'"):
        reduce_tokens(values, batch, group_sizes=GroupSizes())
    with pytest.raises(ValueError, match=r"sample 'a' is of group 'p', which group_sizes does not count"):
        reduce_tokens(values, batch, reduction="group", group_sizes=GroupSizes({"q": 3}))
    with pytest.raises(ValueError, match=r"sample 1 has no group"):
        group_sizes([rollout(1, None, [1])])
    with pytest.raises(ValueError, match=r"reduction 'mean' is not one of token, response, group, constant"):
        reduce_tokens(values, batch, reduction="mean")
    with pytest.raises(ValueError, match=r"values have shape \[3\] but the samples have 8 response tokens"):
        reduce_tokens(torch.zeros(3), batch)
    with pytest.raises(ValueError, match="masked_samples 'drop' is not one of count, skip, miles"):
        normalization(batch.rollouts, masked_samples="drop")
    with pytest.raises(ValueError, match="masked_samples is 'count' but group_sizes were counted with 'skip'"):
        normalization(batch.rollouts, group_sizes=GroupSizes({}, "skip"))
    with pytest.raises(ValueError, match="do not add up"):
        GroupSizes() + GroupSizes({}, "skip")
    with pytest.raises(ValueError, match="groups were not counted"):
        counts.denominator("group")
    with pytest.raises(ValueError, match="length is None with reduction 'constant'"):
        counts.denominator("constant")
    with pytest.raises(ValueError, match="length is 7 with reduction 'token'"):
        counts.denominator("token", length=7)
    with pytest.raises(ValueError, match="divided by at least 1 token"):
        counts.denominator("constant", length=0)
    with pytest.raises(ValueError, match="none of the step's 1 samples"):
        normalization([rollout("m", "g", [0])]).denominator("constant", length=5)

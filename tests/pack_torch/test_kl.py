"""Divergence estimates and entropy by hand: values, gradients, every mask kind and reduction, any cut."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_torch import build_batch, entropy_bonus, group_sizes, kl_loss, kl_penalty, token_kl
from support.loss_cases import (
    NAN,
    RandomStep,
    active_only,
    active_values,
    naive_reduction,
    random_steps,
    rollout,
    row_of_every_mask_kind,
)

WEIGHTS = {
    "token": [1, 1, 1, 1, 1],
    "constant": [1, 1, 1, 1, 1],
    "response": [1 / 2, 1 / 2, 1, 1 / 2, 1 / 2],
    "group": [1 / 4, 1 / 4, 1 / 3, 1 / 6, 1 / 6],
}

# log-probability less reference: log 2, -log 2, 0, log 4, -3.
NEW = [-1.0, -2.0, -1.0, -1.5, -4.0]
GAPS = [math.log(2), -math.log(2), 0.0, math.log(4), -3.0]
REF = [new - gap for new, gap in zip(NEW, GAPS, strict=True)]
LN2 = math.log(2)
E3 = math.exp(3)

#: d = ref - new = -log 2, log 2, 0, -log 4, 3.
ESTIMATES = {
    "k1": [LN2, -LN2, 0.0, 2 * LN2, -3.0],
    "k2": [LN2**2 / 2, LN2**2 / 2, 0.0, 2 * LN2**2, 4.5],
    "k3": [0.5 - 1 + LN2, 2 - 1 - LN2, 0.0, 0.25 - 1 + 2 * LN2, E3 - 1 - 3],
    "low_var": [0.5 - 1 + LN2, 2 - 1 - LN2, 0.0, 0.25 - 1 + 2 * LN2, 10.0],  # exp(3) - 4 = 16.1, held
}
GRADIENTS = {
    "k1": [1, 1, 1, 1, 1],
    "k2": [LN2, -LN2, 0, 2 * LN2, -3],
    "k3": [1 - 0.5, 1 - 2, 0, 1 - 0.25, 1 - E3],
    "low_var": [0.5, -1, 0, 0.75, 0],
}


@pytest.mark.parametrize("reduction", list(WEIGHTS))
@pytest.mark.parametrize("kind", list(ESTIMATES))
def test_every_kind_and_reduction_by_hand_over_every_mask(kind: str, reduction: str) -> None:
    log_probs, batch = row_of_every_mask_kind(NEW, ref_log_probs=REF)
    sizes = group_sizes(batch.rollouts) if reduction == "group" else None

    loss = kl_loss(log_probs, batch, kind=kind, reduction=reduction, group_sizes=sizes)
    loss.numerator.backward()

    weighted = [value * weight for value, weight in zip(ESTIMATES[kind], WEIGHTS[reduction], strict=True)]
    slopes = [value * weight for value, weight in zip(GRADIENTS[kind], WEIGHTS[reduction], strict=True)]
    assert float(loss.numerator.detach()) == pytest.approx(sum(weighted), abs=1e-12)
    assert active_only(log_probs.grad) == pytest.approx(slopes, abs=1e-12)
    assert loss.active_tokens == 5


@pytest.mark.parametrize("kind", list(ESTIMATES))
def test_gradients_equal_finite_differences(kind: str) -> None:
    values = torch.tensor([-1.0, -2.5, -0.3], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-2.0, -1.0, -0.5], dtype=torch.float64)

    assert torch.autograd.gradcheck(lambda new: token_kl(new, reference, kind), (values,))


def test_a_reference_far_above_stays_finite_in_float32_and_one_far_below_keeps_its_gradient() -> None:
    values = torch.tensor([-500.0, 0.0], requires_grad=True)

    estimates = token_kl(values, torch.tensor([0.0, -500.0]))
    estimates.sum().backward()

    assert estimates.tolist() == pytest.approx([math.exp(20) - 21, 499.0])
    assert values.grad.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [0, 0, 0, 0.1 * 0, 0.1 * (2 * LN2 - 3)]),
        ("k2", [0.1 * LN2**2, 0, 0, 0, 0.1 * (2 * LN2**2 + 4.5)]),
    ],
)
def test_penalty_is_the_coefficient_times_the_sum_over_the_response(kind: str, expected: list[float]) -> None:
    log_probs, batch = row_of_every_mask_kind(NEW, ref_log_probs=REF)

    penalty = kl_penalty(log_probs, batch, coefficient=0.1, kind=kind)

    assert penalty.tolist() == pytest.approx(expected, abs=1e-12)  # a, fully masked b, empty c, d, e
    assert not penalty.requires_grad


@pytest.mark.parametrize("reduction", list(WEIGHTS))
def test_entropy_bonus_by_hand_over_every_mask(reduction: str) -> None:
    entropy, batch = row_of_every_mask_kind([0.5, 1.0, 2.0, 0.0, 3.0])
    sizes = group_sizes(batch.rollouts) if reduction == "group" else None

    bonus = entropy_bonus(entropy, batch, reduction=reduction, group_sizes=sizes)
    bonus.numerator.backward()

    by_hand = {"token": 6.5, "constant": 6.5, "response": 0.75 + 2 + 1.5, "group": 0.75 / 2 + 3.5 / 3}[reduction]
    assert float(bonus.numerator.detach()) == pytest.approx(-by_hand, abs=1e-12)
    assert active_only(entropy.grad) == pytest.approx([-weight for weight in WEIGHTS[reduction]], abs=1e-15)


@settings(deadline=None, max_examples=60)
@given(random_steps(), st.sampled_from(list(ESTIMATES)), st.sampled_from(list(WEIGHTS)))
def test_any_cut_adds_up_to_plain_python_over_samples(step: RandomStep, kind: str, reduction: str) -> None:
    sizes = group_sizes(step.rollouts) if reduction == "group" else None

    total = sum(
        float(kl_loss(values, batch, kind=kind, reduction=reduction, group_sizes=sizes).numerator)
        for values, batch in step.rows()
    )
    penalties = {
        sample.id: float(value)
        for values, batch in step.rows()
        for sample, value in zip(batch.rollouts, kl_penalty(values, batch, coefficient=0.5, kind=kind), strict=True)
    }

    def naive(new: float, ref: float) -> float:
        k3 = math.exp(ref - new) - 1 - (ref - new)
        return {"k1": new - ref, "k2": (new - ref) ** 2 / 2, "k3": k3, "low_var": min(k3, 10.0)}[kind]

    losses = [[naive(*token) for token in own] for own in active_values(step, "ref_log_probs")]
    assert total == pytest.approx(naive_reduction(losses, step.rollouts, reduction), rel=1e-10, abs=1e-10)
    for sample, own in zip(step.rollouts, losses, strict=True):
        assert penalties[sample.id] == pytest.approx(0.5 * sum(own), rel=1e-10, abs=1e-10)


def test_a_row_without_an_active_token_adds_0() -> None:
    log_probs = torch.tensor([NAN], requires_grad=True)
    masked, empty = rollout("m", "g", [0], ref_log_probs=[math.inf]), rollout("n", "g", [], ref_log_probs=[])
    batch = build_batch([masked, empty], [0, 1])

    loss = kl_loss(log_probs, batch)
    loss.numerator.backward()

    assert float(loss.numerator.detach()) == 0.0
    assert log_probs.grad.tolist() == [0.0]
    assert kl_penalty(log_probs, batch, coefficient=1.0).tolist() == [0.0, 0.0]


def test_a_reference_given_here_replaces_the_samples_own_and_gets_no_gradient() -> None:
    reference = torch.tensor([-2.0], requires_grad=True)
    batch = build_batch([rollout("a", None, [1])], [0])
    log_probs = torch.tensor([-1.0], requires_grad=True)

    kl_loss(log_probs, batch, kind="k1", ref_log_probs=reference).numerator.backward()

    assert log_probs.grad.tolist() == [1.0]
    assert reference.grad is None
    with pytest.raises(ValueError, match="sample 'a' has no ref_log_probs"):
        kl_loss(log_probs, batch)


def test_mistakes_are_named() -> None:
    batch = build_batch([rollout("a", None, [1], ref_log_probs=[-1.0])], [0])

    with pytest.raises(ValueError, match="kind 'k4' is not one of k1, k2, k3, low_var"):
        kl_loss(torch.zeros(1), batch, kind="k4")
    with pytest.raises(ValueError, match=r"log_probs have shape \[2\] but the samples have 1"):
        kl_penalty(torch.zeros(2), batch, coefficient=1.0)
    with pytest.raises(ValueError, match=r"log_probs have shape \[2\] and ref_log_probs \[1\]"):
        token_kl(torch.zeros(2), torch.zeros(1))

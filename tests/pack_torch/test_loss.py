"""The policy loss by hand, masked tokens that hold anything at all, and denominators apart."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_torch import Normalization, Rollout, build_batch, normalization, policy_loss

# Ratios of new to old probability, and their logarithms.
HIGH, LOW, NEAR = math.log(2.0), math.log(0.5), math.log(1.1)


def sample(name: str, advantages: list[float], mask: list[int] | None = None, old: float = -1.0) -> Rollout:
    response = len(advantages)
    return Rollout(
        name,
        [1] * (response + 2),
        response,
        loss_mask=mask,
        advantages=advantages,
        old_log_probs=[old] * response,
    )


def loss_of(rollouts: list[Rollout], ratios: list[float], **options: Any) -> Any:
    log_probs = torch.tensor([-1.0 + value for value in ratios], dtype=torch.float64, requires_grad=True)
    return log_probs, policy_loss(log_probs, build_batch(rollouts, range(len(rollouts))), **options)


# Ratio 2, 0.5, 1.1 with advantage 1: held at 1.28; 0.5 (lowering is not held); 1.1. Losses -1.28, -0.5, -1.1.
# With advantage -2: 4 (raising is not held); held at 0.8, so 1.6; 2.2.
GOOD = sample("good", [1.0, 1.0, 1.0])
BAD = sample("bad", [-2.0, -2.0, -2.0])
RATIOS = [HIGH, LOW, NEAR]


def test_token_reduction_by_hand() -> None:
    _, loss = loss_of([GOOD, BAD], RATIOS + RATIOS)

    assert float(loss.numerator.detach()) == pytest.approx((-1.28 - 0.5 - 1.1) + (4.0 + 1.6 + 2.2), abs=1e-12)
    assert int(loss.clipped) == 2
    assert loss.active_tokens == 6
    assert not loss.clipped.requires_grad


def test_response_reduction_by_hand_with_an_interior_mask() -> None:
    masked = sample("masked", [1.0, 1.0, 1.0], mask=[1, 0, 1])

    _, loss = loss_of([masked, BAD], RATIOS + RATIOS, reduction="response")

    assert float(loss.numerator.detach()) == pytest.approx((-1.28 - 1.1) / 2 + (4.0 + 1.6 + 2.2) / 3, abs=1e-12)
    assert int(loss.clipped) == 2
    assert loss.active_tokens == 5


def test_gradient_by_hand() -> None:
    log_probs, loss = loss_of([GOOD, BAD], RATIOS + RATIOS)
    loss.numerator.backward()

    # d loss / d log_prob = -A * ratio where the plain objective counts, 0 where it is held.
    assert log_probs.grad.tolist() == pytest.approx([0.0, -0.5, -1.1, 4.0, 0.0, 2.2], abs=1e-12)


def test_other_limits_by_hand() -> None:
    _, loss = loss_of([GOOD, BAD], RATIOS + RATIOS, eps_clip=0.6, eps_clip_high=0.05)

    assert float(loss.numerator.detach()) == pytest.approx((-1.05 - 0.5 - 1.05) + (4.0 + 1.0 + 2.2), abs=1e-12)


@pytest.mark.parametrize("reduction", ["token", "response"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_tokens_may_hold_anything(poison: float, reduction: str) -> None:
    partly = attrs.evolve(GOOD, loss_mask=[1, 0, 1], old_log_probs=[-1.0, poison, -1.0], advantages=[1.0, poison, 1.0])
    wholly = attrs.evolve(
        sample("none", [poison, poison]), loss_mask=[0, 0], old_log_probs=[poison, poison], advantages=[poison] * 2
    )

    log_probs, loss = loss_of([partly, wholly, BAD], [HIGH, poison, NEAR, poison, poison, *RATIOS], reduction=reduction)
    loss.numerator.backward()

    first, second = (-1.28 - 1.1, 4.0 + 1.6 + 2.2)
    expected = first + second if reduction == "token" else first / 2 + second / 3
    assert float(loss.numerator.detach()) == pytest.approx(expected, abs=1e-12)
    assert loss.active_tokens == 5
    assert bool(torch.isfinite(log_probs.grad).all())
    assert log_probs.grad[[1, 3, 4]].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("reduction", ["token", "response"])
def test_a_pack_without_an_active_token_adds_zero_and_still_has_a_gradient(reduction: str) -> None:
    masked, empty = sample("masked", [1.0, 1.0], mask=[0, 0]), sample("empty", [])

    log_probs, loss = loss_of([masked, empty], [HIGH, math.nan], reduction=reduction)
    loss.numerator.backward()

    assert float(loss.numerator.detach()) == 0.0
    assert int(loss.clipped) == 0
    assert loss.active_tokens == 0
    assert log_probs.grad.tolist() == [0.0, 0.0]


def test_far_ratios_stay_finite() -> None:
    log_probs, loss = loss_of([sample("far", [-1.0, 1.0])], [500.0, -500.0])
    loss.numerator.backward()

    # A log-ratio is held within 20 either way.
    assert float(loss.numerator.detach()) == pytest.approx(math.exp(20) - math.exp(-20), rel=1e-12)
    assert log_probs.grad.tolist() == [0.0, 0.0]


def test_an_anchor_given_here_replaces_the_samples_own_and_gets_no_gradient() -> None:
    log_probs = torch.tensor([-3.0, -2.0, -1.0], requires_grad=True)
    bare = attrs.evolve(GOOD, old_log_probs=None)
    batch = build_batch([bare], [0])

    loss = policy_loss(log_probs, batch, old_log_probs=log_probs)
    loss.numerator.backward()

    assert float(loss.numerator.detach()) == pytest.approx(-3.0)
    assert log_probs.grad.tolist() == pytest.approx([-1.0] * 3)
    with pytest.raises(ValueError, match="sample 'good' has no old_log_probs"):
        policy_loss(log_probs, batch)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_cut_into_packs_adds_up_to_the_sum_over_samples(data: st.DataObject) -> None:
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    responses = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=7))
    reduction = data.draw(st.sampled_from(["token", "response"]))
    rollouts, new, expected = [], [], 0.0
    for place, response in enumerate(responses):
        mask = (torch.rand(response, generator=draw) > 0.4).tolist()
        advantage = 1.0 if place % 2 else -0.5
        old = (-2 + torch.randn(response, generator=draw)).tolist()
        scored = (-2 + torch.randn(response, generator=draw)).tolist()
        losses = []
        for token in range(response):
            ratio = math.exp(scored[token] - old[token])
            if mask[token]:
                losses.append(max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.28)))
        expected += sum(losses) / (1 if reduction == "token" else max(len(losses), 1))
        new.append(torch.tensor(scored, dtype=torch.float64))
        rollouts.append(
            Rollout(
                place,
                [0] * (response + 1),
                response,
                loss_mask=mask,
                advantages=[advantage] * response,
                old_log_probs=old,
            )
        )
    order = data.draw(st.permutations(range(len(responses))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(responses)))) | {len(responses)})

    total, start = 0.0, 0
    for stop in cuts:
        pack = order[start:stop]
        start = stop
        batch = build_batch(rollouts, pack)
        total += float(policy_loss(torch.cat([new[i] for i in pack]), batch, reduction=reduction).numerator)

    assert total == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_values_of_the_wrong_length_are_refused() -> None:
    batch = build_batch([GOOD], [0])

    with pytest.raises(ValueError, match=r"log_probs have shape \[2\] but the samples have 3"):
        policy_loss(torch.zeros(2), batch)
    with pytest.raises(ValueError, match=r"old_log_probs have shape \[1\]"):
        policy_loss(torch.zeros(3), batch, old_log_probs=torch.zeros(1))
    with pytest.raises(ValueError, match="reduction 'sample' is not one of token, response"):
        policy_loss(torch.zeros(3), batch, reduction="sample")


def test_counts_and_denominators_by_hand() -> None:
    step = [
        GOOD,
        sample("masked", [1.0, 1.0], mask=[0, 0]),
        sample("empty", []),
        sample("half", [1.0, 1.0], mask=[0, 1]),
    ]

    counts = normalization(step)

    assert counts == Normalization(samples=4, active_tokens=3 + 0 + 0 + 1, model_tokens=5 + 4 + 2 + 4)
    assert counts.denominator("token") == 4
    assert counts.denominator("response") == 4
    assert sum((normalization([one]) for one in step), Normalization()) == counts


@pytest.mark.parametrize("reduction", ["token", "response"])
def test_a_step_without_an_active_token_is_an_error(reduction: str) -> None:
    with pytest.raises(ValueError, match="none of the step's 1 samples has a token that trains"):
        normalization([sample("masked", [1.0], mask=[0])]).denominator(reduction)
    with pytest.raises(ValueError, match="reduction 'mean'"):
        normalization([GOOD]).denominator("mean")

"""Every policy loss by hand over every kind of mask and reduction, its gradients, and importance weights."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_torch import build_batch, group_sizes, importance_weights, policy_loss
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

# Active tokens: two of a (A = 1), one of d and two of e (A = -2). Old log-probabilities are all -1.
ADVANTAGES = [1.0, 1.0, -2.0, -2.0, -2.0]
RATIOS = [2.0, 0.5, 4.0, 0.5, 1.1]
NEW = [-1 + math.log(ratio) for ratio in RATIOS]
LN2, LN11 = math.log(2), math.log(1.1)

#: Token losses of (a, a, d, e, e) per kind, limits 0.8 and 1.28.
LOSSES = {
    # -2 is held at -1.28; -0.5; 8; 1 is held at 1.6; 2.2.
    "ppo": [-1.28, -0.5, 8.0, 1.6, 2.2],
    # The same, d losing at most 2 * 3.
    "dual": [-1.28, -0.5, 6.0, 1.6, 2.2],
    # Ratios of samples: sqrt(2 * 0.5) = 1; 4; sqrt(0.5 * 1.1) = 0.74, held at 0.8.
    "gspo": [-1.0, -1.0, 8.0, 1.6, 1.6],
    # Ratios 1.28, 0.8, 1.28, 0.8, 1.1, times the log-probability.
    "cispo": [
        1.28 * (1 - LN2),
        0.8 * (1 + LN2),
        2.56 * (2 * LN2 - 1),
        -1.6 * (1 + LN2),
        2.2 * (LN11 - 1),
    ],
    "reinforce": [1 - LN2, 1 + LN2, 2 * (2 * LN2 - 1), -2 * (1 + LN2), 2 * (LN11 - 1)],
}
#: d loss / d log_prob of each of the five.
GRADIENTS = {
    "ppo": [0, -0.5, 8.0, 0, 2.2],
    "dual": [0, -0.5, 0, 0, 2.2],
    "gspo": [-1.0, -1.0, 8.0, 0, 0],  # -A s / 2 from each of two tokens
    "cispo": [-1.28, -0.8, 2.56, 1.6, 2.2],
    "reinforce": [-1, -1, 2, 2, 2],
}
CLIPPED = {
    "ppo": [1, 0, 0, 1, 0],
    "dual": [1, 0, 0, 1, 0],
    "gspo": [0, 0, 0, 1, 1],
    "cispo": [1, 1, 1, 1, 0],
    "reinforce": [0, 0, 0, 0, 0],
}
#: What each reduction multiplies the five by: a is one of two of its group, d and e are two of three.
WEIGHTS = {
    "token": [1, 1, 1, 1, 1],
    "constant": [1, 1, 1, 1, 1],
    "response": [1 / 2, 1 / 2, 1, 1 / 2, 1 / 2],
    "group": [1 / 4, 1 / 4, 1 / 3, 1 / 6, 1 / 6],
}


def loss_of(kind: str, reduction: str, **options: Any) -> Any:
    if kind == "dual":
        kind, options = "ppo", options | {"dual_clip": 3.0}
    log_probs, batch = row_of_every_mask_kind(NEW, advantages=ADVANTAGES, old_log_probs=[-1.0] * 5)
    sizes = group_sizes(batch.rollouts) if reduction == "group" else None
    return log_probs, policy_loss(log_probs, batch, kind=kind, reduction=reduction, group_sizes=sizes, **options)


def dot(left: list[float], right: list[float]) -> float:
    return sum(one * other for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("reduction", list(WEIGHTS))
@pytest.mark.parametrize("kind", list(LOSSES))
def test_every_kind_and_reduction_by_hand_over_every_mask(kind: str, reduction: str) -> None:
    log_probs, loss = loss_of(kind, reduction)
    loss.numerator.backward()

    assert float(loss.numerator.detach()) == pytest.approx(dot(LOSSES[kind], WEIGHTS[reduction]), abs=1e-12)
    expected = [gradient * weight for gradient, weight in zip(GRADIENTS[kind], WEIGHTS[reduction], strict=True)]
    assert active_only(log_probs.grad) == pytest.approx(expected, abs=1e-12)
    assert active_only(loss.clipped_tokens) == CLIPPED[kind]
    assert int(loss.clipped) == sum(CLIPPED[kind])
    assert int(loss.dual_clipped) == (1 if kind == "dual" else 0)
    assert loss.active_tokens == 5


def test_sums_written_out() -> None:
    # The products of the table above once more, as plain numbers.
    for kind, reduction, value in [
        ("ppo", "token", 10.02),
        ("ppo", "response", 9.01),
        ("ppo", "group", 2.855),
        ("dual", "token", 8.02),
        ("gspo", "token", 9.2),
        ("gspo", "response", 8.6),
        ("gspo", "group", 2.7),
    ]:
        assert float(loss_of(kind, reduction)[1].numerator.detach()) == pytest.approx(value, abs=1e-12)


def test_gspo_with_dual_clip_by_hand() -> None:
    _, loss = loss_of("gspo", "token", dual_clip=3.0)

    assert float(loss.numerator.detach()) == pytest.approx(-2 + 6 + 3.2, abs=1e-12)
    assert int(loss.dual_clipped) == 1


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("reduction", list(WEIGHTS))
def test_a_row_without_an_active_token_adds_0_with_a_gradient_of_0(kind: str, reduction: str) -> None:
    masked = rollout("m", "g", [0, 0], advantages=[NAN, NAN], old_log_probs=[NAN, NAN])
    empty = rollout("n", "g", [], advantages=[], old_log_probs=[])
    log_probs = torch.tensor([NAN, 3.0], requires_grad=True)
    sizes = group_sizes([masked, empty]) if reduction == "group" else None

    loss = policy_loss(
        log_probs, build_batch([masked, empty], [0, 1]), kind=kind, reduction=reduction, group_sizes=sizes
    )
    loss.numerator.backward()

    assert float(loss.numerator.detach()) == 0.0
    assert log_probs.grad.tolist() == [0.0, 0.0]


@settings(deadline=None, max_examples=80)
@given(random_steps(), st.sampled_from(["ppo", "dual", "gspo", "cispo", "reinforce"]), st.sampled_from(list(WEIGHTS)))
def test_any_cut_adds_up_to_plain_python_over_samples(step: RandomStep, kind: str, reduction: str) -> None:
    sizes = group_sizes(step.rollouts) if reduction == "group" else None
    options = {"kind": "ppo", "dual_clip": 1.3} if kind == "dual" else {"kind": kind}

    total = sum(
        float(policy_loss(values, batch, reduction=reduction, group_sizes=sizes, **options).numerator)
        for values, batch in step.rows()
    )

    losses = [naive_losses(own, kind) for own in active_values(step, "old_log_probs", "advantages")]
    assert total == pytest.approx(naive_reduction(losses, step.rollouts, reduction), rel=1e-10, abs=1e-10)


def naive_losses(tokens: list[tuple[float, ...]], kind: str) -> list[float]:
    mean = sum(new - old for new, old, _ in tokens) / max(len(tokens), 1)
    losses = []
    for new, old, advantage in tokens:
        ratio = math.exp(mean if kind == "gspo" else new - old)
        held = min(max(ratio, 0.8), 1.28)
        loss = max(-advantage * ratio, -advantage * held)
        if kind == "dual" and advantage < 0:
            loss = min(loss, -advantage * 1.3)
        losses.append({"cispo": -advantage * held * new, "reinforce": -advantage * new}.get(kind, loss))
    return losses


@pytest.mark.parametrize("reduction", list(WEIGHTS))
@pytest.mark.parametrize(
    "options", [{"kind": "ppo"}, {"kind": "ppo", "dual_clip": 1.5}, {"kind": "gspo"}, {"kind": "reinforce"}]
)
def test_gradients_equal_finite_differences(options: dict[str, Any], reduction: str) -> None:
    draw = torch.Generator().manual_seed(3)
    masks = [[1, 0, 1, 1], [0, 0], [], [1], [1, 1, 1]]
    rollouts = [
        rollout(
            place,
            place % 2,
            mask,
            advantages=torch.randn(len(mask), generator=draw, dtype=torch.float64),
            old_log_probs=torch.randn(len(mask), generator=draw, dtype=torch.float64) * 0.4 - 2,
        )
        for place, mask in enumerate(masks)
    ]
    batch = build_batch(rollouts, [3, 0, 4, 1, 2])
    log_probs = torch.randn(10, generator=draw, dtype=torch.float64) * 0.4 - 2
    sizes = group_sizes(rollouts) if reduction == "group" else None
    factors = torch.rand(10, generator=draw, dtype=torch.float64)

    def numerator(values: torch.Tensor) -> torch.Tensor:
        return policy_loss(values, batch, reduction=reduction, group_sizes=sizes, weights=factors, **options).numerator

    assert torch.autograd.gradcheck(numerator, (log_probs.requires_grad_(),))


def test_importance_weights_by_hand() -> None:
    ratios = [3.0, 0.5, NAN, 1.5, 0.05]
    trainer = torch.tensor([-1 + math.log(ratio) for ratio in ratios], dtype=torch.float64, requires_grad=True)
    sampled, mask = torch.full((5,), -1.0), torch.tensor([1, 1, 0, 1, 1])

    held = importance_weights(trainer, sampled, mask, 0.1, 2.0)
    dropped = importance_weights(trainer, sampled, mask, 0.1, 2.0, outside="zero")

    assert held.values.tolist() == pytest.approx([2.0, 0.5, 0.0, 1.5, 0.1])
    assert dropped.values.tolist() == pytest.approx([0.0, 0.5, 0.0, 1.5, 0.0])
    for weights in (held, dropped):
        assert (int(weights.clipped), weights.active_tokens, weights.clipped_share) == (2, 4, 0.5)
        assert not weights.values.requires_grad


def test_importance_weights_of_no_token_have_a_clipped_share_of_0() -> None:
    assert importance_weights(torch.zeros(0), torch.zeros(0), torch.zeros(0)).clipped_share == 0.0
    weights = importance_weights(torch.tensor([NAN]), torch.tensor([math.inf]), torch.tensor([False]))
    assert weights.clipped_share == 0.0
    assert weights.values.tolist() == [0.0]


def test_masked_tokens_are_never_clipped_even_where_the_limits_leave_1_out() -> None:
    weights = importance_weights(torch.tensor([0.0, NAN]), torch.zeros(2), torch.tensor([1, 0]), 1.5, 2.0)

    assert weights.values.tolist() == [1.5, 0.0]
    assert int(weights.clipped) == 1


def test_importance_weights_stay_finite_far_away() -> None:
    weights = importance_weights(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]), torch.ones(2), 0.0, 1e30)
    assert weights.values.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


@pytest.mark.parametrize("kind", list(LOSSES))
def test_weights_scale_numerators_only(kind: str) -> None:
    factors = [2.0, 0.5, 0.0, 1.0, 3.0]
    weights = torch.tensor([2.0, NAN, 0.5, NAN, NAN, 0.0, 1.0, 3.0], requires_grad=True)

    log_probs, loss = loss_of(kind, "token", weights=weights)
    loss.numerator.backward()

    assert float(loss.numerator.detach()) == pytest.approx(dot(LOSSES[kind], factors), abs=1e-12)
    assert loss.active_tokens == 5
    assert weights.grad is None
    if kind != "gspo":  # its tokens share one ratio, so weights mix within a sample
        assert active_only(log_probs.grad) == pytest.approx(
            [g * f for g, f in zip(GRADIENTS[kind], factors, strict=True)], abs=1e-12
        )


def test_reinforce_needs_no_old_log_probs_and_takes_none() -> None:
    bare = rollout("a", None, [1], advantages=[2.0])

    assert float(policy_loss(torch.tensor([-3.0]), build_batch([bare], [0]), kind="reinforce").numerator) == 6.0
    with pytest.raises(ValueError, match="reinforce has no ratio"):
        policy_loss(torch.tensor([-3.0]), build_batch([bare], [0]), kind="reinforce", old_log_probs=torch.zeros(1))


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
def test_an_update_anchored_on_its_own_forward_has_ratio_1_and_the_policy_gradient(kind: str) -> None:
    log_probs = torch.tensor([-3.0, -2.0], requires_grad=True)
    batch = build_batch([rollout("a", None, [1, 1], advantages=[2.0, 2.0])], [0])

    loss = policy_loss(log_probs, batch, kind=kind, old_log_probs=log_probs)
    loss.numerator.backward()

    assert float(loss.numerator.detach()) == pytest.approx(10.0 if kind == "cispo" else -4.0)
    assert log_probs.grad.tolist() == pytest.approx([-2.0, -2.0])
    assert int(loss.clipped) == 0


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="kind 'grpo' is not one of ppo, gspo, cispo, reinforce"):
        loss_of("grpo", "token")
    with pytest.raises(ValueError, match=r"dual_clip is 3\.0 but cispo has no clipped objective"):
        loss_of("cispo", "token", dual_clip=3.0)
    with pytest.raises(ValueError, match=r"dual_clip is 1\.0 but must be above 1"):
        loss_of("ppo", "token", dual_clip=1.0)
    with pytest.raises(ValueError, match=r"weights have shape \[2\] but the samples have 8 response tokens"):
        loss_of("ppo", "token", weights=torch.ones(2))
    with pytest.raises(ValueError, match="one entry of each per response token"):
        importance_weights(torch.zeros(2), torch.zeros(2), torch.zeros(1))
    with pytest.raises(ValueError, match="limits are 2 and 1"):
        importance_weights(torch.zeros(1), torch.zeros(1), torch.zeros(1), 2, 1)
    with pytest.raises(ValueError, match="outside 'mask' is not one of clamp, zero"):
        importance_weights(torch.zeros(1), torch.zeros(1), torch.zeros(1), outside="mask")
    bare = attrs.evolve(rollout("a", None, [1]), advantages=[1.0])
    with pytest.raises(ValueError, match="sample 'a' has no old_log_probs"):
        policy_loss(torch.zeros(1), build_batch([bare], [0]), kind="gspo")

"""Cross-entropy and preference loss by hand over every mask kind, their gradients, and any cut."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_torch import build_batch, dpo_loss, group_sizes, sft_loss
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


@pytest.mark.parametrize(
    ("reduction", "by_hand", "weights"),
    [
        ("token", 0.5 + 1.5 + 2 + 0.25 + 0.75, [1, 1, 1, 1, 1]),
        ("constant", 5.0, [1, 1, 1, 1, 1]),
        ("response", 1.0 + 2 + 0.5, [1 / 2, 1 / 2, 1, 1 / 2, 1 / 2]),
        ("group", 1.0 / 2 + 2.5 / 3, [1 / 4, 1 / 4, 1 / 3, 1 / 6, 1 / 6]),
    ],
)
def test_cross_entropy_by_hand_over_every_mask(reduction: str, by_hand: float, weights: list[float]) -> None:
    log_probs, batch = row_of_every_mask_kind([-0.5, -1.5, -2.0, -0.25, -0.75])
    sizes = group_sizes(batch.rollouts) if reduction == "group" else None

    loss = sft_loss(log_probs, batch, reduction=reduction, group_sizes=sizes)
    loss.numerator.backward()

    assert float(loss.numerator.detach()) == pytest.approx(by_hand, abs=1e-12)
    assert active_only(log_probs.grad) == pytest.approx([-weight for weight in weights], abs=1e-15)
    assert loss.active_tokens == 5


@settings(deadline=None, max_examples=40)
@given(random_steps(), st.sampled_from(["token", "response", "group", "constant"]))
def test_cross_entropy_of_any_cut_adds_up(step: RandomStep, reduction: str) -> None:
    sizes = group_sizes(step.rollouts) if reduction == "group" else None

    total = sum(
        float(sft_loss(values, batch, reduction=reduction, group_sizes=sizes).numerator)
        for values, batch in step.rows()
    )

    losses = [[-value for (value,) in own] for own in active_values(step)]
    assert total == pytest.approx(naive_reduction(losses, step.rollouts, reduction), rel=1e-12, abs=1e-12)


def test_cross_entropy_is_that_of_pytorch() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(6, 9, generator=draw), torch.randint(9, (6,), generator=draw)
    batch = build_batch([rollout("a", None, [1, 0, 1]), rollout("b", None, [1, 1, 0])], [0, 1])
    log_probs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    kept = torch.tensor([1, 0, 1, 1, 1, 0], dtype=torch.bool)
    expected = torch.nn.functional.cross_entropy(logits, targets.masked_fill(~kept, -100), reduction="sum")
    torch.testing.assert_close(sft_loss(log_probs, batch).numerator, expected)


# Two pairs: "q" far apart in the row, "r" with an empty rejected response.
# Scores: win = (1 + 0.5), one token masked; lose = -0.5; up = 2; none = 0.
def pairs_row(order: list[int]) -> tuple[torch.Tensor, object]:
    samples = [
        (rollout("win", "q", [1, 0, 1], ref_log_probs=[-2.0, NAN, -1.5]), [-1.0, NAN, -1.0]),
        (rollout("up", "r", [1], ref_log_probs=[-3.0]), [-1.0]),
        (rollout("none", "r", [], ref_log_probs=[]), []),
        (rollout("lose", "q", [1], ref_log_probs=[-0.5]), [-1.0]),
    ]
    values = [value for place in order for value in samples[place][1]]
    log_probs = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    return log_probs, build_batch([one for one, _ in samples], order)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]])
def test_preference_loss_by_hand_in_any_order_of_documents(order: list[int]) -> None:
    log_probs, batch = pairs_row(order)

    loss = dpo_loss(log_probs, batch, chosen={"win", "up"}, beta=0.5)
    loss.numerator.backward()

    margins = {"q": 0.5 * (1.5 - -0.5), "r": 0.5 * (2.0 - 0.0)}
    assert dict(zip(loss.groups, loss.margins.tolist(), strict=True)) == pytest.approx(margins)
    assert float(loss.numerator.detach()) == pytest.approx(2 * math.log(1 + math.exp(-1)))
    assert (loss.pairs, loss.preferred) == (2, 2)
    slope = 0.5 / (1 + math.e)  # beta * sigmoid(-margin), both margins being 1
    expected = {"win": [-slope, 0, -slope], "up": [-slope], "none": [], "lose": [slope]}
    for sample, gradient in zip(batch.rollouts, batch.split(log_probs.grad), strict=True):
        assert gradient.tolist() == pytest.approx(expected[sample.id], abs=1e-15)


def test_preference_of_the_rejected_gives_a_negative_margin() -> None:
    log_probs, batch = pairs_row([0, 1, 2, 3])

    loss = dpo_loss(log_probs, batch, chosen=["lose", "none", "of another pack"], beta=0.5)

    assert loss.margins.tolist() == pytest.approx([-1.0, -1.0])
    assert loss.preferred == 0
    assert float(loss.numerator.detach()) == pytest.approx(2 * math.log(1 + math.e))


def test_a_pair_that_is_masked_on_both_sides_costs_log_2_and_has_no_gradient() -> None:
    pair = [rollout(name, 1, [0], ref_log_probs=[NAN]) for name in ("a", "b")]
    log_probs = torch.tensor([NAN, math.inf], requires_grad=True)

    loss = dpo_loss(log_probs, build_batch(pair, [0, 1]), chosen={"a"})
    loss.numerator.backward()

    assert float(loss.numerator.detach()) == pytest.approx(math.log(2))
    assert log_probs.grad.tolist() == [0.0, 0.0]


def test_far_margins_stay_finite() -> None:
    pair = [rollout(name, 1, [1], ref_log_probs=[-1.0]) for name in ("a", "b")]
    log_probs = torch.tensor([-90_000.0, 0.0], requires_grad=True)

    loss = dpo_loss(log_probs, build_batch(pair, [0, 1]), chosen={"a"}, beta=1.0)
    loss.numerator.backward()

    assert float(loss.numerator.detach()) == pytest.approx(90_000)
    assert log_probs.grad.tolist() == [-1.0, 1.0]


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_preference_loss_of_any_cut_between_pairs_adds_up(data: st.DataObject) -> None:
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    rollouts, values, scores = [], [], []
    for place in range(2 * data.draw(st.integers(1, 4))):
        mask = (torch.rand(data.draw(st.integers(0, 3)), generator=draw) > 0.3).int().tolist()
        new, ref = (torch.randn(len(mask), generator=draw, dtype=torch.float64) for _ in range(2))
        rollouts.append(rollout(place, place // 2, mask, ref_log_probs=ref))
        values.append(new)
        scores.append(sum(float(new[t] - ref[t]) for t in range(len(mask)) if mask[t]))
    chosen = {2 * pair + data.draw(st.integers(0, 1)) for pair in range(len(rollouts) // 2)}
    expected = sum(math.log1p(math.exp(-0.7 * (scores[good] - scores[good ^ 1]))) for good in chosen)

    total, pairs = 0.0, 0
    order = data.draw(st.permutations(range(len(rollouts) // 2)))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(order)))) | {len(order)})
    for start, stop in zip([0, *cuts], cuts, strict=False):
        members = [2 * pair + side for pair in order[start:stop] for side in (0, 1)]
        pack = data.draw(st.permutations(members))
        loss = dpo_loss(torch.cat([values[i] for i in pack]), build_batch(rollouts, pack), chosen=chosen, beta=0.7)
        total, pairs = total + float(loss.numerator), pairs + loss.pairs

    assert total == pytest.approx(expected, rel=1e-10)
    assert pairs == len(rollouts) // 2


def test_preference_gradient_equals_finite_differences() -> None:
    log_probs, batch = pairs_row([0, 1, 2, 3])
    finite = torch.nan_to_num(log_probs.detach(), nan=-1.0).requires_grad_()

    assert torch.autograd.gradcheck(lambda v: dpo_loss(v, batch, chosen={"win", "up"}).numerator, (finite,))


def test_mistakes_are_named() -> None:
    log_probs, batch = pairs_row([0, 1, 2, 3])

    with pytest.raises(ValueError, match=r"group 'q' has 2 chosen and 0 rejected samples in this row"):
        dpo_loss(log_probs, batch, chosen={"win", "lose", "up"})
    with pytest.raises(ValueError, match=r"group 'q' has 1 chosen and 0 rejected .* one of each, in one pack"):
        dpo_loss(log_probs[:3], build_batch(batch.rollouts, [0]), chosen={"win"})
    with pytest.raises(ValueError, match="sample 'a' has no group"):
        dpo_loss(torch.zeros(1), build_batch([rollout("a", None, [1], ref_log_probs=[0.0])], [0]), chosen={"a"})
    with pytest.raises(ValueError, match="sample 'a' has no ref_log_probs"):
        dpo_loss(torch.zeros(1), build_batch([rollout("a", "g", [1])], [0]), chosen={"a"})
    with pytest.raises(ValueError, match="beta is 0 but must be above 0"):
        dpo_loss(log_probs, batch, chosen=set(), beta=0)

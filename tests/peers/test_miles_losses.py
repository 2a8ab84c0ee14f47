"""Policy losses, divergence estimates and importance weights against MILES' own code, from its PyPI wheel."""

from argparse import Namespace
from typing import Any

import pytest
import torch
from pack_torch import (
    PackedBatch,
    Rollout,
    build_batch,
    entropy_bonus,
    importance_weights,
    kl_loss,
    normalization,
    policy_loss,
    sft_loss,
    token_kl,
)
from support.loss_cases import clipping_rollouts
from torch import Tensor

EPS_CLIP, EPS_CLIP_HIGH = 0.2, 0.28
PACKS = [[0, 3], [5, 1, 2], [4]]


@pytest.fixture
def rollouts() -> list[Rollout]:
    return clipping_rollouts()


def scored(batch: PackedBatch, spread: float = 0.8) -> Tensor:
    """Log-probabilities of the current policy, the same for a sample in whatever pack."""
    values = []
    for rollout in batch.rollouts:
        draw = torch.Generator().manual_seed(int(rollout.id))
        values.append(torch.randn(rollout.response_length, generator=draw, dtype=torch.float64) * spread - 2.0)
    return torch.cat(values).requires_grad_()


def their_sum(values: Tensor, batch: PackedBatch, reduction: str) -> Tensor:
    from miles.backends.training_utils.cp_utils import get_sum_of_sample_mean

    reduce = get_sum_of_sample_mean(
        list(batch.doc_lens),
        list(batch.response_lens),
        [rollout.loss_mask.double() for rollout in batch.rollouts],
        calculate_per_token_loss=reduction == "token",
    )
    return reduce(values)


def assert_same(ours: Tensor, theirs: Tensor, mine: Tensor, other: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=tolerance, atol=tolerance, check_dtype=False)
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(mine.grad, other.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reduction", ["token", "response"])
@pytest.mark.parametrize("dual_clip", [None, 1.2, 3.0])
@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_clipped_losses_equal_miles(
    rollouts: list[Rollout], kind: str, dual_clip: float | None, reduction: str
) -> None:
    from miles.utils.ppo_utils import compute_gspo_kl, compute_policy_loss

    clipped = held = 0
    for batch in (build_batch(rollouts, pack) for pack in PACKS):
        mine, other = scored(batch), scored(batch)
        options: dict[str, Any] = {"kind": kind, "dual_clip": dual_clip, "reduction": reduction}
        loss = policy_loss(mine, batch, eps_clip=EPS_CLIP, eps_clip_high=EPS_CLIP_HIGH, **options)
        old, kept = batch.concat("old_log_probs"), batch.concat("loss_mask")
        gap = old - other
        if kind == "gspo":
            masks = [rollout.loss_mask.double() for rollout in batch.rollouts]
            gap = compute_gspo_kl(batch.split(other), batch.split(old), batch.split(other), masks)
        losses, where = compute_policy_loss(gap, batch.concat("advantages"), EPS_CLIP, EPS_CLIP_HIGH, dual_clip)
        assert torch.equal(loss.clipped_tokens, (where > 0) & kept)
        assert_same(loss.numerator, their_sum(losses, batch, reduction), mine, other)
        clipped, held = clipped + int(loss.clipped), held + int(loss.dual_clipped)
    assert clipped > 0, "a comparison in which nothing clips proves little"
    if dual_clip != 3.0:
        assert (held > 0) == (dual_clip is not None), "the dual clip holds a token, where there is one"


@pytest.mark.parametrize("reduction", ["token", "response"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var"])
def test_divergence_losses_equal_miles_to_the_precision_it_works_in(
    rollouts: list[Rollout], kind: str, reduction: str
) -> None:
    from miles.utils.ppo_utils import compute_approx_kl

    name = "low_var_kl" if kind == "low_var" else kind
    largest = 0.0
    for batch in (build_batch(rollouts, pack) for pack in PACKS):
        mine, other = scored(batch, 2.5), scored(batch, 2.5)
        loss = kl_loss(mine, batch, kind=kind, reduction=reduction)
        estimates = compute_approx_kl(other, batch.concat("ref_log_probs"), name)
        # MILES computes the estimate in float32 whatever comes in; ours is in float64 here.
        assert estimates.dtype == torch.float32
        assert_same(loss.numerator, their_sum(estimates, batch, reduction), mine, other, tolerance=2e-6)
        largest = max(largest, float(token_kl(mine.detach(), batch.concat("ref_log_probs"), kind).abs().max()))
    assert (largest == 10.0) == (kind == "low_var"), "the limit of low_var holds at least one token"


@pytest.mark.parametrize(("outside", "function"), [("clamp", "vanilla_tis_function"), ("zero", "icepop_function")])
def test_importance_weights_equal_miles(rollouts: list[Rollout], outside: str, function: str) -> None:
    from miles.backends.training_utils import loss as theirs

    batch = build_batch(rollouts, range(len(rollouts)))
    trainer, sampled, kept = (batch.concat(name) for name in ("old_log_probs", "rollout_log_probs", "loss_mask"))
    weights = importance_weights(trainer, sampled, kept, 0.7, 1.4, outside=outside)

    scaled, _, metrics = getattr(theirs, function)(
        Namespace(tis_clip_low=0.7, tis_clip=1.4),
        pg_loss=torch.ones_like(trainer),
        train_log_probs=batch.split(trainer),
        rollout_log_probs=batch.split(sampled),
        loss_masks=[rollout.loss_mask for rollout in rollouts],
    )

    # Theirs weighs masked tokens too and leaves them to the reducer; ours are 0 there.
    torch.testing.assert_close(weights.values, scaled * kept, rtol=1e-14, atol=0)
    assert int(weights.clipped) == int((metrics["tis_clipfrac"] * kept).sum()) > 0


@pytest.mark.parametrize("reduction", ["token", "response"])
def test_weighted_loss_entropy_and_cross_entropy_equal_miles(rollouts: list[Rollout], reduction: str) -> None:
    from miles.utils.ppo_utils import compute_policy_loss

    for batch in (build_batch(rollouts, pack) for pack in PACKS):
        old, sampled, kept = (batch.concat(name) for name in ("old_log_probs", "rollout_log_probs", "loss_mask"))
        factors = importance_weights(old, sampled, kept, 0.7, 1.4).values
        mine, other = scored(batch), scored(batch)
        loss = policy_loss(mine, batch, weights=factors, reduction=reduction).numerator
        loss = loss + sft_loss(mine, batch, reduction=reduction).numerator
        loss = loss + entropy_bonus(mine**2, batch, reduction=reduction).numerator
        losses, _ = compute_policy_loss(old - other, batch.concat("advantages"), EPS_CLIP, EPS_CLIP_HIGH)
        weighted = losses * (old - sampled).exp().clamp(0.7, 1.4)
        assert_same(loss, their_sum(weighted - other - other**2, batch, reduction), mine, other)


def test_their_phantom_tokens_are_counted_on_request(rollouts: list[Rollout]) -> None:
    # MILES sums max(active, 1) over samples: the fully masked and the empty one count as a token each.
    theirs = sum(max(int(rollout.loss_mask.sum()), 1) for rollout in rollouts)

    assert theirs == 3 + 4 + 1 + 4 + 1 + 1
    assert normalization(rollouts, masked_samples="miles").denominator("token") == theirs
    assert normalization(rollouts).denominator("token") == theirs - 2

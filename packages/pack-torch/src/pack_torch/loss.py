"""The clipped policy-gradient loss of a packed row: numerators here, denominators global and apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs
import torch
from torch import Tensor

from pack_torch.batch import PackedBatch
from pack_torch.rollout import Rollout

Reduction = Literal["token", "response"]

#: Log-ratios beyond this are held there, so that exp() stays finite.
LOG_RATIO_LIMIT = 20.0


@attrs.frozen
class Normalization:
    """What one optimizer step divides by. Counts add up with `+`: over samples, packs and ranks.

    Args:
        samples: all samples, fully masked ones included.
        active_tokens: response tokens that train; a fully masked sample adds none.
        model_tokens: tokens run through the model, prompts included.

    >>> Normalization(2, 7, 20) + Normalization(1, 0, 5)
    Normalization(samples=3, active_tokens=7, model_tokens=25)
    """

    samples: int = 0
    active_tokens: int = 0
    model_tokens: int = 0

    def __add__(self, other: Normalization) -> Normalization:
        """Return the counts of both together."""
        return Normalization(
            self.samples + other.samples,
            self.active_tokens + other.active_tokens,
            self.model_tokens + other.model_tokens,
        )

    def denominator(self, reduction: Reduction) -> int:
        """Return what the numerators of a whole optimizer step are divided by.

        Args:
            reduction: `token` divides by active tokens, `response` by samples.

        Raises:
            ValueError: not one token of the step trains, or no such reduction.
        """
        _check_reduction(reduction)
        if self.active_tokens == 0:
            raise ValueError(
                f"none of the step's {self.samples:,} samples has a token that trains; every loss mask is 0, so drop "
                "the step or look at what masks them"
            )
        return self.active_tokens if reduction == "token" else self.samples


def _check_reduction(reduction: str) -> None:
    if reduction not in ("token", "response"):
        raise ValueError(f"reduction {reduction!r} is not one of token, response")


def normalization(rollouts: Sequence[Rollout]) -> Normalization:
    """Return the counts of these rollouts.

    >>> normalization([Rollout("a", [1, 2, 3], 2, loss_mask=[1, 0]), Rollout("b", [1, 2], 1, loss_mask=[0])])
    Normalization(samples=2, active_tokens=1, model_tokens=5)
    """
    return Normalization(
        samples=len(rollouts),
        active_tokens=sum(rollout.active_tokens for rollout in rollouts),
        model_tokens=sum(rollout.length for rollout in rollouts),
    )


@attrs.frozen(eq=False)
class PolicyLoss:
    """The part one pack adds to an optimizer step's loss.

    Args:
        numerator: scalar with its graph; divide by the step's global denominator, then call backward.
        clipped: scalar, detached: active tokens whose clipped objective was the worse of the two.
        active_tokens: tokens that counted.
    """

    numerator: Tensor
    clipped: Tensor
    active_tokens: int


def policy_loss(
    log_probs: Tensor,
    batch: PackedBatch,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float = 0.28,
    reduction: Reduction = "token",
    old_log_probs: Tensor | None = None,
) -> PolicyLoss:
    """Return the numerator of the clipped policy-gradient loss of one packed row.

    Per active token, with ratio r = exp(log_prob - old_log_prob) and advantage A, the loss is
    max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_high)). A log-ratio beyond 20 is held at 20 and gives no gradient:
    such a token is hopelessly off-policy, and its ratio would overflow. `token` sums the losses; `response` sums each
    sample's mean over its own active tokens. Numerators of any cut into packs add up to the same number. Masked tokens
    are taken out before any arithmetic, so whatever they hold, NaN included, reaches neither the loss nor a gradient.

    Args:
        log_probs: `[S]` of the current policy, with their graph.
        batch: built from rollouts that have `advantages`, and `old_log_probs` unless given here.
        eps_clip: how far below 1 the ratio may go.
        eps_clip_high: how far above.
        reduction: `token` or `response`.
        old_log_probs: `[S]` instead of the rollouts' own, for an update anchored on this very forward.

    Raises:
        ValueError: lengths that differ, an unknown reduction, or a sample that lacks a field; names it.

    PPO (Schulman et al., 2017, equation 7); two clip limits from DAPO (Yu et al., 2025).

    >>> from pack_torch.batch import build_batch
    >>> rollout = Rollout("a", [1, 2, 3], 2, advantages=[1.0, 1.0], old_log_probs=[-1.0, -1.0])
    >>> policy_loss(torch.tensor([-1.0, 0.0]), build_batch([rollout], [0])).numerator  # 1 and e, held at 1.28
    tensor(-2.2800)
    """
    _check_reduction(reduction)
    kept = batch.concat("loss_mask")
    old = batch.concat("old_log_probs") if old_log_probs is None else old_log_probs
    advantages = batch.concat("advantages")
    for name, values in (("log_probs", log_probs), ("old_log_probs", old)):
        if values.shape != kept.shape:
            raise ValueError(
                f"{name} have shape {list(values.shape)} but the samples have {kept.numel():,} response tokens"
            )
    active = kept.nonzero().squeeze(1)
    new = log_probs.index_select(0, active)
    advantage = advantages.to(log_probs.dtype).index_select(0, active)
    anchor = old.detach().to(log_probs.dtype).index_select(0, active)
    ratio = (new - anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    losses = torch.maximum(plain, clipped)
    if reduction == "response":
        losses = losses * _response_weights(batch, losses).index_select(0, active)
    return PolicyLoss(losses.sum(), (clipped > plain).sum().detach(), int(active.numel()))


def _response_weights(batch: PackedBatch, like: Tensor) -> Tensor:
    """Return `[S]`: one over the active tokens of the sample each response token belongs to."""
    active = torch.tensor([max(rollout.active_tokens, 1) for rollout in batch.rollouts])
    weights = 1 / active.to(device=like.device, dtype=like.dtype)
    return torch.repeat_interleave(weights, torch.tensor(batch.response_lens, device=like.device))

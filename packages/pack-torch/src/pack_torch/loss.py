"""Policy-gradient losses of a packed row, per sample and never per row: numerators here, denominators apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import attrs
import torch
from torch import Tensor

from pack_torch.counts import GroupSizes, Reduction, check_reduction
from pack_torch.counts import Normalization as Normalization
from pack_torch.counts import normalization as normalization
from pack_torch.reductions import active_places, check_lengths, split_active, sum_active
from pack_torch.rollout import Rollout as Rollout
from pack_torch.scored import ScoredBatch, Scores
from pack_torch.slicing import batch_log_probs

Kind = Literal["ppo", "gspo", "cispo", "reinforce"]

#: Log-ratios beyond this are held there, so that exp() stays finite.
LOG_RATIO_LIMIT = 20.0


@attrs.frozen(eq=False)
class PolicyLoss:
    """The part one pack adds to an optimizer step's loss.

    Args:
        numerator: scalar with its graph; divide by the step's global denominator, then call backward.
        clipped: scalar, detached: active tokens whose clipped objective was the worse of the two (for CISPO: whose
            ratio was held).
        active_tokens: tokens that counted.
        clipped_tokens: `[S]` bool, which tokens `clipped` counts; False where masked.
        dual_clipped: scalar, detached: active tokens whose loss was held by `dual_clip`.
    """

    numerator: Tensor
    clipped: Tensor
    active_tokens: int
    clipped_tokens: Tensor = attrs.field(factory=lambda: torch.zeros(0, dtype=torch.bool))
    dual_clipped: Tensor = attrs.field(factory=lambda: torch.tensor(0))


@attrs.frozen
class _Limits:
    low: float
    high: float
    dual: float | None


def policy_loss(
    scores: Scores,
    batch: ScoredBatch,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float = 0.28,
    reduction: Reduction = "token",
    old_log_probs: Tensor | None = None,
    kind: Kind = "ppo",
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    group_sizes: GroupSizes | None = None,
) -> PolicyLoss:
    """Return the numerator of a policy-gradient loss of one packed forward.

    With ratio r = exp(log_prob - old_log_prob) and advantage A, the loss of an active token is, by kind:

    - `ppo`: max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_high)). GRPO is this with `grpo_advantages`. With
      `dual_clip` c, a token with A < 0 loses at most -A c.
    - `gspo`: the same, r being one number per sample: exp of the mean log-ratio over its active tokens.
    - `cispo`: -A log_prob times the clipped r, r without gradient: a token beyond the limits still has one.
    - `reinforce`: -A log_prob; no ratio, so `old_log_probs` are not read.

    A log-ratio beyond 20 is held at 20 and gives no gradient through the ratio: such a token is hopelessly off-policy,
    and its ratio would overflow. Numerators of any cut into packs add up to the same number; `reduce_tokens` says how
    tokens are summed, `Normalization` what divides them. Masked tokens are taken out before any arithmetic, so whatever
    they hold, NaN included, reaches neither the loss nor a gradient. A response that is fully masked or empty adds 0.

    Args:
        scores: what the current policy returned, or its `[S]` log-probabilities; with their graph. See
            `batch_log_probs`, which also divides by a temperature.
        batch: of any format, or built from rollouts; with `advantages`, and `old_log_probs` unless given here.
        eps_clip: how far below 1 the ratio may go.
        eps_clip_high: how far above.
        reduction: `token`, `response`, `group` or `constant`.
        old_log_probs: `[S]` instead of the rollouts' own: the rollout policy's, or this very forward's for an update
            anchored on itself (ratio 1, gradient intact).
        kind: which loss.
        dual_clip: above 1; for `ppo` and `gspo`.
        weights: `[S]` factors of the token losses, used without gradient: see `importance_weights`.
        group_sizes: of the whole optimizer step, with the `group` reduction only.

    Raises:
        ValueError: lengths that differ, an unknown kind or reduction, an option its kind does not have, or a sample
            that lacks a field; names it.

    PPO (Schulman et al., 2017, equation 7); two clip limits from DAPO (Yu et al., 2025); dual clip (Ye et al., 2020,
    equation 5); GSPO (Zheng et al., 2025, equation 5); CISPO (MiniMax-M1, 2025, equation 4).

    >>> from pack_torch.batch import build_batch
    >>> rollout = Rollout("a", [1, 2, 3], 2, advantages=[1.0, 1.0], old_log_probs=[-1.0, -1.0])
    >>> policy_loss(torch.tensor([-1.0, 0.0]), build_batch([rollout], [0])).numerator  # 1 and e, held at 1.28
    tensor(-2.2800)
    """
    check_reduction(reduction)
    _check_options(kind, dual_clip, old_log_probs)
    log_probs = batch_log_probs(scores, batch)
    old = batch.concat("old_log_probs") if old_log_probs is None and kind != "reinforce" else old_log_probs
    advantages = batch.concat("advantages")
    check_lengths(batch, log_probs=log_probs, old_log_probs=old, weights=weights)
    active = active_places(batch).to(log_probs.device)
    new = log_probs.index_select(0, active)
    advantage = advantages.to(log_probs).index_select(0, active)
    if old is None:
        losses, clipped, held = -advantage * new, torch.zeros_like(active, dtype=torch.bool), torch.tensor(0)
    else:
        log_ratio = new - old.detach().to(log_probs).index_select(0, active)
        if kind == "gspo":
            log_ratio = _sample_means(split_active(log_ratio, batch))
        ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        limits = _Limits(1 - eps_clip, 1 + eps_clip_high, dual_clip)
        losses, clipped, held = (
            _held_ratio(new, ratio, advantage, limits)
            if kind == "cispo"
            else _clipped_objective(ratio, advantage, limits)
        )
    if weights is not None:
        losses = losses * weights.detach().to(losses).index_select(0, active)
    numerator = sum_active(losses, batch, reduction, group_sizes)
    where = torch.zeros(log_probs.shape, dtype=torch.bool, device=log_probs.device).index_put((active,), clipped)
    return PolicyLoss(numerator, clipped.sum(), int(active.numel()), where, held)


def _check_options(kind: str, dual_clip: float | None, old_log_probs: Tensor | None) -> None:
    if kind not in get_args(Kind):
        raise ValueError(f"kind {kind!r} is not one of {', '.join(get_args(Kind))}")
    if dual_clip is not None and kind not in ("ppo", "gspo"):
        raise ValueError(f"dual_clip is {dual_clip} but {kind} has no clipped objective; use ppo or gspo, or leave it")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip} but must be above 1, the ratio of an unchanged policy")
    if kind == "reinforce" and old_log_probs is not None:
        raise ValueError("old_log_probs are given but reinforce has no ratio; leave them out, or use ppo")


def _clipped_objective(ratio: Tensor, advantage: Tensor, limits: _Limits) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses, which tokens were clipped, and how many the dual clip held."""
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(limits.low, limits.high)
    losses, where = torch.maximum(plain, clipped), (clipped > plain).detach()
    if limits.dual is None:
        return losses, where, torch.zeros((), dtype=torch.int64, device=ratio.device)
    most = -advantage * limits.dual
    held = (advantage < 0) & (losses > most).detach()
    return torch.where(held, most, losses), where, held.sum()


def _held_ratio(new: Tensor, ratio: Tensor, advantage: Tensor, limits: _Limits) -> tuple[Tensor, Tensor, Tensor]:
    fixed = ratio.detach()
    held = fixed.clamp(limits.low, limits.high)
    return -advantage * held * new, held != fixed, torch.zeros((), dtype=torch.int64, device=ratio.device)


def _sample_means(parts: Sequence[Tensor]) -> Tensor:
    """Return for each active token the mean over the active tokens of its sample, which are one of `parts`."""
    # Not by index_add: the order in which a GPU adds is not fixed there.
    return torch.cat([(part.sum() / max(part.numel(), 1)).expand(part.numel()) for part in parts])

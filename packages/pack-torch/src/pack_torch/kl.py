"""Distance to a reference policy, and entropy: loss terms, or a penalty on rewards."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from pack_torch.counts import GroupSizes, Reduction
from pack_torch.loss import LOG_RATIO_LIMIT
from pack_torch.reductions import TokenLoss, active_places, check_lengths, reduce_tokens
from pack_torch.scored import ScoredBatch

KLKind = Literal["k1", "k2", "k3", "low_var"]

#: Where `low_var` holds a token's estimate, either way.
LOW_VAR_LIMIT = 10.0


def token_kl(log_probs: Tensor, ref_log_probs: Tensor, kind: KLKind = "k3") -> Tensor:
    """Return an estimate of the Kullback-Leibler divergence to the reference, per sampled token.

    With d = ref - log_prob: `k1` is -d, unbiased and of either sign, and as a loss its gradient is 0 on average; `k2`
    is d^2 / 2; `k3` is exp(d) - 1 - d, unbiased and never negative; `low_var` is k3 held within 10, without gradient
    beyond. In k3 and low_var a d above 20 is held at 20, so that exp() stays finite.

    Args:
        log_probs: `[S]` of the policy, with their graph if it is a loss.
        ref_log_probs: `[S]` of the reference, used without gradient.
        kind: which estimate.

    Raises:
        ValueError: shapes that differ, or no such kind.

    Schulman, "Approximating KL divergence" (2020).

    >>> token_kl(torch.tensor([-1.0]), torch.tensor([-3.0]), "k2")
    tensor([2.])
    """
    if log_probs.shape != ref_log_probs.shape:
        raise ValueError(
            f"log_probs have shape {list(log_probs.shape)} and ref_log_probs {list(ref_log_probs.shape)}; give one of "
            "each per token"
        )
    if kind not in get_args(KLKind):
        raise ValueError(f"kind {kind!r} is not one of {', '.join(get_args(KLKind))}")
    difference = ref_log_probs.detach().to(log_probs) - log_probs
    if kind == "k1":
        return -difference
    if kind == "k2":
        return difference**2 / 2
    # Only from above: far below, exp() is 0 and the rest is linear, gradient and all.
    difference = difference.clamp(max=LOG_RATIO_LIMIT)
    estimate = difference.exp() - 1 - difference
    return estimate.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT) if kind == "low_var" else estimate


def _active_kl(log_probs: Tensor, batch: ScoredBatch, kind: KLKind, reference: Tensor | None) -> Tensor:
    """Return `[S]` estimates, 0 where masked; the arithmetic never sees what the mask hides."""
    reference = batch.concat("ref_log_probs") if reference is None else reference
    check_lengths(batch, log_probs=log_probs, ref_log_probs=reference)
    active = active_places(batch).to(log_probs.device)
    estimates = token_kl(log_probs.index_select(0, active), reference.to(log_probs).index_select(0, active), kind)
    return torch.zeros_like(log_probs).index_put((active,), estimates)


def kl_loss(
    log_probs: Tensor,
    batch: ScoredBatch,
    *,
    kind: KLKind = "k3",
    reduction: Reduction = "token",
    ref_log_probs: Tensor | None = None,
    group_sizes: GroupSizes | None = None,
) -> TokenLoss:
    """Return the numerator of the divergence to the reference over one packed row; multiply by a coefficient and add.

    Args:
        log_probs: `[S]` of the current policy, with their graph.
        batch: built from rollouts that have `ref_log_probs`, unless given here.
        kind: see `token_kl`.
        reduction: as the policy loss it is added to.
        ref_log_probs: `[S]` instead of the rollouts' own.
        group_sizes: with the `group` reduction only.

    Raises:
        ValueError: lengths that differ, no such kind or reduction, or a sample without `ref_log_probs`; names it.

    >>> from pack_torch import Rollout, build_batch
    >>> batch = build_batch([Rollout("a", [1, 2, 3], 2, ref_log_probs=[-1.0, -3.0])], [0])
    >>> kl_loss(torch.tensor([-1.0, -1.0]), batch, kind="k1").numerator
    tensor(2.)
    """
    estimates = _active_kl(log_probs, batch, kind, ref_log_probs)
    return reduce_tokens(estimates, batch, reduction=reduction, group_sizes=group_sizes)


def kl_penalty(
    log_probs: Tensor,
    batch: ScoredBatch,
    *,
    coefficient: float,
    kind: KLKind = "k1",
    ref_log_probs: Tensor | None = None,
) -> Tensor:
    """Return what to subtract from each sample's reward, before advantages are made of rewards.

    It is the coefficient times the sum of the estimates over the sample's active tokens: with `k1`, the log-ratio of
    the whole response. Only one of the two is meant to be used: this, or `kl_loss`.

    Args:
        log_probs: `[S]` of the policy that is compared with the reference.
        batch: built from rollouts that have `ref_log_probs`, unless given here.
        coefficient: reward per nat.
        kind: see `token_kl`.
        ref_log_probs: `[S]` instead of the rollouts' own.

    Returns:
        `[samples]` in the row's order, without gradient; 0 for a fully masked or empty response.

    Raises:
        ValueError: as `kl_loss`.

    >>> from pack_torch import Rollout, build_batch
    >>> batch = build_batch([Rollout("a", [1, 2, 3], 2, ref_log_probs=[-1.5, -3.0])], [0])
    >>> kl_penalty(torch.tensor([-1.0, -1.0]), batch, coefficient=0.1)
    tensor([0.2500])
    """
    estimates = _active_kl(log_probs.detach(), batch, kind, ref_log_probs)
    return coefficient * torch.stack([values.sum() for values in batch.split(estimates)])


def entropy_bonus(
    entropy: Tensor, batch: ScoredBatch, *, reduction: Reduction = "token", group_sizes: GroupSizes | None = None
) -> TokenLoss:
    """Return the numerator of the entropy bonus, minus the entropy: multiply by a coefficient and add to a loss.

    Args:
        entropy: `[S]` entropy in nats of the distribution each response token was drawn from, with its graph.
        batch: built from rollouts.
        reduction: as the policy loss it is added to.
        group_sizes: with the `group` reduction only.

    Raises:
        ValueError: lengths that differ, or no such reduction.

    >>> from pack_torch import Rollout, build_batch
    >>> batch = build_batch([Rollout("a", [1, 2, 3], 2, loss_mask=[1, 0])], [0])
    >>> entropy_bonus(torch.tensor([0.5, 9.0]), batch).numerator
    tensor(-0.5000)
    """
    loss = reduce_tokens(entropy, batch, reduction=reduction, group_sizes=group_sizes)
    return TokenLoss(-loss.numerator, loss.active_tokens)

"""Truncated importance sampling: how much likelier the trainer finds a token than the engine that sampled it."""

from __future__ import annotations

from typing import Literal

import attrs
import torch
from torch import Tensor

from pack_torch.loss import LOG_RATIO_LIMIT


@attrs.frozen(eq=False)
class ImportanceWeights:
    """Factors of the token losses of one packed row, without gradient.

    Args:
        values: `[S]`; 0 where masked.
        clipped: scalar: active tokens whose weight was outside the limits. Adds up over packs and ranks.
        active_tokens: tokens that counted. Adds up too.
    """

    values: Tensor
    clipped: Tensor
    active_tokens: int

    @property
    def clipped_share(self) -> float:
        """The clipped part of these active tokens, 0.0 when there are none. Of several packs, add the counts first."""
        return int(self.clipped) / self.active_tokens if self.active_tokens else 0.0


def importance_weights(
    trainer: Tensor,
    rollout: Tensor,
    mask: Tensor,
    low: float = 0.0,
    high: float = 2.0,
    *,
    outside: Literal["clamp", "zero"] = "clamp",
) -> ImportanceWeights:
    """Return exp(trainer - rollout) per token, held within limits, for `policy_loss(..., weights=...)`.

    The weights scale numerators only: a token whose weight is 0 still counts in the denominator.

    Args:
        trainer: `[S]` log-probabilities by the trainer under the weights that sampled.
        rollout: `[S]` log-probabilities as sampled.
        mask: `[S]` bool or 0/1; where it is 0 the weight is 0, whatever the log-probabilities hold.
        low: weights below are outside, `low` itself is not.
        high: weights above are outside.
        outside: `clamp` sets those to the nearer limit, `zero` drops their tokens from the numerator.

    Raises:
        ValueError: shapes that differ, limits out of order, or no such choice.

    Truncation from Yao et al. (2025); the masked variant is IcePop (Ling team, 2025).

    >>> weights = importance_weights(torch.tensor([0.0, -1.0]), torch.tensor([-3.0, -1.0]), torch.ones(2))
    >>> weights.values, weights.clipped_share
    (tensor([2., 1.]), 0.5)
    """
    if not trainer.shape == rollout.shape == mask.shape:
        shapes = [list(values.shape) for values in (trainer, rollout, mask)]
        raise ValueError(f"trainer, rollout and mask have shapes {shapes}; give one entry of each per response token")
    if not 0 <= low <= high:
        raise ValueError(f"limits are {low} and {high}; they must be 0 or above, the lower first")
    if outside not in ("clamp", "zero"):
        raise ValueError(f"outside {outside!r} is not one of clamp, zero")
    kept = mask.to(torch.bool)
    difference = (trainer.detach() - rollout.detach().to(trainer)).where(kept, torch.zeros((), device=trainer.device))
    ratio = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    beyond = ((ratio < low) | (ratio > high)) & kept
    held = ratio.clamp(low, high) if outside == "clamp" else ratio.masked_fill(beyond, 0.0)
    return ImportanceWeights(held.masked_fill(~kept, 0.0), beyond.sum(), int(kept.sum()))

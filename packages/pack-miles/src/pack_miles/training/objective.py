"""What one packed row adds to a step's loss: the anchor of its ratios, its importance weights, its numerator."""

import attrs
from pack_torch import PackedBatch, importance_weights, policy_loss
from torch import Tensor

from pack_miles.settings.config import Config


@attrs.frozen(eq=False)
class RowLoss:
    """The numerator of a row's loss, and of its active tokens how many ratios and how many weights were limited."""

    numerator: Tensor
    clipped: int
    truncated: int


@attrs.frozen(eq=False)
class Learned:
    """The backward of one rank's packs of a step: its objective, what was limited, and log-probabilities by sample."""

    objective: float
    clipped: int
    truncated: int
    captured: list[Tensor]


def row_loss(config: Config, log_probs: Tensor, batch: PackedBatch, *, scored: bool) -> RowLoss:
    """Return what a row adds to its step.

    Args:
        config: the run's.
        log_probs: `[S]` of the training forward, with their graph.
        batch: the row.
        scored: whether its samples have the scores of a pass of their own; without, this very forward's stand for them.

    Raises:
        ValueError: a sample lacks what its anchor or its weight is made of; it is named.
    """
    miles = config.miles
    trainer = batch.concat("old_log_probs") if scored else log_probs.detach()
    old = batch.concat("rollout_log_probs") if miles.use_rollout_logprobs else trainer
    weights, truncated = None, 0
    if miles.use_tis:
        sampled, mask = batch.concat("rollout_log_probs"), batch.concat("loss_mask")
        held = importance_weights(trainer, sampled, mask, miles.tis_clip_low, miles.tis_clip)
        weights, truncated = held.values, int(held.clipped)
    loss = policy_loss(
        log_probs,
        batch,
        old_log_probs=old,
        eps_clip=miles.eps_clip,
        eps_clip_high=miles.eps_clip_high,
        reduction=config.reduction,
        weights=weights,
    )
    return RowLoss(loss.numerator, int(loss.clipped), truncated)

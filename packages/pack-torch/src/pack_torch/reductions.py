"""How token losses become one number: numerators of packs, and never a mean of means."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from pack_torch.counts import GroupSizes, Reduction, check_reduction
from pack_torch.rollout import Rollout as Rollout
from pack_torch.scored import ScoredBatch


@attrs.frozen(eq=False)
class TokenLoss:
    """The part one pack adds to an optimizer step's loss.

    Args:
        numerator: scalar with its graph; divide by the step's global denominator, then call backward.
        active_tokens: tokens that counted.
    """

    numerator: Tensor
    active_tokens: int


def active_places(batch: ScoredBatch) -> Tensor:
    """Return `[active]` int64: which of the `[S]` response tokens train, in the row's order."""
    return batch.concat("loss_mask").nonzero().squeeze(1)


def split_active(values: Tensor, batch: ScoredBatch) -> tuple[Tensor, ...]:
    """Return one tensor per sample of values that hold the active tokens only, `[active]`."""
    return torch.split_with_sizes(values, [rollout.active_tokens for rollout in batch.rollouts])


def check_lengths(batch: ScoredBatch, **values: Tensor | None) -> None:
    """Raise unless every tensor has one entry per response token; names it."""
    expected = sum(batch.response_lens)
    for name, tensor in values.items():
        if tensor is not None and tensor.shape != (expected,):
            raise ValueError(
                f"{name} have shape {list(tensor.shape)} but the samples have {expected:,} response tokens"
            )


def sum_active(losses: Tensor, batch: ScoredBatch, reduction: Reduction, sizes: GroupSizes | None) -> Tensor:
    """Return the numerator of losses that hold the active tokens only, `[active]`."""
    check_reduction(reduction)
    if (sizes is not None) != (reduction == "group"):
        raise ValueError(
            f"group_sizes are {'given' if sizes is not None else 'missing'} with reduction {reduction!r}; group needs "
            "them, no other takes them"
        )
    if reduction in ("token", "constant"):
        return losses.sum()
    shares = [1.0 if sizes is None else float(sizes.share(rollout)) for rollout in batch.rollouts]
    counts = torch.tensor([rollout.active_tokens for rollout in batch.rollouts])
    per_sample = torch.tensor(shares, dtype=torch.float64) / counts.clamp(min=1)
    return (losses * torch.repeat_interleave(per_sample, counts).to(losses)).sum()


def reduce_tokens(
    values: Tensor, batch: ScoredBatch, *, reduction: Reduction = "token", group_sizes: GroupSizes | None = None
) -> TokenLoss:
    """Return the numerator of any per-token quantity of one packed row; numerators of any cut add up to the same.

    `token` and `constant` sum the active tokens. `response` sums each sample's mean over its own active tokens. `group`
    sums those means, each divided by the number of responses its group has in the whole step, so that divided by the
    number of groups it is the mean over groups of the mean over a group's responses of each one's token mean. Masked
    tokens are taken out before any arithmetic: whatever they hold, NaN included, reaches neither value nor gradient.

    Args:
        values: `[S]`, one per response token, in the row's order.
        batch: built from rollouts.
        reduction: `token`, `response`, `group` or `constant`; see `Normalization.denominator` for what divides it.
        group_sizes: of the whole optimizer step, with `group` only.

    Raises:
        ValueError: lengths that differ, an unknown reduction, group sizes missing or out of place.

    Constant length from Dr. GRPO (Liu et al., 2025).

    >>> from pack_torch.batch import build_batch
    >>> rollouts = [Rollout("a", [1, 2, 3], 2), Rollout("b", [1, 2, 3], 2, loss_mask=[0, 1])]
    >>> values = torch.tensor([1.0, 2.0, float("nan"), 4.0])
    >>> reduce_tokens(values, build_batch(rollouts, [0, 1]), reduction="response").numerator  # 3 / 2 + 4
    tensor(5.5000)
    """
    check_lengths(batch, values=values)
    active = active_places(batch).to(values.device)
    taken = values.index_select(0, active)
    return TokenLoss(sum_active(taken, batch, reduction, group_sizes), int(active.numel()))

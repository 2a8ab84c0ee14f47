"""Losses of known answers: cross-entropy of one, preference between two."""

from __future__ import annotations

from collections.abc import Collection

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from pack_torch.counts import GroupSizes, Reduction
from pack_torch.reductions import TokenLoss, active_places, check_lengths, reduce_tokens, split_active
from pack_torch.scored import ScoredBatch, Scores
from pack_torch.slicing import batch_log_probs


def sft_loss(
    scores: Scores, batch: ScoredBatch, *, reduction: Reduction = "token", group_sizes: GroupSizes | None = None
) -> TokenLoss:
    """Return the numerator of the cross-entropy of the tokens that one packed forward scores.

    Args:
        scores: what the model returned, or `[S]` log-probabilities; with their graph. See `batch_log_probs`.
        batch: of any format, or built from rollouts; its loss masks say what is learned.
        reduction: `token` is the usual one.
        group_sizes: with the `group` reduction only.

    Raises:
        ValueError: lengths that differ, or no such reduction.

    >>> from pack_torch import Rollout, build_batch
    >>> batch = build_batch([Rollout("a", [1, 2, 3], 2), Rollout("b", [1, 2], 1, loss_mask=[0])], [0, 1])
    >>> sft_loss(torch.tensor([-0.5, -1.0, -7.0]), batch).numerator
    tensor(1.5000)
    """
    log_probs = batch_log_probs(scores, batch)
    loss = reduce_tokens(log_probs, batch, reduction=reduction, group_sizes=group_sizes)
    return TokenLoss(-loss.numerator, loss.active_tokens)


@attrs.frozen(eq=False)
class PreferenceLoss:
    """The part one pack adds to the preference loss of an optimizer step.

    Args:
        numerator: scalar with its graph: the sum over pairs. Divide by the pairs of the whole step.
        margins: `[pairs]`, detached: reward of the chosen less reward of the rejected, beta included.
        groups: the group of each pair, in order of first appearance in the row.
        pairs: how many; adds up over packs and ranks.
    """

    numerator: Tensor
    margins: Tensor
    groups: tuple[str | int, ...]
    pairs: int

    @property
    def preferred(self) -> int:
        """Pairs with a margin above 0; adds up over packs and ranks."""
        return int((self.margins > 0).sum())


def dpo_loss(
    scores: Scores,
    batch: ScoredBatch,
    *,
    chosen: Collection[str | int] | None = None,
    beta: float = 0.1,
    ref_log_probs: Scores | None = None,
) -> PreferenceLoss:
    """Return the preference loss of pairs that lie in one batch, anywhere in it, as two documents or two branches.

    The samples of one group are a pair, one of them chosen. A response's score is the sum over its active tokens of
    log_prob - ref_log_prob; the margin of a pair is beta times (score of the chosen - score of the rejected), its loss
    -log(sigmoid(margin)). A fully masked or empty response has score 0. Both need the whole score, so a pair must be
    in one pack: plan pairs, not samples.

    Args:
        scores: what the current policy returned, or its `[S]` log-probabilities; with their graph.
        batch: of the `Preference` format, or built from rollouts with groups; with `ref_log_probs` unless given here.
        chosen: ids of the preferred samples; ids of samples in other packs may be among them. None asks the batch.
        beta: above 0.
        ref_log_probs: instead of the samples' own: what the reference returned, or `[S]`.

    Raises:
        ValueError: a sample without group, a group that is not one chosen and one rejected sample of this row, lengths
            that differ, or a sample without `ref_log_probs`; names it.

    DPO (Rafailov et al., 2023, equation 7).

    >>> from pack_torch import Rollout, build_batch
    >>> pair = [Rollout(name, [1, 2], 1, group="q", ref_log_probs=[-1.0]) for name in ("good", "bad")]
    >>> loss = dpo_loss(torch.tensor([-1.0, -1.0]), build_batch(pair, [1, 0]), chosen={"good"})
    >>> loss.numerator.exp(), loss.margins, loss.groups  # nothing learned yet: the loss is log 2
    (tensor(2.), tensor([0.]), ('q',))
    """
    if not beta > 0:
        raise ValueError(f"beta is {beta} but must be above 0")
    preferred = batch.chosen if chosen is None else chosen
    if preferred is None:
        raise ValueError("the batch does not say which samples are chosen; give chosen, or use the Preference format")
    log_probs = batch_log_probs(scores, batch)
    reference = (
        batch.concat("ref_log_probs") if ref_log_probs is None else batch_log_probs(ref_log_probs, batch).detach()
    )
    check_lengths(batch, log_probs=log_probs, ref_log_probs=reference)
    pairs = _pairs(batch, preferred)
    active = active_places(batch).to(log_probs.device)
    ratios = log_probs.index_select(0, active) - reference.detach().to(log_probs).index_select(0, active)
    scores = torch.stack([values.sum() for values in split_active(ratios, batch)])
    good, bad = (torch.tensor(places, device=scores.device) for places in zip(*pairs.values(), strict=True))
    margins = beta * (scores.index_select(0, good) - scores.index_select(0, bad))
    return PreferenceLoss(-F.logsigmoid(margins).sum(), margins.detach(), tuple(pairs), len(pairs))


def _pairs(batch: ScoredBatch, chosen: Collection[str | int]) -> dict[str | int, tuple[int, int]]:
    """Return the places in the row of the chosen and the rejected sample of every group."""
    members: dict[str | int, list[int]] = {}
    for place, rollout in enumerate(batch.rollouts):
        if rollout.group is None:
            raise ValueError(f"sample {rollout.id!r} has no group; the two samples of a pair share one")
        members.setdefault(rollout.group, []).append(place)
    pairs: dict[str | int, tuple[int, int]] = {}
    for group, places in members.items():
        good = [place for place in places if batch.rollouts[place].id in chosen]
        bad = [place for place in places if batch.rollouts[place].id not in chosen]
        if len(good) != 1 or len(bad) != 1:
            names = [batch.rollouts[place].id for place in places]
            raise ValueError(
                f"group {group!r} has {len(good)} chosen and {len(bad)} rejected samples in this row, {names}; a pair "
                "is one of each, in one pack"
            )
        pairs[group] = (good[0], bad[0])
    return pairs

"""What a loss that depends on the packs is divided by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pack_torch.probe import differs
from pack_torch.rehearsal import Joining
from pack_torch.rollout import Rollout


def blame_loss(
    packed: Sequence[Tensor],
    single: Sequence[Tensor],
    rollouts: Sequence[Rollout],
    cut: Sequence[Sequence[int]],
    joining: Joining,
    tolerance: float,
) -> str:
    """Return the likely fault of a loss that packing changes while all log-probabilities stay.

    Args:
        packed: what each pack adds.
        single: what each rollout adds by itself.
        rollouts: all of them.
        cut: indices of the rollouts of each pack.
        joining: how the packs' losses become the step's.
        tolerance: numbers differ when they are further apart than tolerance * max(1, |x|).

    >>> rollouts = [Rollout("a", [1, 2, 3], 2), Rollout("b", [4, 5], 1)]
    >>> parts, alone = [torch.tensor(2.0)], [torch.tensor(2.5), torch.tensor(1.0)]  # 2 = (2 * 2.5 + 1 * 1) / 3
    >>> blame_loss(parts, alone, rollouts, [[0, 1]], "sum", 1e-6)[:31]
    'denominator local to the pack: '
    """

    def weighted(weights: Sequence[int]) -> bool:
        # A loss divided by the pack's own count adds up once it is multiplied by that count again.
        return all(
            not bool(
                differs(
                    part * sum(weights[i] for i in pack),
                    torch.stack([single[i] * weights[i] for i in pack if weights[i]] or [part * 0]).sum(),
                    tolerance * max(1, sum(weights[i] for i in pack)),
                )
            )
            for part, pack in zip(packed, cut, strict=True)
        )

    counts = {"active tokens": [rollout.active_tokens for rollout in rollouts], "samples": [1] * len(rollouts)}
    for what, weights in counts.items():
        if weighted(weights):
            if joining == "mean":
                return (
                    f"mean of means: every pack's loss is a mean over its own {what}, and these are averaged over "
                    "packs, so a token's weight depends on its neighbours; add numerators up and divide once"
                )
            return (
                f"denominator local to the pack: every pack's loss is divided by its own {what}; divide by those of "
                "the whole step"
            )
    if joining == "mean" and _adds_up(packed, single, cut, tolerance):
        return (
            "mean of means: the packs' losses add up, but are divided by the number of packs, which packing changes; "
            "add them up and divide by what the whole step counts"
        )
    return _blame_padding(packed, single, cut, tolerance) or (
        "not found; the loss looks at more of the pack than its documents' own tokens"
    )


def _blame_padding(
    packed: Sequence[Tensor], single: Sequence[Tensor], cut: Sequence[Sequence[int]], tolerance: float
) -> str | None:
    """Return the fault of a loss that sees one more document in every pack than there is, or None."""
    sums = [torch.stack([single[index] for index in pack]).sum() for pack in cut]
    # One document too many in the denominator: 2 of one alone, packs' own documents plus 1 of theirs.
    if not any(
        bool(differs(part * (len(pack) + 1), total * 2, tolerance * (len(pack) + 1)))
        for part, total, pack in zip(packed, sums, cut, strict=True)
    ):
        return (
            "padding counted as a document: every pack's loss is divided by one document more than it has; divide by "
            "the samples of the whole step, which padding is none of"
        )
    # One too many in the numerator: alone every document brings it along, in a pack all of them bring it once.
    extra = [(total - part) / (len(pack) - 1) for part, total, pack in zip(packed, sums, cut, strict=True) if pack[1:]]
    if len(extra) > 1 and not any(bool(differs(one, extra[0], tolerance)) for one in extra):
        return (
            f"padding counted as a document: every pack adds {float(extra[0].detach()):.6g} beside what its documents "
            "add, as one more document with a loss does; padding has none"
        )
    return None


def _adds_up(
    packed: Sequence[Tensor], single: Sequence[Tensor], cut: Sequence[Sequence[int]], tolerance: float
) -> bool:
    sums = [torch.stack([single[index] for index in pack]).sum() for pack in cut]
    return not any(bool(differs(part, total, tolerance)) for part, total in zip(packed, sums, strict=True))

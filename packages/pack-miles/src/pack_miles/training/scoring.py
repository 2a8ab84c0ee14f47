"""Whether scoring and training agree, and whether trainer and rollout do.

Scoring and training run the same packs through the same weights, so their log-probabilities must agree. When they do
not, a mask, a route or a position differs between the two, and the run must stop before it learns from it.
"""

from collections.abc import Sequence
from typing import Literal

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from pack_miles.contract import events
from pack_miles.settings.sections import Core
from pack_miles.training.collectives import World

#: Differences above this count as outliers in a scoring check.
EDGE = 1e-3

#: Upper edges of the histogram of absolute differences; what lies above the last is the overflow.
EDGES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)

GROUPS = (
    "first_third",
    "middle_third",
    "last_third",
    "length_le_1024",
    "length_1025_4096",
    "length_gt_4096",
)


class DisagreementError(RuntimeError):
    """Log-probabilities that must agree do not; raised alike on every rank."""


def check_due(completed_steps: int, last_check: int | None, interval: int) -> bool:
    """Return whether the update after `completed_steps` is to be checked.

    The first update of a process always is (so the first after a resume, too); later ones each time a multiple of
    `interval` has been reached since the last check. An interval of 0 leaves only the first.

    >>> [step for step in range(8) if check_due(step, last_check=0, interval=3)]
    [3, 4, 5, 6, 7]
    >>> check_due(4, last_check=3, interval=3), check_due(0, None, 0), check_due(9, 0, 0)
    (False, True, False)
    """
    if last_check is None:
        return True
    return interval > 0 and completed_steps // interval > last_check // interval


@attrs.frozen
class Check:
    """How far two lists of log-probabilities lie apart over the active tokens of all ranks."""

    active_tokens: int
    mean_abs: float
    max_abs: float
    tokens_above_edge: int

    def event(self, rank: int, step: int, rollout_id: int, core: Core) -> events.ScoringCheck:
        """Return the comparison as a rank writes it down, with the limits it is held to."""
        return events.ScoringCheck(
            rank=rank,
            step=step,
            rollout_id=rollout_id,
            **attrs.asdict(self),
            edge=EDGE,
            tolerance=core.scoring_check_tolerance,
            max_tolerance=core.scoring_check_max_tolerance,
        )


def compare(first: Sequence[Tensor], second: Sequence[Tensor], masks: Sequence[Tensor], world: World) -> Check:
    """Return the absolute differences of two lists of per-sample log-probabilities `[R]`, over all ranks.

    Raises:
        RankError: on every rank, when on any the shapes differ or the log-probability of an active token is not finite.
        DisagreementError: on every rank, when no token is active.
    """

    def difference() -> Tensor:
        if [tuple(x.shape) for x in first] != [tuple(x.shape) for x in second] or len(first) != len(masks):
            raise ValueError("scoring and training cover different tokens")
        return _active_differences(first, second, masks)

    deltas = world.agreed(difference)
    largest = float(deltas.max()) if deltas.numel() else 0.0
    count, total, above = world.total([deltas.numel(), float(deltas.sum()), int((deltas > EDGE).sum())])
    if not count:
        raise DisagreementError("scoring and training cannot be compared: no token is active in the whole step")
    (largest,) = world.reduce([largest], dist.ReduceOp.MAX)
    return Check(int(count), total / count, largest, int(above))


def gate(check: Check, tolerance: float, max_tolerance: float | None) -> None:
    """Stop the run when scoring and training disagree; every rank holds the same `check`, so every rank raises.

    Raises:
        DisagreementError: when the mean is over `tolerance`, or the maximum over `max_tolerance` where one is given.
    """
    remedy = "; check attention backend, replay and positions before raising the limit"
    if check.mean_abs > tolerance:
        raise DisagreementError(
            f"scoring and training log-probabilities differ by {check.mean_abs:.3g} on average over "
            f"{check.active_tokens:,} active tokens, but scoring_check_tolerance is {tolerance:g}{remedy}"
        )
    if max_tolerance is not None and check.max_abs > max_tolerance:
        raise DisagreementError(
            f"scoring and training log-probabilities differ by up to {check.max_abs:.3g}, "
            f"but scoring_check_max_tolerance is {max_tolerance:g}{remedy}"
        )


@attrs.frozen
class Profile:
    """The distribution of absolute trainer-against-rollout differences over all ranks."""

    active_tokens: int
    mean_abs: float
    max_abs: float
    histogram_counts: tuple[int, ...]
    groups: dict[str, tuple[int, float]]

    def quantile(self, share: float) -> float | None:
        """Return the upper edge of the histogram class in which the quantile lies, or None in the overflow.

        >>> Profile(4, 0.0, 0.0, (2, 0, 0, 1, 0, 0, 0, 0, 0, 1), {}).quantile(0.5)
        0.001
        """
        seen = 0
        for edge, count in zip((*EDGES, None), self.histogram_counts, strict=True):
            seen += count
            if seen >= share * self.active_tokens:
                return edge
        return None

    def event(
        self, rank: int, step: int, rollout_id: int, source: Literal["standalone", "training_forward"]
    ) -> events.Scores:
        """Return the distribution as a rank writes it down."""
        return events.Scores(
            rank=rank,
            step=step,
            rollout_id=rollout_id,
            source=source,
            active_tokens=self.active_tokens,
            max_abs=self.max_abs,
            p50_upper=self.quantile(0.50),
            p95_upper=self.quantile(0.95),
            p99_upper=self.quantile(0.99),
            histogram_upper_edges=(*EDGES, None),
            histogram_counts=self.histogram_counts,
            groups={
                name: events.Agreement(tokens=tokens, mean_abs=mean if tokens else None)
                for name, (tokens, mean) in self.groups.items()
            },
        )


def profile(trainer: Sequence[Tensor], rollout: Sequence[Tensor], masks: Sequence[Tensor], world: World) -> Profile:
    """Return how the trainer's log-probabilities differ from the rollout's, by size, position and length.

    Raises:
        RankError: on every rank, when on any the log-probability of an active token is not finite.
    """
    counts = torch.zeros(len(EDGES) + 1, dtype=torch.float64)
    tokens = torch.zeros(len(GROUPS), dtype=torch.float64)
    sums = torch.zeros(len(GROUPS), dtype=torch.float64)
    largest = 0.0
    edges = torch.tensor(EDGES, dtype=torch.float64)
    deltas = world.agreed(lambda: list(map(_delta, trainer, rollout, masks)))
    for delta, mask in zip(deltas, masks, strict=True):
        if not delta.numel():
            continue
        length = mask.numel()
        largest = max(largest, float(delta.max()))
        counts += torch.bincount(torch.bucketize(delta, edges), minlength=len(EDGES) + 1)
        thirds = (mask.bool().nonzero().flatten() * 3) // length
        classes = 3 + (length > 1024) + (length > 4096)
        for third in range(3):
            tokens[third] += int((thirds == third).sum())
            sums[third] += float(delta[thirds == third].sum())
        tokens[classes] += delta.numel()
        sums[classes] += float(delta.sum())
    totals = world.total([*counts.tolist(), *tokens.tolist(), *sums.tolist()])
    (largest,) = world.reduce([largest], dist.ReduceOp.MAX)
    n = len(EDGES) + 1
    histogram = tuple(int(count) for count in totals[:n])
    tokens_of, sums_of = totals[n : n + len(GROUPS)], totals[n + len(GROUPS) :]
    active_tokens = sum(histogram)
    return Profile(
        active_tokens=active_tokens,
        mean_abs=sum(sums_of[:3]) / max(active_tokens, 1),
        max_abs=largest,
        histogram_counts=histogram,
        groups={
            name: (int(count), total / max(count, 1))
            for name, count, total in zip(GROUPS, tokens_of, sums_of, strict=True)
        },
    )


def _active_differences(first: Sequence[Tensor], second: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    """Return the absolute differences over active tokens, flat, in float64.

    Raises:
        ValueError: one is not finite.
    """
    parts = [_delta(one, other, mask) for one, other, mask in zip(first, second, masks, strict=True)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _delta(one: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    delta = (one.double() - other.double()).abs()[mask.bool()]
    if not torch.isfinite(delta).all():
        raise ValueError("the log-probability of an active token is not finite")
    return delta

"""What one packed forward says about each of its samples, as sums that add up over packs and ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import attrs
import torch
from torch import Tensor

from pack_torch.reductions import active_places, check_lengths, split_active
from pack_torch.scored import ScoredBatch, Scores
from pack_torch.slicing import batch_log_probs


@attrs.frozen
class SampleMetrics:
    """Sums over active tokens, of one sample or of many. They add up with `+`; the means are made at the end.

    Args:
        samples: how many.
        tokens: prompt and response.
        response_tokens: masked ones included.
        active_tokens: those that train, which the sums below run over.
        log_prob: sum of log-probabilities.
        entropy: sum of entropies in nats; None when not measured.
        kl: sum of divergence estimates in nats; None when not measured.
        clipped: tokens that the loss clipped; None when not measured.

    >>> one = SampleMetrics(samples=1, tokens=9, response_tokens=4, active_tokens=2, log_prob=-3.0)
    >>> both = one + SampleMetrics(samples=1, tokens=5, response_tokens=2, active_tokens=2, log_prob=-1.0)
    >>> both.means()
    {'tokens': 7.0, 'response_tokens': 3.0, 'active_tokens': 2.0, 'log_prob': -1.0}
    """

    samples: int
    tokens: int
    response_tokens: int
    active_tokens: int
    log_prob: float
    entropy: float | None = None
    kl: float | None = None
    clipped: int | None = None

    def __add__(self, other: SampleMetrics) -> SampleMetrics:
        """Return the sums of both together.

        Raises:
            ValueError: one of them measured what the other did not.
        """
        mine, theirs = self.sums(), other.sums()
        if mine.keys() != theirs.keys():
            lone = sorted(mine.keys() ^ theirs.keys())
            raise ValueError(f"{', '.join(lone)} measured on one side only; measure the same in every pack and rank")
        return SampleMetrics(**{name: value + theirs[name] for name, value in mine.items()})  # type: ignore[arg-type]

    def sums(self) -> dict[str, int | float]:
        """Return what was measured, by name, in a fixed order: ready for one summing all-reduce over the ranks."""
        return {name: value for name, value in attrs.asdict(self).items() if value is not None}

    def means(self) -> dict[str, float]:
        """Return lengths per sample, the rest per active token; 0.0 for sums over no token at all.

        `clipped` becomes the clipped share.
        """
        lengths = {name: getattr(self, name) / max(self.samples, 1) for name in LENGTHS}
        tokens = max(self.active_tokens, 1)
        return lengths | {name: value / tokens for name, value in self.sums().items() if name not in COUNTS}


#: Fields that are averaged over samples.
LENGTHS = ("tokens", "response_tokens", "active_tokens")
COUNTS = ("samples", *LENGTHS)


def sample_metrics(
    scores: Scores,
    batch: ScoredBatch,
    *,
    entropy: Tensor | None = None,
    kl: Tensor | None = None,
    clipped: Tensor | None = None,
) -> dict[str | int, SampleMetrics]:
    """Return the metrics of every sample of one packed forward by its id, in the batch's order.

    Sums are made in float64 over active tokens only; what the mask hides may be anything. A fully masked or empty
    response has sums of 0.

    Args:
        scores: what the model returned, or `[S]` log-probabilities.
        batch: of any format, or built from rollouts.
        entropy: `[S]` in nats, as `chunked_log_probs` returns it.
        kl: `[S]` in nats, as `token_kl` returns it.
        clipped: `[S]` bool, as `policy_loss` returns it in `clipped_tokens`.

    Raises:
        ValueError: lengths that differ, or two samples of one id in the row.

    >>> from pack_torch import Rollout, build_batch
    >>> batch = build_batch([Rollout("a", [1, 2, 3], 2, loss_mask=[0, 1])], [0])
    >>> sample_metrics(torch.tensor([-9.0, -0.5]), batch)["a"].sums()
    {'samples': 1, 'tokens': 3, 'response_tokens': 2, 'active_tokens': 1, 'log_prob': -0.5}
    """
    log_probs = batch_log_probs(scores, batch)
    check_lengths(batch, log_probs=log_probs, entropy=entropy, kl=kl, clipped=clipped)
    active = active_places(batch).to(log_probs.device)

    def per_sample(values: Tensor) -> list[float]:
        taken = values.detach().to(device=active.device, dtype=torch.float64).index_select(0, active)
        sums: list[float] = torch.stack([part.sum() for part in split_active(taken, batch)]).tolist()
        return sums

    summed = [None if values is None else per_sample(values) for values in (log_probs, entropy, kl, clipped)]
    metrics: dict[str | int, SampleMetrics] = {}
    for place, rollout in enumerate(batch.rollouts):
        if rollout.id in metrics:
            raise ValueError(f"the row has two samples of id {rollout.id!r}; ids are unique within a collection")
        log_prob, spread, distance, held = (None if values is None else values[place] for values in summed)
        metrics[rollout.id] = SampleMetrics(
            samples=1,
            tokens=rollout.length,
            response_tokens=rollout.response_length,
            active_tokens=rollout.active_tokens,
            log_prob=log_prob or 0.0,
            entropy=spread,
            kl=distance,
            clipped=None if held is None else int(held),
        )
    return metrics


def total_metrics(metrics: Iterable[SampleMetrics]) -> SampleMetrics:
    """Return the sums of all of these together.

    Raises:
        ValueError: there are none, or some measured what others did not.

    >>> total_metrics([SampleMetrics(1, 3, 2, 2, -1.0), SampleMetrics(1, 2, 1, 0, 0.0)]).means()["log_prob"]
    -0.5
    """
    collected = list(metrics)
    if not collected:
        raise ValueError("there are no samples to add up; every rank has at least one pack")
    return reduce(SampleMetrics.__add__, collected)

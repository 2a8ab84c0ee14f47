"""Which rows of a packed row score which response tokens."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from pack_torch.batch import PackedBatch
from pack_torch.precision import wide
from pack_torch.scored import ScoredBatch, Scores
from pack_torch.scored import scored_rows as scored_rows


class ScoringModel(Protocol):
    """What scoring needs of a model: hidden states of a packed row, and logits of some of its rows."""

    def __call__(self, batch: PackedBatch) -> Any:
        """Return an object with `hidden`, `[T, D]`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[rows, vocabulary]` for `[rows, D]`."""


def scored_targets(batch: PackedBatch) -> Tensor:
    """Return `[S]` int64: the response tokens of the batch, each the target of its scored row.

    >>> from pack_torch.batch import Rollout, build_batch
    >>> scored_targets(build_batch([Rollout("a", [1, 2, 3], 2), Rollout("b", [4, 5], 1)], [0, 1])).tolist()
    [2, 3, 5]
    """
    _, targets = batch.score_map()
    return targets


def target_log_probs(logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return `[S]` the log-probability each row of `logits` gives its target, in float32 or wider.

    Args:
        logits: `[S, vocabulary]`.
        targets: `[S]` int64.
        temperature: logits are divided by it, as they are when sampling.

    Raises:
        ValueError: the temperature is not above 0.

    >>> target_log_probs(torch.zeros(1, 4), torch.tensor([2])).exp().tolist()
    [0.25]
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature} but must be above 0; greedy sampling has no log-probabilities")
    scores = wide(logits)
    scaled = scores if temperature == 1.0 else scores / temperature
    return torch.log_softmax(scaled, dim=-1).gather(1, targets.unsqueeze(1)).squeeze(1)


def response_log_probs(model: ScoringModel, batch: PackedBatch, *, temperature: float = 1.0) -> Tensor:
    """Return the log-probability of every response token, from one forward of the packed row.

    The output head runs on the scored rows only, so memory is `[S, vocabulary]` and never `[T, vocabulary]`.

    Args:
        model: gives hidden states `[T, D]` for the batch and logits for rows of them.
        batch: built from rollouts.
        temperature: logits are divided by it.

    Returns:
        `[S]`, samples in the row's order; `batch.split` cuts it per sample.

    >>> from types import SimpleNamespace
    >>> class Uniform:  # any callable with a head will do; this one finds four tokens equally likely
    ...     def __call__(self, batch): return SimpleNamespace(hidden=torch.zeros(batch.tokens, 1))
    ...     def logits(self, hidden): return hidden.expand(-1, 4)
    >>> from pack_torch import Rollout, build_batch
    >>> response_log_probs(Uniform(), build_batch([Rollout("a", [1, 2, 3], 2)], [0])).exp().tolist()
    [0.25, 0.25]
    """
    rows, targets = batch.score_map()
    hidden: Tensor = model(batch).hidden
    logits = model.logits(hidden.index_select(0, rows))
    return target_log_probs(logits, targets, temperature=temperature)


def batch_log_probs(scores: Scores, batch: ScoredBatch, *, temperature: float = 1.0) -> Tensor:
    """Return `[S]` log-probabilities of a batch's scored tokens, whatever the batch is made of.

    Every loss and metric here calls this on its first argument, so a recipe may hand over what the model returned.

    Args:
        scores: logits `[T, vocabulary]` or `[B, T, vocabulary]`, jagged logits, an object that has `logits`, or the
            `[S]` log-probabilities themselves, which are given back.
        batch: a `Batch` of any format, or a `PackedBatch` built from rollouts.
        temperature: logits are divided by it; nothing is done to log-probabilities.

    Raises:
        ValueError: logits of a batch that has other rows.

    >>> from pack_torch import Rollout, build_batch
    >>> batch = build_batch([Rollout("a", [1, 2, 3], 2)], [0])
    >>> batch_log_probs(torch.zeros(1, 3, 4), batch).exp().tolist()
    [0.25, 0.25]
    """
    logits = scores if isinstance(scores, Tensor) else scores.logits
    if logits.is_nested:
        logits = logits.values()
    if logits.dim() == 1:
        return logits
    rows, targets = batch.score_map()
    flat = logits.flatten(0, -2)
    if flat.shape[0] != batch.rows:
        raise ValueError(
            f"logits have shape {list(logits.shape)} but the batch has {batch.rows:,} rows; give the logits of every "
            "row of this batch, or [S] log-probabilities"
        )
    return target_log_probs(
        flat.index_select(0, rows.to(flat.device)), targets.to(flat.device), temperature=temperature
    )

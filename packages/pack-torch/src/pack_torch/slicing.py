"""Which rows of a packed row score which response tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pack_torch.batch import PackedBatch
from pack_torch.precision import wide


class ScoringModel(Protocol):
    """What scoring needs of a model: hidden states of a packed row, and logits of some of its rows."""

    def __call__(self, batch: PackedBatch) -> Any:
        """Return an object with `hidden`, `[T, D]`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[rows, vocabulary]` for `[rows, D]`."""


def scored_rows(doc_lens: Sequence[int], response_lens: Sequence[int]) -> Tensor:
    """Return the rows whose logits score the response tokens, documents in order.

    A document that ends at row e (exclusive) with R response tokens is scored by its own rows [e-R-1, e-1), each of
    which predicts the token after it. The document's last row predicts nothing.

    Args:
        doc_lens: tokens of each document.
        response_lens: response tokens of each; 0 adds no row.

    Returns:
        `[S]` int64 row numbers, S the sum of `response_lens`.

    Raises:
        ValueError: a response as long as its document, for the row before it would be another document's.

    >>> scored_rows([5, 8], [3, 2]).tolist()
    [1, 2, 3, 10, 11]
    """
    rows: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
    end = 0
    for document, (length, response) in enumerate(zip(doc_lens, response_lens, strict=True)):
        if not 0 <= response < length:
            raise ValueError(
                f"document {document} has {length:,} tokens and a response of {response:,}, but a response is scored "
                "from the row before it; the prompt needs at least one token"
            )
        end += length
        rows.append(torch.arange(end - response - 1, end - 1))
    return torch.cat(rows)


def scored_targets(batch: PackedBatch) -> Tensor:
    """Return `[S]` int64: the response tokens of the batch, each the target of its scored row.

    >>> from pack_torch.batch import Rollout, build_batch
    >>> scored_targets(build_batch([Rollout("a", [1, 2, 3], 2), Rollout("b", [4, 5], 1)], [0, 1])).tolist()
    [2, 3, 5]
    """
    rows = scored_rows(batch.doc_lens, batch.response_lens).to(batch.input_ids.device)
    return batch.input_ids[rows + 1]


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
    rows = scored_rows(batch.doc_lens, batch.response_lens).to(batch.input_ids.device)
    hidden: Tensor = model(batch).hidden
    logits = model.logits(hidden.index_select(0, rows))
    return target_log_probs(logits, batch.input_ids[rows + 1], temperature=temperature)

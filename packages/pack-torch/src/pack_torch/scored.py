"""What losses and metrics ask of a batch: which rows predict which tokens, and whose tokens these are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor


class Sample(Protocol):
    """One scored sample: a rollout, a document, or one branch of a shared prompt."""

    @property
    def id(self) -> str | int:
        """Unique within the batch."""

    @property
    def group(self) -> str | int | None:
        """What it is compared with: the prompt it answers."""

    @property
    def length(self) -> int:
        """Tokens of prompt and response, as if it stood alone."""

    @property
    def response_length(self) -> int:
        """Tokens that are scored."""

    @property
    def active_tokens(self) -> int:
        """Of these, the tokens that train."""


class ScoredBatch(Protocol):
    """One packed forward as the losses see it, S scored tokens in all: a `PackedBatch`, or a `Batch` of any format."""

    @property
    def rollouts(self) -> Sequence[Sample]:
        """The samples, in the order of their scored tokens."""

    @property
    def response_lens(self) -> tuple[int, ...]:
        """Scored tokens of each sample."""

    @property
    def chosen(self) -> Collection[str | int] | None:
        """Ids of the preferred samples, where the batch knows them."""

    @property
    def rows(self) -> int:
        """Rows of logits that a forward gives, padding included."""

    def score_map(self) -> tuple[Tensor, Tensor]:
        """Return `[S]` rows of the flattened logits, and `[S]` the token that each predicts."""

    def concat(self, name: str) -> Tensor:
        """Return `[S]` of a field with one value per scored token: `loss_mask`, `advantages`, ..."""

    def split(self, values: Tensor) -> list[Tensor]:
        """Return one tensor per sample of a `[S]` tensor."""


class HasLogits(Protocol):
    """What models return that wrap their logits."""

    @property
    def logits(self) -> Tensor:
        """`[B, T, vocabulary]`."""


#: What a loss takes first: `[S]` log-probabilities, or logits `[..., vocabulary]`, or an object that has these.
Scores = Tensor | HasLogits


@attrs.frozen
class ScoredSample:
    """A sample of a `Batch`; what it means says `Sample`."""

    id: str | int
    group: str | int
    length: int
    response_length: int
    active_tokens: int


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

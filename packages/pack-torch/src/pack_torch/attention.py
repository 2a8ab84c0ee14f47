"""Attention backends by name, each saying whether it keeps the documents of a packed row apart."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import attrs
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pack_torch.batch import PackedBatch
from pack_torch.masks import document_causal_mask

#: query, key, value `[T, heads, head size]` and the batch they come from, to `[T, heads, head size]`.
AttentionFunction = Callable[[Tensor, Tensor, Tensor, PackedBatch], Tensor]


@attrs.frozen
class AttentionBackend:
    """Causal attention over a packed row, and what it can be trusted with.

    Args:
        name: what configuration calls it.
        keeps_documents_apart: no token sees another document's. One that cannot is refused for rows of several.
        description: one line for people.
        function: does the work.
    """

    name: str
    keeps_documents_apart: bool
    description: str
    function: AttentionFunction

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch) -> Tensor:
        """Return `[T, heads, head size]` attention of each row over its own document's past.

        Raises:
            ValueError: the row has several documents and this backend would let them see each other.
        """
        self.check(batch)
        return self.function(query, key, value, batch)

    def check(self, batch: PackedBatch) -> None:
        """Raise ValueError when this backend must not run on `batch`."""
        if batch.documents > 1 and not self.keeps_documents_apart:
            apart = ", ".join(backend.name for backend in BACKENDS.values() if backend.keeps_documents_apart)
            raise ValueError(
                f"attention backend {self.name!r} cannot keep documents apart but the row has {batch.documents}; "
                f"use one of {apart}, or put one sample in a row"
            )


def _heads_first(rows: Tensor, documents: int, length: int) -> Tensor:
    return rows.view(documents, length, *rows.shape[1:]).transpose(1, 2)  # [n, heads, length, head size]


def _segment(query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch) -> Tensor:
    order = batch.length_order
    inputs = [query, key, value]
    if order.rows is not None:
        inputs = [rows.index_select(0, order.rows) for rows in inputs]
    sizes = [documents * length for documents, length in order.groups]
    outputs = []
    for (documents, length), *rows in zip(
        order.groups, *(torch.split_with_sizes(rows, sizes) for rows in inputs), strict=True
    ):
        q, k, v = (_heads_first(part, documents, length) for part in rows)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        outputs.append(attended.transpose(1, 2).reshape(documents * length, *query.shape[1:]))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined if order.inverse is None else joined.index_select(0, order.inverse)


def _dense(query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch) -> Tensor:
    mask = document_causal_mask(batch.document_ids)
    q, k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in (query, key, value))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(0).transpose(0, 1)


def _torch(query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch) -> Tensor:
    q, k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in (query, key, value))
    return scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(0).transpose(0, 1)


BACKENDS = MappingProxyType(
    {
        backend.name: backend
        for backend in (
            AttentionBackend("segment", True, "one call per distinct document length; the CPU reference", _segment),
            AttentionBackend("dense", True, "one call with an explicit [T, T] mask; for tests", _dense),
            AttentionBackend("torch", False, "one call over the whole row; one sample a row only", _torch),
        )
    }
)


def get_attention(name: str) -> AttentionBackend:
    """Return the backend called `name`.

    Raises:
        ValueError: no such backend; lists those there are.

    >>> get_attention("segment").keeps_documents_apart, get_attention("torch").keeps_documents_apart
    (True, False)
    """
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is not one of {', '.join(BACKENDS)}")
    return BACKENDS[name]

"""Attention with torch's own `scaled_dot_product_attention`, which runs on every device and in every precision.

Shapes: query `[T, heads, size]`; key and value `[T, key heads, size]`, whose heads divide the query's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pack_torch.batch import PackedBatch
from pack_torch.masks import causal_band

#: Rows that share one masked call when a window is set, unless the window is longer.
STRIP = 256


def segment(
    query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch, window: int | None = None, dropout: float = 0.0
) -> Tensor:
    """Return `[T, heads, size]`: documents of one length share a call, so none is ever beside another.

    What is not in the call cannot leak, not even a NaN. A window costs tokens x window, never tokens x tokens.
    """
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
        if window is None or window >= length:
            attended = _attend(q, k, v, dropout=dropout)
        else:
            attended = _windowed(q, k, v, window, dropout)
        outputs.append(attended.transpose(1, 2).reshape(documents * length, *query.shape[1:]))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined if order.inverse is None else joined.index_select(0, order.inverse)


def dense(
    query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch, window: int | None = None, dropout: float = 0.0
) -> Tensor:
    """Return `[T, heads, size]` under an explicit `[T, T]` mask.

    A masked weight is 0, and 0 times NaN is NaN: a NaN in one document reaches the others here.
    """
    return _row(query, key, value, batch.dense_mask(window), dropout)


def whole(query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch, dropout: float = 0.0) -> Tensor:
    """Return `[T, heads, size]` of the row as if it were one document."""
    return _row(query, key, value, None, dropout)


def _heads_first(rows: Tensor, documents: int, length: int) -> Tensor:
    return rows.view(documents, length, *rows.shape[1:]).transpose(1, 2)  # [n, heads, length, size]


def _row(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    q, k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in (query, key, value))
    return _attend(q, k, v, mask, dropout).squeeze(0).transpose(0, 1)


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int, dropout: float) -> Tensor:
    length, strip = q.shape[2], max(window, STRIP)
    rows = torch.arange(length, device=q.device)
    outputs = []
    for first in range(0, length, strip):
        end, low = min(first + strip, length), max(0, first - window + 1)
        mask = causal_band(rows[first:end], rows[low:end], window)
        outputs.append(_attend(q[:, :, first:end], k[:, :, low:end], v[:, :, low:end], mask, dropout))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=grouped
    )

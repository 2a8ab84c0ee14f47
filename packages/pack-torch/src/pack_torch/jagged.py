"""Attention over jagged nested tensors: each document one entry of a ragged batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pack_torch.batch import PackedBatch


def missing() -> str:
    """Return what this torch lacks for jagged nested tensors, "" when nothing; the device is another question.

    >>> missing()
    ''
    """
    if not callable(getattr(torch.nested, "nested_tensor_from_jagged", None)):
        return "torch.nested.nested_tensor_from_jagged is not there; install torch 2.6 or later"
    return ""


def attend(query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch) -> Tensor:
    """Return `[T, heads, size]`; the longest and shortest lengths go along, or a kernel would wait to ask for them."""
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(
            rows, offsets=batch.jagged_offsets, min_seqlen=min(batch.doc_lens), max_seqlen=batch.max_seqlen
        ).transpose(1, 2)  # [documents, heads, ragged, size]
        for rows in (query, key, value)
    )
    attended = scaled_dot_product_attention(q, k, v, is_causal=True)
    return attended.transpose(1, 2).contiguous().values()

"""Attention with torch's flex attention, whose block mask lets it skip what no document can see."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from inspect import signature

import torch
from torch import Tensor

from pack_torch.batch import PackedBatch


def missing() -> str:
    """Return what this torch lacks for flex attention, "" when nothing.

    >>> missing()
    ''
    """
    try:
        from torch.nn.attention.flex_attention import BlockMask, flex_attention  # noqa: F401
    except Exception as error:
        return f"torch.nn.attention.flex_attention does not import here: {error}; install torch 2.13 or later"
    if "seq_lengths" not in signature(BlockMask.from_kv_blocks).parameters:
        return "torch's BlockMask.from_kv_blocks takes no seq_lengths here; install torch 2.13 or later"
    return ""


def attend(query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch, window: int | None = None) -> Tensor:
    """Return `[T, heads, size]`: compiled on a GPU; on a CPU eager, which holds the scores, and forward only."""
    q, k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    mask = batch.block_mask(window)
    attended: object
    if query.device.type == "cpu":
        from torch.nn.attention.flex_attention import flex_attention

        if not torch.is_grad_enabled():
            q, k, v = (
                rows.detach() for rows in (q, k, v)
            )  # it asks whether they require gradients, not whether it may
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # known, and said above
            attended = flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
    else:
        attended = _compiled()(q, k, v, block_mask=mask, enable_gqa=grouped)
    assert isinstance(attended, Tensor)  # a tuple comes only to those who ask for the log-sum-exp
    return attended.squeeze(0).transpose(0, 1)


@cache
def _compiled() -> Callable[..., object]:
    # Once a process: compiling takes seconds, and one compiled function serves every layer.
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., object] = torch.compile(flex_attention)
    return compiled

"""Attention with torch's own variable-length kernel, `torch.nn.attention.varlen`."""

from __future__ import annotations

from inspect import signature

from torch import Tensor

from pack_torch.batch import PackedBatch

#: Arguments the call below names; older torch has the function without them.
NEEDED = ("window_size", "enable_gqa", "num_splits")


def missing() -> str:
    """Return what this torch lacks for `varlen_attn`, "" when nothing; the device is another question."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except Exception as error:
        return f"torch.nn.attention.varlen.varlen_attn does not import here: {error}; install torch 2.13 or later"
    lacking = [name for name in NEEDED if name not in signature(varlen_attn).parameters]
    if lacking:
        return f"torch.nn.attention.varlen.varlen_attn takes no {', '.join(lacking)} here; install torch 2.13 or later"
    return ""


def attend(query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch, window: int | None = None) -> Tensor:
    """Return `[T, heads, size]`.

    Causal is a window to the left, for the kernel has no other word for it. One split, or the longest document of
    the row would decide the order of summation in all the others.
    """
    from torch.nn.attention.varlen import varlen_attn

    attended = varlen_attn(
        query,
        key,
        value,
        cu_seq_q=batch.cu_seqlens,
        cu_seq_k=batch.cu_seqlens,
        max_q=batch.max_seqlen,
        max_k=batch.max_seqlen,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
        num_splits=1,
    )
    assert isinstance(attended, Tensor)  # a tuple comes only to those who ask for the log-sum-exp
    return attended

"""Attention with the flash-attn packages, the one module that may name them, and only inside functions.

All metadata is bound by keyword: generations order it differently, and flash-attention 4 put a `qv` before it.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import cast

from torch import Tensor

from pack_torch.batch import PackedBatch

#: What every generation's function must take by name.
NEEDED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "causal", "window_size")

VarlenFunction = Callable[..., Tensor | tuple[Tensor, ...]]


def _find_2() -> VarlenFunction:
    from flash_attn import flash_attn_varlen_func

    return cast(VarlenFunction, flash_attn_varlen_func)


def _find_3() -> VarlenFunction:
    from flash_attn_interface import flash_attn_varlen_func

    return cast(VarlenFunction, flash_attn_varlen_func)


def _find_4() -> VarlenFunction:
    from flash_attn.cute import flash_attn_varlen_func

    return cast(VarlenFunction, flash_attn_varlen_func)


def missing_2() -> str:
    """Return what flash-attention 2 lacks here, "" when nothing.

    The function is asked for, not the package: flash-attention 4 alone leaves an empty `flash_attn` behind.
    """
    return _missing(_find_2, "flash_attn.flash_attn_varlen_func", "pip install flash-attn --no-build-isolation")


def missing_3() -> str:
    """Return what flash-attention 3 lacks here, "" when nothing."""
    return _missing(_find_3, "flash_attn_interface.flash_attn_varlen_func", "build it from hopper/ of flash-attention")


def missing_4() -> str:
    """Return what flash-attention 4 lacks here, "" when nothing.

    An older copy of the same module comes with flash-attention 2; it takes no longest length and is no use.
    """
    return _missing(_find_4, "flash_attn.cute.flash_attn_varlen_func", "pip install flash-attn-4 --pre")


def _missing(find: Callable[[], VarlenFunction], name: str, remedy: str) -> str:
    try:
        function = find()
    except Exception as error:  # a foreign extension may fail in any way while it loads
        return f"{name} does not import here: {error}; {remedy}"
    lacking = [argument for argument in NEEDED if argument not in signature(function).parameters]
    return f"{name} takes no {', '.join(lacking)} here, so it is another version; {remedy}" if lacking else ""


def attend_2(
    query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch, window: int | None = None, dropout: float = 0.0
) -> Tensor:
    """Return `[T, heads, size]` by flash-attention 2; -1 to the left is no limit."""
    reach = (-1, -1) if window is None else (window - 1, 0)
    return _attend(_find_2(), query, key, value, batch, reach, dropout_p=dropout)


def attend_3(query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch, window: int | None = None) -> Tensor:
    """Return `[T, heads, size]` by flash-attention 3; -1 to the left is no limit."""
    reach = (-1, -1) if window is None else (window - 1, 0)
    return _attend(_find_3(), query, key, value, batch, reach)


def attend_4(query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch, window: int | None = None) -> Tensor:
    """Return `[T, heads, size]` by flash-attention 4, where no limit is None."""
    reach = (None, None) if window is None else (window - 1, 0)
    return _attend(_find_4(), query, key, value, batch, reach)


def _attend(
    function: VarlenFunction,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: PackedBatch,
    reach: tuple[int | None, int | None],
    **more: float,
) -> Tensor:
    attended = function(
        query,
        key,
        value,
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_k=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_k=batch.max_seqlen,
        causal=True,
        window_size=reach,
        **more,
    )
    # Generation 4 and betas of 3 give the log-sum-exp too, asked or not.
    return attended[0] if isinstance(attended, tuple) else attended

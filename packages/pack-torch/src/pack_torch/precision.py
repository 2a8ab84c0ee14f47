"""Where half precision is not enough: softmax, logarithms, decays and what else must not be narrower than float32."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64 and float32 for all else.

    >>> wide_dtype(torch.bfloat16), wide_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(values: Tensor) -> Tensor:
    """Return `values` in float32, or as they are in float64: for what must not be narrower.

    >>> wide(torch.ones(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return values.to(wide_dtype(values.dtype))

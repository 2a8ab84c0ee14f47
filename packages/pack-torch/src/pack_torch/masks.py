"""Explicit attention masks: quadratic in the row, for tests and for backends that take nothing else."""

from __future__ import annotations

import torch
from torch import Tensor


def document_causal_mask(document_ids: Tensor) -> Tensor:
    """Return which row (first axis) may attend to which (second): itself and earlier rows of its own document.

    Args:
        document_ids: `[T]` document of each token.

    Returns:
        `[T, T]` bool, True where attention is allowed.

    >>> document_causal_mask(torch.tensor([0, 0, 1])).int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    rows = torch.arange(document_ids.numel(), device=document_ids.device)
    same = document_ids.unsqueeze(1) == document_ids.unsqueeze(0)
    return same & (rows.unsqueeze(1) >= rows.unsqueeze(0))

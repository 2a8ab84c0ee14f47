"""Masks of rows that share prompts: every token says how far down the row it is seen.

`reach[t]` is the row after the last one that may see token t: the end of its document, or, in a tree, the end of the
last branch below it. A query sees a key that stands at its own row or before it and reaches beyond it. Plain documents
are the special case in which all tokens of one reach its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pack_torch.masks import BLOCK_SIZE, MaskFunction, check_window, ordered_blocks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def reach_function(reach: Tensor, positions: Tensor | None = None, window: int | None = None) -> MaskFunction:
    """Return the mask as a function of (batch, head, query row, key row), as flex attention takes it.

    Args:
        reach: `[B, T]`.
        positions: `[B, T]` of each token in its document, branches counted from the prompt's length; for windows.
        window: a token sees itself and the `window - 1` before it on its own branch; None sees them all.

    Raises:
        ValueError: a window under 1, or one without positions.

    >>> allowed = reach_function(torch.tensor([[3, 2, 3]]))  # a prompt token and two branches of one token each
    >>> row = torch.arange(3)
    >>> allowed(torch.tensor(0), torch.tensor(0), row[:, None], row[None, :]).int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    check_window(window)
    if window is not None and positions is None:
        raise ValueError("a window is counted in positions; give them, or no window")

    def on_branch(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < reach[batch, key])

    def in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert window is not None
        assert positions is not None
        near = positions[batch, query] - positions[batch, key] < window
        return on_branch(batch, head, query, key) & near

    return on_branch if window is None else in_window


def dense_of(allowed: MaskFunction, rows: int, tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """Return any mask function as a tensor, `[rows, T, T]` bool, True where attention is allowed."""
    row = torch.arange(tokens, device=device)
    batch = torch.arange(rows, device=device)[:, None, None]
    return allowed(batch, torch.zeros((), dtype=torch.int64, device=device), row[None, :, None], row[None, None, :])


def positions_of(reach: Tensor) -> Tensor:
    """Return the position of each token on its branch: how many tokens it sees before itself.

    >>> positions_of(torch.tensor([7, 7, 5, 5, 5, 7, 7])).tolist()  # prompt of 2, branches of 3 and 2
    [0, 1, 2, 3, 4, 2, 3]
    """
    ended = torch.bincount(reach, minlength=reach.numel() + 1)[: reach.numel()].cumsum(0)
    return torch.arange(reach.numel(), device=reach.device) - ended


def reach_block_mask(
    reach: Tensor, allowed: MaskFunction, *, narrower: bool = False, block_size: int = BLOCK_SIZE
) -> BlockMask:
    """Return flex attention's block mask, made from the reaches without a `[T, T]` tensor.

    Of two different blocks the keys stand before all queries or after them, so a key block is seen by some query of a
    block when its farthest reach goes past the first query, and by all when its nearest goes past the last.

    Args:
        reach: `[B, T]`, on the device the mask is for.
        allowed: of `reach_function`.
        narrower: `allowed` has a window, so that no block may be taken as seen by all unasked.
        block_size: rows and columns of one block.

    >>> reach = torch.tensor([[5, 5, 4, 4, 5]])
    >>> reach_block_mask(reach, reach_function(reach), block_size=2).to_dense()[0, 0].tolist()
    [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    from torch.nn.attention.flex_attention import BlockMask

    rows, tokens = reach.shape
    blocks = -(-tokens // block_size)
    missing = blocks * block_size - tokens
    # What is missing in the last block is seen by nothing, and must not make it look unseen as a whole.
    farthest = torch.nn.functional.pad(reach, (0, missing), value=0).view(rows, 1, blocks, block_size).amax(-1)
    nearest = torch.nn.functional.pad(reach, (0, missing), value=0).view(rows, 1, blocks, block_size).amin(-1)
    first = torch.arange(0, tokens, block_size, device=reach.device)
    last = (first + block_size).clamp(max=tokens) - 1
    some = (first <= last[:, None]) & (farthest > first[:, None])  # [B, query blocks, key blocks]
    every = (last <= first[:, None]) & (nearest > last[:, None])
    every = every & (last - first + 1 == block_size)[:, None] & (not narrower)
    return BlockMask.from_kv_blocks(
        *ordered_blocks((some & ~every)[:, None]),
        *ordered_blocks(every[:, None]),
        BLOCK_SIZE=block_size,
        mask_mod=allowed,
        seq_lengths=(tokens, tokens),
    )

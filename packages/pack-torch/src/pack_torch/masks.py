"""Which token may see which: as a tensor, as a function, and as blocks for kernels that skip the empty ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

#: batch, head, query row, key row to whether the query may see the key; broadcasts over all four.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: Rows and columns of one block of a block mask: what the flex kernels expect unless told otherwise.
BLOCK_SIZE = 128


def document_causal_mask(document_ids: Tensor, window: int | None = None) -> Tensor:
    """Return which row (first axis) may attend to which (second): itself and earlier rows of its own document.

    Args:
        document_ids: `[T]` document of each token.
        window: a row sees itself and the `window - 1` rows before it, no more; None sees the whole past.

    Returns:
        `[T, T]` bool, True where attention is allowed.

    Raises:
        ValueError: a window under 1.

    >>> document_causal_mask(torch.tensor([0, 0, 1])).int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    >>> document_causal_mask(torch.tensor([0, 0, 0]), window=2).int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    check_window(window)
    rows = torch.arange(document_ids.numel(), device=document_ids.device)
    same = document_ids.unsqueeze(1) == document_ids.unsqueeze(0)
    return same & causal_band(rows, rows, window)


def causal_band(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return `[queries, keys]` bool: the key is at the query's position or before it, and inside its window.

    >>> causal_band(torch.tensor([3]), torch.tensor([0, 1, 2, 3, 4]), 2).int().tolist()
    [[0, 0, 1, 1, 0]]
    """
    distance = queries.unsqueeze(1) - keys.unsqueeze(0)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def mask_function(document_ids: Tensor, window: int | None = None) -> MaskFunction:
    """Return the same mask as a function of (batch, head, query row, key row), as flex attention takes it.

    >>> allowed = mask_function(torch.tensor([0, 0, 1]))
    >>> row = torch.arange(3)
    >>> allowed(row, row, row[:, None], row[None, :]).int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    check_window(window)

    def in_document(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (document_ids[query] == document_ids[key]) & (query >= key)

    def in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert window is not None
        return in_document(batch, head, query, key) & (query - key < window)

    return in_document if window is None else in_window


def block_mask(
    doc_lens: Sequence[int], document_ids: Tensor, window: int | None = None, block_size: int = BLOCK_SIZE
) -> BlockMask:
    """Return flex attention's block mask of a packed row, made from the lengths without a `[T, T]` tensor.

    Row r sees the rows from low(r), its document's first or its window's, up to r. Both ends only grow with r, so
    what rows a to b see together runs from low(a) to b without a gap, and what all of them see from low(b) to a.

    Args:
        doc_lens: tokens of each document, T in all.
        document_ids: `[T]` document of each token, on the device the mask is for.
        window: as `document_causal_mask`.
        block_size: rows and columns of one block.

    >>> mask = block_mask((3, 3), torch.tensor([0, 0, 0, 1, 1, 1]), block_size=2)
    >>> mask.to_dense()[0, 0].tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    from torch.nn.attention.flex_attention import BlockMask

    allowed = mask_function(document_ids, window)
    lengths = torch.tensor(doc_lens)
    tokens = int(lengths.sum())
    row = torch.arange(tokens)
    low = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    if window is not None:
        low = torch.maximum(low, row - (window - 1))

    first = torch.arange(0, tokens, block_size)  # of each block, rows and columns alike
    last = (first + block_size).clamp(max=tokens) - 1
    some = (first <= last[:, None]) & (last >= low[first][:, None])  # [row blocks, column blocks]
    every = (first >= low[last][:, None]) & (last <= first[:, None])
    every &= (last - first + 1 == block_size)[:, None]  # the kernels mask the rows past the end of the last block

    return BlockMask.from_kv_blocks(
        *ordered_blocks((some & ~every)[None, None].to(document_ids.device)),
        *ordered_blocks(every[None, None].to(document_ids.device)),
        BLOCK_SIZE=block_size,
        mask_mod=allowed,
        seq_lengths=(tokens, tokens),
    )


def ordered_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many are set in each row of `[B, H, rows, columns]` bool, and the columns, the set ones first."""
    counts = blocks.sum(dim=-1, dtype=torch.int32)
    columns = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True).to(torch.int32)
    return counts, columns.contiguous()


def check_window(window: int | None) -> None:
    """Raise ValueError unless the window is None or at least 1, the token itself."""
    if window is not None and window < 1:
        raise ValueError(f"window is {window} but counts the token itself, so it is at least 1; None sees all the past")

"""A packed row of tokens: several documents end to end, and everything that says where each begins."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from pack_torch.intervals import dense_of, positions_of, reach_block_mask, reach_function
from pack_torch.masks import MaskFunction, block_mask, document_causal_mask, mask_function
from pack_torch.replay import pack_routes
from pack_torch.rollout import RESPONSE_FIELDS
from pack_torch.rollout import Rollout as Rollout
from pack_torch.scored import scored_rows

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def _as_lengths(values: Iterable[object]) -> tuple[int, ...]:
    # Not int(): it would round 3.5 down without a word.
    return tuple(map(operator.index, values))  # type: ignore[arg-type]


def _as_rollouts(values: Iterable[Rollout]) -> tuple[Rollout, ...]:
    return tuple(values)


@attrs.frozen
class LengthOrder:
    """The documents of a row sorted by length, so that equal ones can share one attention call.

    Args:
        rows: `[T]` row of the batch that stands at each place once sorted; None when the row is sorted already.
        inverse: `[T]` the way back; None as above.
        groups: (documents, tokens of each) per distinct length, shortest first.
    """

    rows: Tensor | None = attrs.field(eq=False)
    inverse: Tensor | None = attrs.field(eq=False)
    groups: tuple[tuple[int, int], ...]


# Cached properties are three times as fast without slots. What they hold, masks among it, does not travel.
@attrs.frozen(eq=False, slots=False, getstate_setstate=True)
class PackedBatch:
    """Documents end to end in one row of T real tokens. `doc_lens` is the only truth; the rest is derived from it.

    Args:
        input_ids: `[T]` int64.
        doc_lens: tokens of each document, any integers; they sum to T, so padding can never pass as a document.
        rollouts: the samples, one per document in the same order, when the row is made of rollouts.
        routes: `[T, layers, top_k]` expert ids to replay; None lets the router choose.
        reach: `[T]` int64, of a row whose documents are trees, prompts that several branches share: the row after the
            last one that may see each token. None: its document's end. Such a row has no rollouts; see `Batch`.

    Raises:
        ValueError: lengths that do not sum to T, a document under one token, rollouts that do not match the documents.

    >>> batch = PackedBatch(torch.tensor([7, 8, 9, 7, 8]), (3, 2))
    >>> batch.position_ids.tolist(), batch.document_ids.tolist()
    ([0, 1, 2, 0, 1], [0, 0, 0, 1, 1])
    >>> batch.cu_seqlens.tolist(), batch.max_seqlen
    ([0, 3, 5], 3)
    >>> batch.seq_idx.dtype, batch.jagged_offsets.dtype, batch.block_mask(window=2).shape
    (torch.int32, torch.int64, (1, 1, 5, 5))
    """

    input_ids: Tensor = attrs.field(repr=False)
    doc_lens: tuple[int, ...] = attrs.field(converter=_as_lengths)
    rollouts: tuple[Rollout, ...] = attrs.field(default=(), converter=_as_rollouts, repr=False)
    routes: Tensor | None = attrs.field(default=None, repr=False)
    reach: Tensor | None = attrs.field(default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        """Check the row against its document lengths."""
        ids, lens, rollouts = self.input_ids, self.doc_lens, self.rollouts
        if ids.dim() != 1 or ids.dtype != torch.int64:
            raise ValueError(f"input_ids are {ids.dtype} of shape {list(ids.shape)}; give one row of int64")
        if not lens:
            raise ValueError("doc_lens is empty; a packed row has at least one document")
        if min(lens) < 1:
            document, length = next((d, length) for d, length in enumerate(lens) if length < 1)
            raise ValueError(f"{self.name(document)} has {length:,} tokens; it needs at least 1, drop empty ones")
        if sum(lens) != ids.numel():
            raise ValueError(
                f"doc_lens sum to {sum(lens):,} but the row has {self.tokens:,} tokens; every token belongs to one "
                "document, and padding is not allowed"
            )
        if rollouts and tuple([rollout.length for rollout in rollouts]) != lens:
            raise ValueError(
                f"rollouts have lengths {[rollout.length for rollout in rollouts]} but doc_lens are {list(lens)}; give "
                "one rollout per document, in the row's order"
            )
        if self.routes is not None and (self.routes.dim() != 3 or self.routes.shape[0] != self.tokens):
            raise ValueError(f"routes have shape {list(self.routes.shape)} but must be [{self.tokens}, layers, top_k]")
        if self.reach is not None and (self.rollouts or self.reach.shape != self.input_ids.shape):
            raise ValueError(
                f"reach has shape {list(self.reach.shape)} with {len(self.rollouts)} rollouts; a row of shared prompts "
                f"takes [{self.tokens}] and no rollouts, for a rollout is a document of its own"
            )

    @property
    def tokens(self) -> int:
        """T, the real tokens of the row."""
        return int(self.input_ids.numel())

    @property
    def documents(self) -> int:
        """The number of documents in the row."""
        return len(self.doc_lens)

    @property
    def rows(self) -> int:
        """T again: rows of logits that a forward gives."""
        return self.tokens

    @property
    def shares_prompts(self) -> bool:
        """Whether documents are trees, so that lengths alone do not say who sees whom."""
        return self.reach is not None

    @property
    def chosen(self) -> None:
        """None: rollouts do not say which of them is preferred."""
        return None

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest document, a Python int."""
        return max(self.doc_lens)

    @property
    def response_lens(self) -> tuple[int, ...]:
        """Response tokens of each sample, in the row's order.

        Raises:
            ValueError: the batch was built from tokens alone and has no rollouts.
        """
        if not self.rollouts:
            raise ValueError("this batch has no rollouts, so no response lengths; build it with build_batch")
        return tuple(rollout.response_length for rollout in self.rollouts)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """`[documents + 1]` int32 document boundaries: starts at 0, strictly increases, ends at T."""
        ends = torch.tensor((0, *self.doc_lens)).cumsum(0)
        return ends.to(device=self.input_ids.device, dtype=torch.int32)

    @cached_property
    def jagged_offsets(self) -> Tensor:
        """`[documents + 1]` int64, the same boundaries as a jagged nested tensor takes them."""
        return self.cu_seqlens.to(torch.int64)

    @cached_property
    def seq_idx(self) -> Tensor:
        """`[T]` int32 document of each token, as convolution and state-space kernels take it (in a batch of one)."""
        return self.document_ids.to(torch.int32)

    @cached_property
    def document_ids(self) -> Tensor:
        """`[T]` int64 document of each token, counted from 0."""
        return _repeat(torch.arange(self.documents), self.doc_lens).to(self.input_ids.device)

    @cached_property
    def position_ids(self) -> Tensor:
        """`[T]` int64 position of each token in its own document; branches count on from their prompt's length."""
        if self.reach is not None:
            return positions_of(self.reach)
        starts = self.cu_seqlens[:-1].to(torch.int64).cpu()
        return (torch.arange(self.tokens) - _repeat(starts, self.doc_lens)).to(self.input_ids.device)

    @cached_property
    def length_order(self) -> LengthOrder:
        """The documents sorted by length, equal lengths together and in the row's order."""
        order = sorted(range(self.documents), key=lambda document: self.doc_lens[document])
        groups = tuple((count, length) for length, count in sorted(Counter(self.doc_lens).items()))
        if order == list(range(self.documents)):
            return LengthOrder(None, None, groups)
        keys = torch.empty(self.documents, dtype=torch.int64)
        keys[order] = torch.arange(self.documents)
        rows = torch.argsort(_repeat(keys, self.doc_lens), stable=True)
        inverse = torch.argsort(rows)
        return LengthOrder(rows.to(self.input_ids.device), inverse.to(self.input_ids.device), groups)

    @cached_property
    def _block_masks(self) -> dict[int | None, BlockMask]:
        return {}

    def block_mask(self, window: int | None = None) -> BlockMask:
        """Return flex attention's block mask of the row, made on first use; all layers share the one of a window."""
        if window not in self._block_masks:
            self._block_masks[window] = (
                block_mask(self.doc_lens, self.document_ids, window)
                if self.reach is None
                else reach_block_mask(self.reach[None], self.mask_function(window), narrower=window is not None)
            )
        return self._block_masks[window]

    def mask_function(self, window: int | None = None) -> MaskFunction:
        """Return what flex attention calls a `mask_mod`: the row's mask as a function of its indices."""
        if self.reach is None:
            return mask_function(self.document_ids, window)
        return reach_function(self.reach[None], self.position_ids[None], window)

    def dense_mask(self, window: int | None = None) -> Tensor:
        """Return the same mask as `[T, T]` bool, True where attention is allowed."""
        if self.reach is None:
            return document_causal_mask(self.document_ids, window)
        return dense_of(self.mask_function(window), 1, self.tokens, self.input_ids.device)[0]

    def score_map(self) -> tuple[Tensor, Tensor]:
        """Return `[S]` rows that score the response tokens, and `[S]` those tokens."""
        rows = scored_rows(self.doc_lens, self.response_lens).to(self.input_ids.device)
        return rows, self.input_ids[rows + 1]

    def to(self, device: torch.device | str) -> PackedBatch:
        """Return the batch with tokens, routes and reach on a device; all that is derived follows them there."""
        where = torch.device(device)
        if self.input_ids.device == where and (self.routes is None or self.routes.device == where):
            return self
        routes, reach = (None if one is None else one.to(device) for one in (self.routes, self.reach))
        return attrs.evolve(self, input_ids=self.input_ids.to(device), routes=routes, reach=reach)

    def name(self, document: int) -> str:
        """Return how an error calls a document: by its sample's id, or by its place when there is none."""
        if document < len(self.rollouts):
            return f"sample {self.rollouts[document].id!r}"
        return f"document {document}"

    def concat(self, name: str) -> Tensor:
        """Return a per-response-token field of the rollouts end to end.

        Args:
            name: `loss_mask`, `advantages`, `old_log_probs`, `rollout_log_probs` or `ref_log_probs`.

        Returns:
            `[S]`, S the response tokens of all samples, in the row's order.

        Raises:
            ValueError: no such field, or a sample that lacks it; names both.

        >>> rollouts = [Rollout("a", [1, 2, 3], 2, advantages=[0.5, 0.5]), Rollout("b", [1, 2], 1, advantages=[-1.0])]
        >>> build_batch(rollouts, [1, 0]).concat("advantages").tolist()
        [-1.0, 0.5, 0.5]
        """
        if name not in RESPONSE_FIELDS:
            raise ValueError(f"{name!r} is not a field with one value per response token; those are {RESPONSE_FIELDS}")
        if not self.rollouts:
            raise ValueError("this batch has no rollouts, so no response fields; build it with build_batch")
        given = [getattr(rollout, name) for rollout in self.rollouts]
        try:
            joined = torch.cat(given)
        except TypeError:
            lacking = next(rollout for rollout in self.rollouts if getattr(rollout, name) is None)
            raise ValueError(
                f"sample {lacking.id!r} has no {name}; add it with attrs.evolve(rollout, {name}=...)"
            ) from None
        device = self.input_ids.device
        return joined if joined.device == device else joined.to(device)

    def split(self, values: Tensor) -> list[Tensor]:
        """Return one tensor per sample of a `[S]` tensor that runs over all response tokens.

        Raises:
            ValueError: `values` does not have S entries.
        """
        expected = sum(self.response_lens)
        if values.shape[:1] != (expected,):
            raise ValueError(
                f"values have shape {list(values.shape)} but the samples have {expected:,} response tokens"
            )
        return list(torch.split_with_sizes(values, list(self.response_lens)))


def _repeat(values: Tensor, counts: Sequence[int]) -> Tensor:
    return torch.repeat_interleave(values, torch.tensor(counts))


def build_batch(rollouts: Sequence[Rollout], pack: Sequence[int], *, replay: bool = False) -> PackedBatch:
    """Return the packed row of one pack of a plan.

    Args:
        rollouts: the samples a plan was made for, in that order.
        pack: indices into `rollouts`, in the order they go into the row.
        replay: lay the recorded routes along the row too.

    Returns:
        A batch whose `rollouts` are those very objects, one per document.

    Raises:
        ValueError: an empty pack, an index outside the rollouts or given twice, or replay of a sample without routes.

    >>> batch = build_batch([Rollout("a", [1, 2, 3], 2), Rollout("b", [4, 5], 1)], [1, 0])
    >>> batch.input_ids.tolist(), batch.doc_lens, [rollout.id for rollout in batch.rollouts]
    ([4, 5, 1, 2, 3], (2, 3), ['b', 'a'])
    """
    indices = _as_lengths(pack)
    if not indices:
        raise ValueError("the pack is empty; every pack holds at least one sample")
    if min(indices) < 0 or max(indices) >= len(rollouts):
        outside = next(index for index in indices if not 0 <= index < len(rollouts))
        raise ValueError(f"the pack names sample {outside} of {len(rollouts):,}; was it planned for others?")
    if len(set(indices)) != len(indices):
        raise ValueError(f"the pack {list(indices)} names a sample twice; a sample is in exactly one place")
    chosen = tuple([rollouts[index] for index in indices])
    return PackedBatch(
        input_ids=torch.cat([rollout.tokens for rollout in chosen]),
        doc_lens=tuple([rollout.length for rollout in chosen]),
        rollouts=chosen,
        routes=pack_routes(chosen) if replay else None,
    )

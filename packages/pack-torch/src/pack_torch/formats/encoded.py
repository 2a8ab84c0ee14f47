"""The documents of one pack, laid end to end: columns, segments, and what else they carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import attrs
import numpy as np
from torch import Tensor

from pack_torch.formats.columns import Array, Origin, counting


# Cached properties are three times as fast without slots. What they hold does not travel to other processes.
@attrs.frozen(eq=False, slots=False, getstate_setstate=True)
class Encoded:
    """What a format makes of the rows of one pack. Lengths and parents of segments are the only truth.

    A segment is a stretch of tokens that are seen together. A document is a segment without parent, with all segments
    below it: one stretch of text, a prompt and its answer, or a prompt and several branches.

    Args:
        columns: `[T, ...]` per token, by field name.
        segment_lens: tokens of each segment, in the order they lie, parents before their children.
        row_segments: segments of each row of the dataset; None: one each.
        parents: of each segment, -1 for none; None: none has one.
        values: per row, by field name.
        names: fields of the rows as they came, in order.
        origins: what each column was made of.
        heads: per shifted column the first value of each document, which no row holds.
        weightless: it is there for its shape, and no loss or metric counts it.

    >>> tree = Encoded({}, (2, 3, 2, 1), row_segments=(3, 1), parents=(-1, 0, 0, -1))
    >>> tree.doc_lens, tree.document_ids.tolist()
    ((7, 1), [0, 0, 0, 0, 0, 0, 0, 1])
    >>> tree.position_ids.tolist(), tree.reach.tolist()
    ([0, 1, 2, 3, 4, 2, 3, 0], [7, 7, 5, 5, 5, 7, 7, 8])
    """

    columns: Mapping[str, Array] = attrs.field(repr=False)
    segment_lens: Sequence[int]
    row_segments: Sequence[int] | None = None
    parents: Sequence[int] | None = None
    values: Mapping[str, Sequence[Any]] = attrs.field(factory=dict, repr=False)
    names: tuple[str, ...] = ()
    origins: Mapping[str, Origin | tuple[Origin, ...]] = attrs.field(factory=dict, repr=False)
    heads: Mapping[str, Array] = attrs.field(factory=dict, repr=False)
    weightless: bool = False

    @property
    def rows(self) -> int:
        """How many rows of the dataset the pack holds."""
        return len(self.segment_lens if self.row_segments is None else self.row_segments)

    @cached_property
    def tokens(self) -> int:
        """T, the real tokens of the pack."""
        return sum(self.segment_lens)

    @cached_property
    def shares_prompts(self) -> bool:
        """Whether a segment has several branches below it, so that lengths alone do not say who sees whom."""
        if self.parents is None:
            return False
        seen: set[int] = set()
        for parent, length in zip(self.parents, self.segment_lens, strict=True):
            if parent >= 0 and length and parent in seen:
                return True
            if length:
                seen.add(parent)
        return False

    @cached_property
    def doc_lens(self) -> tuple[int, ...]:
        """Tokens of each document."""
        return tuple(self._lens)

    @property
    def _lens(self) -> Sequence[int]:
        if self.parents is None:
            return self.segment_lens
        lens: list[int] = []
        for parent, length in zip(self.parents, self.segment_lens, strict=True):
            if parent < 0:
                lens.append(length)
            else:
                lens[-1] += length
        return lens

    @cached_property
    def cu_seqlens(self) -> Array:
        """`[documents + 1]` int32 document boundaries: starts at 0, strictly increases, ends at T."""
        lens = self._lens
        return np.fromiter(accumulate(lens, initial=0), np.int32, len(lens) + 1)

    @cached_property
    def document_ids(self) -> Array:
        """`[T]` int64 document of each token, counted from 0."""
        count = len(self.doc_lens)
        return counting(count).repeat(np.fromiter(self.doc_lens, np.int64, count))

    @cached_property
    def position_ids(self) -> Array:
        """`[T]` int64 position of each token in its document; branches count on from their prompt's length."""
        lens = np.fromiter(self.segment_lens, np.int64, len(self.segment_lens))
        starts = np.zeros_like(lens)
        for segment, parent in enumerate(self.parents or ()):
            if parent >= 0:
                starts[segment] = starts[parent] + lens[parent]
        positions: Array = (starts + lens - lens.cumsum()).repeat(lens)
        positions += counting(len(positions))
        return positions

    @cached_property
    def reach(self) -> Array:
        """`[T]` int64: the row after the last one that may see each token."""
        if not self.shares_prompts:
            return np.repeat(self.cu_seqlens[1:].astype(np.int64), self.doc_lens)
        ends = np.cumsum(self.segment_lens).tolist()
        for segment in range(len(ends) - 1, -1, -1):
            parent = (self.parents or ())[segment]
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[segment])
        return np.repeat(ends, self.segment_lens)


@attrs.frozen(eq=False)
class Scored:
    """Which rows of a pack predict which of its tokens, sample by sample, S in all.

    Args:
        rows: `[S]` int64, rows of the pack.
        targets: `[S]` int64, the tokens they predict.
        lens: scored tokens of each sample.
        lengths: tokens of each sample as if it stood alone.
        owners: the row of the dataset each sample is of, counted in the pack.
        labels: what a sample is in its row: `chosen`, a completion's number; "" where the row is one sample.
        active: `[S]` bool, which of them train; None: all.
        fields: `[S]` by name, what losses take beside.
    """

    rows: Tensor
    targets: Tensor
    lens: tuple[int, ...]
    lengths: tuple[int, ...]
    owners: tuple[int, ...]
    labels: tuple[str, ...]
    active: Tensor | None = None
    fields: Mapping[str, Tensor] = attrs.field(factory=dict)

    def emptied(self) -> Scored:
        """Return it with no samples."""
        fields = {name: values[:0] for name, values in self.fields.items()}
        active = None if self.active is None else self.active[:0]
        return Scored(self.rows[:0], self.targets[:0], (), (), (), (), active, fields)

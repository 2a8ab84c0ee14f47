"""One pack: documents that go through a model together, and everything there is to know about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from pack_torch.drawing import draw
from pack_torch.formats.columns import Row
from pack_torch.formats.encoded import Encoded
from pack_torch.formats.format import Format
from pack_torch.inputs import jagged, warn_of_silence
from pack_torch.rows import Batch, Lay, lay_padded

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@attrs.frozen(eq=False, slots=False, getstate_setstate=True)
class Pack:
    """Documents end to end, T tokens in all, no padding among them.

    Args:
        encoded: the documents as their format laid them out.
        format: what they are.
        capacity: tokens of the row that `to_padded` and the collator fill up to; at least T.
        info: whatever is to travel along, such as counts of the dataset.

    >>> from pack_torch import Sft
    >>> rows = [{"tokens": [1, 2], "labels": [3, 4]}, {"tokens": [5, 6], "labels": [7, 8]}]
    >>> pack = build_pack(rows, format=Sft(tokens="tokens"))
    >>> pack["tokens"].tolist(), pack["labels"].tolist()
    ([1, 2, 5, 6], [3, 4, 7, 8])
    >>> pack.document_ids.tolist(), pack.input_pos.tolist()
    ([0, 0, 1, 1], [0, 1, 0, 1])
    >>> pack.dense_mask().int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    """

    encoded: Encoded
    format: Format
    capacity: int
    info: Mapping[str, Any] = attrs.field(factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        """Return a column, `[T, ...]`."""
        if name not in self.encoded.columns:
            raise KeyError(f"the pack has no column {name!r} but {', '.join(self.encoded.columns)}")
        return torch.from_numpy(self.encoded.columns[name])

    @property
    def tokens(self) -> int:
        """T, the real tokens."""
        return self.encoded.tokens

    @property
    def doc_lens(self) -> tuple[int, ...]:
        """Tokens of each document."""
        return self.encoded.doc_lens

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest document, a Python int."""
        return max(self.encoded.doc_lens)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """`[documents + 1]` int32 document boundaries: starts at 0, strictly increases, ends at T."""
        return torch.from_numpy(self.encoded.cu_seqlens)

    @property
    def document_ids(self) -> Tensor:
        """`[T]` int64 document of each token, counted from 0."""
        return torch.from_numpy(self.encoded.document_ids)

    @property
    def position_ids(self) -> Tensor:
        """`[T]` int64 position of each token in its document; branches count on from their prompt's length."""
        return torch.from_numpy(self.encoded.position_ids)

    @property
    def input_pos(self) -> Tensor:
        """The positions again, by torchtune's name."""
        return self.position_ids

    @property
    def values(self) -> Mapping[str, Sequence[Any]]:
        """What documents carry beside their tokens, by name, one entry per row of the dataset."""
        return self.encoded.values

    def documents(self) -> list[Row]:
        """Return the rows of the dataset as they went in; sequences beside arrays, tensors and tuples come as lists."""
        return self.format.decode(self.encoded)

    def to_padded(self) -> dict[str, Tensor]:
        """Return every column, `document_ids` and `position_ids`, filled up to the capacity, `[capacity, ...]`.

        Each column has its own pad value; padding is document -1 and counts its positions from 0.

        >>> from pack_torch import Sft
        >>> pack = build_pack([{"input_ids": [1, 2]}], format=Sft(label_mode="tokens"), capacity=4)
        >>> {name: column.tolist() for name, column in pack.to_padded().items()}["labels"]
        [2, -100, -100, -100]
        """
        batch = self._batch(self.capacity)
        padded = {name: column[0] for name, column in batch.columns.items()}
        return padded | {"document_ids": batch.document_ids[0], "position_ids": batch.position_ids[0]}

    def to_nested(self) -> dict[str, Tensor]:
        """Return every column and `position_ids` as jagged nested tensors, one entry a document.

        Their offsets are `cu_seqlens`, the same tensor for all, so they can be computed with together.

        >>> from pack_torch import Sft
        >>> pack = build_pack([{"input_ids": [1, 2]}, {"input_ids": [3]}], format=Sft(label_mode="tokens"))
        >>> [one.tolist() for one in pack.to_nested()["input_ids"].unbind()]
        [[1, 2], [3]]
        """
        columns = {name: self[name] for name in self.encoded.columns} | {"position_ids": self.position_ids}
        return {name: jagged(column, self.cu_seqlens) for name, column in columns.items()}

    def dense_mask(self) -> Tensor:
        """Return `[T, T]` bool, True where attention is allowed."""
        return self._row.dense_mask()[0]

    def block_mask(self) -> BlockMask:
        """Return flex attention's block mask of the T rows."""
        return self._row.block_mask()

    def model_inputs(self, for_: str | nn.Module | None = None) -> dict[str, Any]:
        """Return the arguments of a model's forward, `[1, T]`; see `Batch.model_inputs`. None: `hf`, with a warning."""
        if for_ is None:
            warn_of_silence("hf")
        return self._row.model_inputs("hf" if for_ is None else for_)

    def describe(self, width: int = 72) -> str:
        """Return a drawing of the pack for the terminal, `width` characters wide.

        >>> from pack_torch import Sft
        >>> rows = [{"input_ids": [1] * 6}, {"input_ids": [1] * 3}]
        >>> print(build_pack(rows, format=Sft(label_mode="tokens"), capacity=12).describe(width=24))
        Sft pack: 9 of 12 tokens (75.0 %), 2 documents of 3 to 6
        |000000000000111111......|
        """
        return draw(self.encoded, type(self.format).__name__, self.capacity, width)

    @cached_property
    def _row(self) -> Batch:
        return self._batch(self.tokens)

    def _batch(self, length: int) -> Batch:
        return lay_packs([self], lay_padded, length, flat=True, form="hf")


def lay_packs(packs: Sequence[Pack], lay: Lay, length: int, **options: Any) -> Batch:
    """Return the batch of these packs, laid out by `lay`, `lay_flat` or `lay_padded`, in rows of `length`."""
    format, parts = packs[0].format, [pack.encoded for pack in packs]
    fields = format.fields
    columns = {name: lay([part.columns[name] for part in parts], fields[name].pad, length) for name in parts[0].columns}
    # Counted on, padding looks like one more document to a model that reads them off the positions; never like many.
    positions = lay([part.position_ids for part in parts], None, length)
    return Batch(
        columns,
        positions,
        tuple([_carried(format, part) for part in parts]),
        format,
        infos=tuple([pack.info for pack in packs]),
        payloads=format.payload_inputs(parts),
        capacity=packs[0].capacity,
        **options,
    )


def _carried(format: Format, part: Encoded) -> Encoded:
    carried = format.carried(part)
    return attrs.evolve(carried, weightless=True) if part.weightless else carried


def build_pack(
    rows: Sequence[Row], *, format: Format, capacity: int | None = None, info: Mapping[str, Any] | None = None
) -> Pack:
    """Return the pack of these rows of a dataset.

    Args:
        rows: at least one, in the order they are to lie.
        format: what they are.
        capacity: tokens of the row the pack is made for; None: as many as there are.
        info: whatever is to travel along.

    Raises:
        ValueError: more tokens than the capacity, or rows that the format refuses; says which.

    >>> from pack_torch import Sft
    >>> build_pack([{"input_ids": [1, 2, 3]}], format=Sft(label_mode="tokens"), capacity=2)
    Traceback (most recent call last):
        ...
    ValueError: the pack has 3 tokens but capacity is 2; leave documents out, cut them, or raise the capacity
    """
    encoded = format.encode(rows)
    if capacity is not None and encoded.tokens > capacity:
        raise ValueError(
            f"the pack has {encoded.tokens:,} tokens but capacity is {capacity:,}; leave documents out, cut them, or "
            "raise the capacity"
        )
    return Pack(encoded, format, encoded.tokens if capacity is None else capacity, info or {})

"""Documents with images, sound or the like: payloads whose tokens are placeholders in the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
from torch import Tensor

from pack_torch.formats.columns import Array, Field, Row, joined
from pack_torch.formats.encoded import Encoded, Scored
from pack_torch.formats.format import Format
from pack_torch.formats.sft import IGNORED, Sft

#: The column of positions with several rows, made here and never in the documents.
POSITIONS = "payload_position_ids"


@attrs.frozen
class Multimodal(Format):
    """Documents of text with payloads: each stands for a span of placeholder tokens and goes wherever that goes.

    Args:
        collate: all payloads of a batch, in the order of their spans, to what the model takes them as, by argument.
        text: everything else of the documents; labels it makes never ask for a placeholder.
        payloads: field with the list of a document's payloads, anything at all, one for each span.
        spans: field with their (start, stop) in the document's tokens, in order.
        placeholder: the token that stands for payloads. With it documents need no spans: every unbroken run of it is
            one.
        positions: a row to its positions `[n, T]`, for models that count images in three directions; None: the usual
            ones.

    Raises:
        ValueError: payloads and spans that do not fit together, a cut through a span; says where.

    >>> from pack_torch import build_pack
    >>> format = Multimodal(lambda images: {"pixels": images}, Sft(label_mode="tokens"), placeholder=9)
    >>> row = {"input_ids": [1, 9, 9, 2, 3], "images": ["a cat"]}
    >>> build_pack([row], format=format)["labels"].tolist()
    [-100, -100, 2, 3, -100]
    >>> format.spans(row), format.cut(row, 3, 5)
    (((1, 3),), {'input_ids': [2, 3], 'images': []})
    """

    collate: Callable[[list[Any]], Mapping[str, Tensor]]
    text: Sft = attrs.field(factory=Sft)
    payloads: str = "images"
    spans_field: str = attrs.field(default="spans", alias="spans")
    placeholder: int | None = None
    positions: Callable[[Row], Any] | None = None

    @cached_property
    def _text(self) -> Sft:
        known: list[str] = [*self.text.document_fields, self.payloads, self.spans_field]
        return attrs.evolve(self.text, document_fields=known)

    @property
    def tokens(self) -> str:
        """The column of a pack that holds the tokens."""
        return self.text.tokens

    @property
    def labels(self) -> str:
        """The column of a pack that holds the labels."""
        return self.text.labels

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """The columns of a pack, with what pads them."""
        return MappingProxyType({**self.text.fields, POSITIONS: Field(0, dtype="int64")})

    def length(self, row: Row) -> int:
        """Return the tokens of the document, placeholders included."""
        return self.text.length(row)

    def spans(self, row: Row) -> tuple[tuple[int, int], ...]:
        """Return where the payloads stand; no cut goes through them."""
        if self.spans_field in row:
            found = tuple((int(start), int(stop)) for start, stop in row[self.spans_field])
        elif self.placeholder is None:
            raise ValueError(
                f"the document has no {self.spans_field!r} and the format no placeholder; give one of them, or where "
                "payloads stand is not known"
            )
        else:
            found = _runs(np.asarray(row[self.tokens]) == self.placeholder)
        self._check(found, row)
        return found

    def _check(self, spans: tuple[tuple[int, int], ...], row: Row) -> None:
        payloads = len(row[self.payloads])
        if len(spans) != payloads:
            raise ValueError(
                f"the document has {payloads} {self.payloads} but {len(spans)} spans of placeholders, {list(spans)}; "
                f"give one for each, in {self.spans_field!r} where spans touch"
            )
        bounds = [0, *(place for span in spans for place in span), self.length(row)]
        if any(one > two for one, two in pairwise(bounds)) or any(start == stop for start, stop in spans):
            raise ValueError(
                f"spans {list(spans)} are empty, out of order or outside the document's {self.length(row):,} tokens"
            )

    def cut(self, row: Row, start: int, stop: int) -> Row:
        """Return a stretch of the document with the payloads in it.

        Raises:
            ValueError: the cut goes through a payload; see `truncate_row` and `split_row`, which go around them.
        """
        spans = self.spans(row)
        for first, last in spans:
            if first < start < last or first < stop < last:
                raise ValueError(
                    f"a cut of tokens {start:,} to {stop:,} goes through the payload at {first:,} to {last:,}, which "
                    "must stay whole; truncate_row and split_row cut beside it"
                )
        kept = [number for number, (first, last) in enumerate(spans) if start <= first and last <= stop]
        cut = dict(self._text.cut(row, start, stop))
        cut[self.payloads] = [row[self.payloads][number] for number in kept]
        if self.spans_field in row:
            cut[self.spans_field] = [(spans[number][0] - start, spans[number][1] - start) for number in kept]
        return cut

    def encode(self, rows: Sequence[Row]) -> Encoded:
        """Return the documents end to end, with labels for text alone, and the positions their payloads call for."""
        encoded = self._text.encode(rows)
        columns = dict(encoded.columns)
        places = [self.spans(row) for row in rows]
        if self.text.labels not in encoded.names:
            columns[self.text.labels] = self._text_labels(columns[self.text.labels], places, encoded)
        if self.positions is not None:
            parts = [_as_positions(self.positions(row), self.length(row)) for row in rows]
            columns[POSITIONS] = joined(parts, self.fields[POSITIONS], POSITIONS)
        return attrs.evolve(encoded, columns=columns)

    def _text_labels(self, labels: Array, places: Sequence[Sequence[tuple[int, int]]], encoded: Encoded) -> Array:
        text = labels.copy()
        for begin, spans in zip(encoded.cu_seqlens.tolist(), places, strict=False):
            for start, stop in spans:
                # The row before a document's first token is another's.
                text[begin + max(start - 1, 0) : begin + stop - 1] = IGNORED
        return text

    def decode(self, encoded: Encoded) -> list[Row]:
        """Return the documents as they came, their payloads the very same objects."""
        return self._text.decode(encoded)

    def scored(self, encoded: Encoded) -> Scored:
        """Return the rows that have a label, document by document."""
        return self._text.scored(encoded)

    def payload_inputs(self, packs: Sequence[Encoded]) -> Mapping[str, Tensor]:
        """Return what `collate` makes of all payloads of the packs; nothing where there are none."""
        found = [payload for pack in packs for row in pack.values[self.payloads] for payload in row]
        return self.collate(found) if found else {}

    def carried(self, encoded: Encoded) -> Encoded:
        """Return what travels with a batch beside its tensors; not the payloads, which are collated."""
        values = {name: one for name, one in encoded.values.items() if name != self.payloads}
        return attrs.evolve(super().carried(encoded), values=values)

    def model_positions(self, columns: Mapping[str, Any]) -> str | None:
        """Return the column of the payloads' positions where there is one."""
        return POSITIONS if POSITIONS in columns else None


def _runs(there: Array) -> tuple[tuple[int, int], ...]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], there.astype(np.int8), [0]))))
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _as_positions(values: Any, length: int) -> Array:
    positions = np.asarray(values)
    if positions.ndim != 2 or positions.shape[1] != length:
        raise ValueError(
            f"positions have shape {list(positions.shape)} for a document of {length:,} tokens; give [rows, tokens]"
        )
    return positions.T

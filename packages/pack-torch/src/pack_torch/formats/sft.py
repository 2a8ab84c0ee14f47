"""Supervised fine-tuning: one document of tokens and what to learn of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Literal, get_args

import attrs
import numpy as np
import torch
from torch import Tensor

from pack_torch.formats.columns import (
    Array,
    Field,
    Origin,
    Row,
    as_fields,
    check_lengths,
    joined,
    joined_tokens,
    keys_of,
    origins_of,
    shifted,
    split_parts,
    unshifted,
)
from pack_torch.formats.encoded import Encoded, Scored
from pack_torch.formats.format import Format
from pack_torch.formats.together import encode_together

LabelMode = Literal["aligned", "tokens"]

#: The label of a row that predicts nothing.
IGNORED = -100


def _as_names(names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise ValueError(f"{names!r} is one name where several are taken; write ({names!r},)")
    return tuple(names)


@attrs.frozen
class Sft(Format):
    """Documents with a label per token.

    `aligned` takes the rows' labels as they come: the label of row t is what row t is to predict, -100 for nothing.
    `tokens` makes such labels by shifting inside each document. What it shifts are the rows' labels where they have
    some (a label stands at its own token, as Hugging Face collators write them), else the tokens; of these it drops
    the prompt where rows have a `prompt_length`, unless `train_on_prompt`, and all that a mask of the rows says 0 of,
    such as one with several assistant turns. Labels that are given are masked no further.

    Args:
        tokens: field of the tokens, and what the pack calls them.
        labels: field of the labels, and what the pack calls them.
        label_mode: `aligned` or `tokens`.
        prompt_length: field with the number of prompt tokens of a document; need not be there.
        train_on_prompt: learn prompts too.
        masks: fields of 0 and 1 per token, 1 for a token to be learned; need not be there. All that are must say 1.
        attention_mask: field of a tokenizer's own, 1 for every token; need not be there. Documents with padding, of
            which it says 0, are refused.
        token_fields: other fields with a value per token: what pads them, or a `Field`. Losses find `advantages`,
            `old_log_probs` and the like here, at the row that predicts the token.
        document_fields: fields with one value for the whole document, whatever that is.
        extra: fields named nowhere above: `travel` as if in `document_fields`, or `raise`.

    Raises:
        ValueError: no such mode, or a row without tokens, without labels it needs, or with other fields than declared.

    >>> from pack_torch import build_pack
    >>> rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    >>> pack = build_pack(rows, format=Sft(label_mode="tokens"))
    >>> pack["labels"].tolist(), pack.documents() == rows
    ([2, 3, -100, 5, -100], True)
    """

    tokens: str = "input_ids"
    labels: str = "labels"
    label_mode: LabelMode = attrs.field(default="aligned", validator=attrs.validators.in_(get_args(LabelMode)))
    prompt_length: str = "prompt_length"
    train_on_prompt: bool = False
    masks: tuple[str, ...] = attrs.field(default=("completion_mask", "assistant_masks"), converter=_as_names)
    attention_mask: str = "attention_mask"
    token_fields: Mapping[str, Field] = attrs.field(factory=dict, converter=as_fields)
    document_fields: tuple[str, ...] = attrs.field(default=(), converter=_as_names)
    extra: Literal["travel", "raise"] = attrs.field(
        default="travel", validator=attrs.validators.in_(("travel", "raise"))
    )

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """The columns of a pack, with what pads them."""
        known = {self.tokens: Field(0, dtype="int64")}
        known[self.labels] = Field(IGNORED, shift=self.label_mode == "tokens", dtype="int64")
        return MappingProxyType(
            known | {name: Field(0) for name in (*self.masks, self.attention_mask)} | dict(self.token_fields)
        )

    def length(self, row: Row) -> int:
        """Return the tokens of the document."""
        return len(row[self.tokens])

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """Return the tokens of each document."""
        return list(map(len, map(itemgetter(self.tokens), rows)))

    def cut(self, row: Row, start: int, stop: int) -> Row:
        """Return a stretch of the document as a document."""
        length = self.length(row)
        kept: dict[str, Any] = {}
        for name, value in row.items():
            if name in self.fields:
                kept[name] = value[start:stop]
            elif name == self.prompt_length:
                kept[name] = min(max(value - start, 0), stop - start)
            else:
                self._check_uncut(name, value, length)
                kept[name] = value
        return kept

    def _check_uncut(self, name: str, value: Any, length: int) -> None:
        sized = hasattr(value, "__len__") and not isinstance(value, (str, bytes, Mapping))
        if name not in self.document_fields and sized and len(value) == length:
            raise ValueError(
                f"field {name!r} has as many values as the document has tokens, {length:,}, so how to cut it is not "
                "clear; name it in token_fields or in document_fields"
            )

    def encode(self, rows: Sequence[Row]) -> Encoded:
        """Return the documents end to end, with their labels."""
        names = keys_of(rows)
        if self.tokens not in names:
            raise ValueError(f"documents have no {self.tokens!r} but {list(names)}; say Sft(tokens=...)")
        tokens = list(map(itemgetter(self.tokens), rows))
        lengths = list(map(len, tokens))
        if 0 in lengths:
            raise ValueError(f"document {lengths.index(0)} of the pack has no tokens; drop empty documents")
        columns: dict[str, Array] = {}
        origins: dict[str, Origin | tuple[Origin, ...]] = {}
        heads: dict[str, Array] = {}
        values: dict[str, Sequence[Any]] = {}
        ends = np.fromiter(accumulate(lengths), np.int64, len(lengths))
        for name in names:
            parts = tokens if name == self.tokens else [row[name] for row in rows]
            field = self.fields.get(name)
            if field is None:
                values[name] = self._carried(name, parts)
                continue
            if name != self.tokens:
                check_lengths(parts, lengths, name, self.tokens)
            column = (joined_tokens if name == self.tokens else joined)(parts, field, name)
            origins[name] = origins_of(parts)
            if name == self.attention_mask:
                _check_unpadded(column, ends, name)
            if field.shift:
                heads[name] = column[ends - lengths]
                column = shifted(column, ends, field.pad)
            columns[name] = column
        if self.labels not in columns:
            columns[self.labels] = self._made_labels(columns, values, ends, lengths)
        return Encoded(columns, lengths, None, None, values, names, origins, heads)

    def encode_some(self, packs: Sequence[Sequence[Row]]) -> Sequence[Encoded]:
        """Return the first of these packs, several laid out at once."""
        own = type(self).encode is not Sft.encode  # and who knows whether it minds what else lies in a pack
        return super().encode_some(packs) if own else encode_together(self, packs)

    def _carried(self, name: str, parts: list[Any]) -> list[Any]:
        if self.extra == "raise" and name not in (*self.document_fields, self.prompt_length):
            raise ValueError(
                f"documents have a field {name!r} that the format does not know; name it in token_fields or "
                "document_fields, or let extra='travel'"
            )
        return parts

    def _made_labels(
        self, columns: Mapping[str, Array], values: Mapping[str, Sequence[Any]], ends: Array, lengths: Sequence[int]
    ) -> Array:
        if self.label_mode == "aligned":
            raise ValueError(
                f"documents have no {self.labels!r}; give labels that say what each row predicts, or "
                "Sft(label_mode='tokens') makes them of the tokens"
            )
        learned = columns[self.tokens]
        masks = [columns[name] for name in self.masks if name in columns]
        prompts = () if self.train_on_prompt else values.get(self.prompt_length, ())
        if not masks and not prompts:
            return shifted(learned, ends, IGNORED)
        learned = learned.copy()
        for mask in masks:
            learned[mask == 0] = IGNORED
        for document, (end, length, given) in enumerate(zip(ends.tolist(), lengths, prompts, strict=False)):
            learned[end - length : end - length + self._prompt(document, length, given)] = IGNORED
        return shifted(learned, ends, IGNORED)

    def _prompt(self, document: int, length: int, given: Any) -> int:
        try:
            prompt = int(given)
        except (TypeError, ValueError):
            prompt = -1
        if not 0 <= prompt <= length:
            raise ValueError(
                f"document {document} of the pack has {length:,} tokens and {given!r} of them as "
                f"{self.prompt_length!r}, which must be from 0 to all; cut both together, as Sft.cut does"
            )
        return prompt

    def decode(self, encoded: Encoded) -> list[Row]:
        """Return the documents as they came."""
        ends = np.cumsum(encoded.segment_lens)
        parts: dict[str, Sequence[Any]] = {}
        for name in encoded.names:
            if name in encoded.values:
                parts[name] = encoded.values[name]
                continue
            column = encoded.columns[name]
            if name in encoded.heads:
                column = unshifted(column, ends - encoded.segment_lens, encoded.heads[name])
            parts[name] = split_parts(column, encoded.segment_lens, encoded.origins[name])
        return [dict(zip(parts, one, strict=True)) for one in zip(*parts.values(), strict=True)]

    def scored(self, encoded: Encoded) -> Scored:
        """Return the rows that have a label, document by document."""
        labels = torch.as_tensor(encoded.columns[self.labels])
        rows = (labels != IGNORED).nonzero().squeeze(1)
        bounds = torch.as_tensor(encoded.cu_seqlens[1:], dtype=torch.int64, device=rows.device)
        found = torch.searchsorted(rows, bounds).tolist()
        lens = tuple(stop - start for start, stop in zip([0, *found], found, strict=False))
        fields: dict[str, Tensor] = {
            name: torch.as_tensor(encoded.columns[name])[rows] for name in self.token_fields if name in encoded.columns
        }
        count = len(lens)
        return Scored(
            rows, labels[rows], lens, tuple(encoded.segment_lens), tuple(range(count)), ("",) * count, fields=fields
        )


def _check_unpadded(mask: Array, ends: Array, name: str) -> None:
    padding = np.flatnonzero(mask == 0)
    if len(padding):
        document = int(np.searchsorted(ends, padding[0], side="right"))
        raise ValueError(
            f"document {document} of the pack has padding, {name!r} is 0 there; take it off before packing, such as "
            "tokens[:sum(mask)], for packs need none"
        )

"""Pairs of answers to one prompt, one of them preferred: DPO and its kin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

import attrs

from pack_torch.formats.branches import Branches, lay, pairs_of_tokens, score, take_apart
from pack_torch.formats.columns import Field, Row, as_fields, keys_of
from pack_torch.formats.encoded import Encoded, Scored
from pack_torch.formats.format import Format

SIDES = ("chosen", "rejected")


@attrs.frozen
class Preference(Format):
    """A prompt with a chosen and a rejected answer, always in one pack.

    Args:
        prompt: field of the prompt's tokens, at least one.
        chosen: field of the preferred answer's tokens.
        rejected: field of the other's.
        tokens: what the pack calls the tokens.
        mask: what follows `chosen_` and `rejected_` in the names of two fields of 0 and 1 per answer token, 1 for a
            token that trains; need not be there.
        token_fields: the same for fields of numbers per answer token, with what pads them; need not be there.
        shared: lay the prompt out once and both answers behind it as branches; False makes two documents, which every
            attention and model can run. Losses and gradients are the same.

    Other fields travel with the row. A row cannot be cut.

    >>> from pack_torch import build_pack
    >>> row = {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 5], "rejected_ids": [6, 7]}
    >>> apart, tree = (build_pack([row], format=Preference(shared=shared)) for shared in (False, True))
    >>> apart["input_ids"].tolist(), apart.position_ids.tolist()
    ([1, 2, 3, 4, 5, 1, 2, 6, 7], [0, 1, 2, 3, 4, 0, 1, 2, 3])
    >>> tree["input_ids"].tolist(), tree.position_ids.tolist()
    ([1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 2, 3])
    """

    prompt: str = "prompt_ids"
    chosen: str = "chosen_ids"
    rejected: str = "rejected_ids"
    tokens: str = "input_ids"
    mask: str = "mask"
    token_fields: Mapping[str, Field] = attrs.field(factory=lambda: {"ref_log_probs": 0.0}, converter=as_fields)
    shared: bool = False

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """The columns of a pack, with what pads them."""
        known = {self.tokens: Field(0, dtype="int64"), self.mask: Field(0)}
        return MappingProxyType(known | dict(self.token_fields))

    @property
    def whole(self) -> str:
        """Why no row can be cut."""
        return "a margin needs both answers, whole"

    def length(self, row: Row) -> int:
        """Return the tokens of prompt and answers, the prompt counted as often as it is computed."""
        prompts = len(row[self.prompt]) * (1 if self.shared else 2)
        return prompts + len(row[self.chosen]) + len(row[self.rejected])

    def cost(self, row: Row) -> int:
        """Return the pairs of tokens that attention looks at, as squares."""
        return pairs_of_tokens(
            len(row[self.prompt]), [len(row[self.chosen]), len(row[self.rejected])], shared=self.shared
        )

    def cut(self, row: Row, start: int, stop: int) -> Row:
        """Refuse.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a pair of answers cannot be cut: a margin needs both, whole; shorten them before, raise the capacity or "
            "drop the pair"
        )

    def encode(self, rows: Sequence[Row]) -> Encoded:
        """Return prompts and answers end to end, the chosen first."""
        names = keys_of(rows)
        sided = {name: tuple(f"{side}_{name}" for side in SIDES) for name in (self.mask, *self.token_fields)}
        sided = {name: both for name, both in sided.items() if any(one in names for one in both)}
        for both in sided.values():
            missing = [one for one in both if one not in names]
            if missing:
                raise ValueError(f"pairs have no {missing[0]!r} but its counterpart; give both or neither")
        taken = [
            Branches(
                row[self.prompt],
                [row[self.chosen], row[self.rejected]],
                {name: [row[one] for one in both] for name, both in sided.items()},
                SIDES,
            )
            for row in rows
        ]
        encoded = lay(taken, self.tokens, self.fields, self.shared)
        laid = {self.prompt, self.chosen, self.rejected, *(one for both in sided.values() for one in both)}
        values = {name: [row[name] for row in rows] for name in names if name not in laid}
        return attrs.evolve(encoded, values=values, names=names)

    def decode(self, encoded: Encoded) -> list[Row]:
        """Return the pairs as they came."""
        found: list[Row] = []
        for number, row in enumerate(take_apart(encoded, self.tokens, [SIDES] * encoded.rows)):
            parts = dict(zip((self.prompt, self.chosen, self.rejected), (row.prompt, *row.branches), strict=True))
            for name, both in row.fields.items():
                parts |= {f"{side}_{name}": one for side, one in zip(SIDES, both, strict=True)}
            parts |= {name: values[number] for name, values in encoded.values.items()}
            found.append({name: parts[name] for name in encoded.names})
        return found

    def scored(self, encoded: Encoded) -> Scored:
        """Return which rows predict the answers' tokens."""
        return score(encoded, self.tokens, self.mask, [SIDES] * encoded.rows, {})

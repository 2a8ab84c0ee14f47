"""One prompt and k completions of it: GRPO, best-of-n, rejection sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import attrs

from pack_torch.formats.branches import Branches, lay, pairs_of_tokens, score, take_apart
from pack_torch.formats.columns import Field, Row, as_fields, keys_of
from pack_torch.formats.encoded import Encoded, Scored
from pack_torch.formats.format import Format

#: What losses read per token of a completion, or per completion.
LOSS_FIELDS = ("advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs")


@attrs.frozen
class SharedPrompt(Format):
    """A prompt that is computed once, and completions that each see it and themselves, at positions as if alone.

    A completion's first token is predicted by the prompt's last row, its others by the row before them: no shift of a
    row gives such targets, so there are no labels; `Batch.score_map` has them, and every loss asks for it.

    Args:
        prompt: field of the prompt's tokens, at least one.
        completions: field of the completions: a list of tokens for each.
        tokens: what the pack calls the tokens.
        mask: field with a list of 0 and 1 for each completion, 1 for a token that trains, or one for each completion;
            need not be there.
        token_fields: fields with a list of numbers for each completion, or one number for each, which then is that of
            all its tokens; the value is what pads them. Need not be there.
        shared: False lays every completion out as a document with the prompt before it, for attention and models that
            cannot share; losses and gradients are the same.

    Other fields travel with the row. A row cannot be cut.

    >>> from pack_torch import build_pack
    >>> row = {"prompt_ids": [1, 2], "completion_ids": [[3, 4, 5], [6, 7]], "advantages": [1.0, -1.0]}
    >>> pack = build_pack([row], format=SharedPrompt())
    >>> pack["input_ids"].tolist(), pack.position_ids.tolist()
    ([1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 2, 3])
    >>> pack.documents() == [row]
    True
    """

    prompt: str = "prompt_ids"
    completions: str = "completion_ids"
    tokens: str = "input_ids"
    mask: str = "completion_mask"
    token_fields: Mapping[str, Field] = attrs.field(
        factory=lambda: dict.fromkeys(LOSS_FIELDS, 0.0), converter=as_fields
    )
    shared: bool = True

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """The columns of a pack, with what pads them."""
        known = {self.tokens: Field(0, dtype="int64"), self.mask: Field(0)}
        return MappingProxyType(known | dict(self.token_fields))

    @property
    def whole(self) -> str:
        """Why no row can be cut."""
        return "completions are compared with each other, whole"

    def length(self, row: Row) -> int:
        """Return the tokens of prompt and completions, the prompt counted as often as it is computed."""
        branches = row[self.completions]
        return len(row[self.prompt]) * (1 if self.shared else len(branches)) + sum(map(len, branches))

    def cost(self, row: Row) -> int:
        """Return the pairs of tokens that attention looks at, as squares."""
        return pairs_of_tokens(len(row[self.prompt]), list(map(len, row[self.completions])), self.shared)

    def cut(self, row: Row, start: int, stop: int) -> Row:
        """Refuse.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"a prompt with {len(row[self.completions])} completions cannot be cut: completions are compared with each "
            "other, whole; shorten them before, raise the capacity or drop the document"
        )

    def encode(self, rows: Sequence[Row]) -> Encoded:
        """Return prompts and completions end to end."""
        names = keys_of(rows)
        columns = [name for name in names if name in self.fields and not _per_branch(rows, name)]
        taken = [
            Branches(
                row[self.prompt],
                row[self.completions],
                {name: row[name] for name in columns},
                tuple(map(str, range(len(row[self.completions])))),
            )
            for row in rows
        ]
        encoded = lay(taken, self.tokens, self.fields, self.shared)
        other = [name for name in names if name not in (self.prompt, self.completions, *columns)]
        values = {name: [row[name] for row in rows] for name in other}
        for name in set(other) & set(self.fields):
            _check_numbers(values[name], taken, name)
        return attrs.evolve(encoded, values=values, names=names)

    def decode(self, encoded: Encoded) -> list[Row]:
        """Return the rows as they came; lists of completions as lists."""
        found: list[Row] = []
        for number, row in enumerate(take_apart(encoded, self.tokens, self._labels(encoded))):
            parts = {self.prompt: row.prompt, self.completions: row.branches, **row.fields}
            parts |= {name: values[number] for name, values in encoded.values.items()}
            found.append({name: parts[name] for name in encoded.names})
        return found

    def scored(self, encoded: Encoded) -> Scored:
        """Return which rows predict the completions' tokens."""
        numbers = {
            name: [float(one) for row in values for one in row]
            for name, values in encoded.values.items()
            if name in self.fields
        }
        return score(encoded, self.tokens, self.mask, self._labels(encoded), numbers)

    def _labels(self, encoded: Encoded) -> list[tuple[str, ...]]:
        counts = [count - 1 if self.shared else count // 2 for count in encoded.row_segments or ()]
        return [tuple(map(str, range(count))) for count in counts]


def _per_branch(rows: Sequence[Row], name: str) -> bool:
    """Whether a field has one number for each completion, not one for each of its tokens."""
    values: list[Any] = [one for row in rows for one in row[name]]
    kinds = {getattr(one, "ndim", None) == 0 or not hasattr(one, "__len__") for one in values}
    if len(kinds) > 1:
        raise ValueError(
            f"{name!r} has one number for each completion in one document of the pack and one for each of its tokens "
            "in another; give it in the same way to all"
        )
    return kinds != {False}


def _check_numbers(values: Sequence[Any], rows: Sequence[Branches], name: str) -> None:
    for number, (own, row) in enumerate(zip(values, rows, strict=True)):
        if len(own) != len(row.branches):
            raise ValueError(
                f"document {number} of the pack has {len(own)} {name} for {len(row.branches)} completions; give one "
                "for each, or a list for each"
            )

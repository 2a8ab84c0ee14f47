"""One prompt and what follows it in several versions: as a tree that holds the prompt once, or as documents apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from pack_torch.formats.columns import Array, Field, Origin, joined, joined_tokens, origins_of, split_parts
from pack_torch.formats.encoded import Encoded, Scored


@attrs.frozen
class Branches:
    """One row of a dataset, taken apart.

    Args:
        prompt: its tokens.
        branches: tokens of each.
        fields: by name, for each branch one value per token.
        labels: what each branch is called.
    """

    prompt: Any
    branches: Sequence[Any]
    fields: Mapping[str, Sequence[Any]]
    labels: tuple[str, ...]

    def check(self, number: int) -> None:
        """Raise unless there is a prompt, a branch, and as many values as tokens."""
        if len(self.prompt) == 0:
            raise ValueError(
                f"document {number} of the pack has an empty prompt; its last token predicts the first of every "
                "branch, so give it at least one, such as the one that begins a text"
            )
        if len(self.branches) == 0:
            raise ValueError(
                f"document {number} of the pack has a prompt and nothing after it; give one branch or more"
            )
        lengths = list(map(len, self.branches))
        for name, parts in self.fields.items():
            found = list(map(len, parts))
            if found != lengths:
                raise ValueError(
                    f"document {number} of the pack has {found} values of {name!r} for branches of {lengths} tokens; "
                    "give one for each token of each branch"
                )


def pairs_of_tokens(prompt: int, branches: Sequence[int], shared: bool) -> int:
    """Return the pairs of tokens that attention looks at, as squares; a shared prompt's own count once.

    >>> pairs_of_tokens(2, [3, 2], shared=False), pairs_of_tokens(2, [3, 2], shared=True)
    (41, 37)
    """
    whole = sum((prompt + branch) ** 2 for branch in branches)
    return whole - (len(branches) - 1) * prompt**2 if shared else whole


def lay(rows: Sequence[Branches], tokens: str, fields: Mapping[str, Field], shared: bool) -> Encoded:
    """Return the rows end to end: each prompt once, before all its branches, or before each of them.

    >>> row = Branches([1, 2], [[3, 4], [5]], {}, ("0", "1"))
    >>> fields = {"input_ids": Field(0, dtype="int64")}
    >>> lay([row], "input_ids", fields, shared=True).columns["input_ids"].tolist()
    [1, 2, 3, 4, 5]
    >>> lay([row], "input_ids", fields, shared=False).columns["input_ids"].tolist()
    [1, 2, 3, 4, 1, 2, 5]
    """
    pieces: list[Any] = []
    parents: list[int] = []
    row_segments = []
    for number, row in enumerate(rows):
        row.check(number)
        first = len(pieces)
        for place, branch in enumerate(row.branches):
            if place == 0 or not shared:
                prompt = len(pieces)
                pieces.append(row.prompt)
                parents.append(-1)
            pieces.append(branch)
            parents.append(prompt)
        row_segments.append(len(pieces) - first)
    lengths = list(map(len, pieces))
    columns = {tokens: joined_tokens(pieces, fields[tokens], tokens)}
    origins = {tokens: origins_of(pieces)}
    for name in rows[0].fields:
        answers = [part for row in rows for part in row.fields[name]]
        columns[name], origins[name] = _spread(answers, lengths, parents, fields[name], name)
    return Encoded(columns, lengths, row_segments, parents, origins=origins)


def _spread(
    answers: Sequence[Any], lengths: Sequence[int], parents: Sequence[int], field: Field, name: str
) -> tuple[Array, Origin | tuple[Origin, ...]]:
    """Return a column that holds the values at branches and the pad at prompts."""
    values = joined(answers, field, name)
    column = np.full((sum(lengths), *values.shape[1:]), field.pad, values.dtype)
    column[np.repeat(np.asarray(parents) >= 0, lengths)] = values
    return column, origins_of(answers)


def take_apart(encoded: Encoded, tokens: str, labels: Sequence[tuple[str, ...]]) -> list[Branches]:
    """Return the rows that `lay` was given; `labels` are those of each row."""
    segments = split_parts(encoded.columns[tokens], encoded.segment_lens, encoded.origins[tokens])
    parents = encoded.parents or ()
    below = np.repeat(np.asarray(parents) >= 0, encoded.segment_lens)
    branch_lens = [length for parent, length in zip(parents, encoded.segment_lens, strict=True) if parent >= 0]
    fields = {
        name: split_parts(column[below], branch_lens, encoded.origins[name])
        for name, column in encoded.columns.items()
        if name != tokens
    }
    rows, segment, branch = [], 0, 0
    for count, names in zip(encoded.row_segments or (), labels, strict=True):
        own = range(segment, segment + count)
        branches = [segments[one] for one in own if parents[one] >= 0]
        taken = {name: parts[branch : branch + len(branches)] for name, parts in fields.items()}
        rows.append(Branches(segments[segment], branches, taken, names))
        segment, branch = segment + count, branch + len(branches)
    return rows


def score(
    encoded: Encoded, tokens: str, mask: str, labels: Sequence[tuple[str, ...]], per_branch: Mapping[str, Sequence[Any]]
) -> Scored:
    """Return which rows predict the branches' tokens: of the first, the prompt's last; of others, the one before.

    Args:
        encoded: columns are tensors.
        tokens: their column.
        mask: the column that says which train, where there is one.
        labels: of the branches of each row.
        per_branch: by name, one number for each branch of the pack.
    """
    lens = np.asarray(encoded.segment_lens)
    parents = np.asarray(encoded.parents)
    ends = lens.cumsum()
    branches = (parents >= 0).nonzero()[0]
    sizes = lens[branches]
    targets = np.repeat(parents >= 0, lens).nonzero()[0]
    rows = targets - 1
    some = sizes > 0
    rows[(sizes.cumsum() - sizes)[some]] = ends[parents[branches[some]]] - 1
    column = torch.as_tensor(encoded.columns[tokens])
    where = torch.from_numpy(targets).to(column.device)
    fields: dict[str, Tensor] = {
        name: torch.as_tensor(one)[where] for name, one in encoded.columns.items() if name != tokens
    }
    for name, numbers in per_branch.items():
        spread = torch.repeat_interleave(torch.tensor(numbers, dtype=torch.float64), torch.from_numpy(sizes))
        fields[name] = spread.to(column.device)
    active = fields.pop(mask).bool() if mask in fields else None
    counts = [len(one) for one in labels]
    return Scored(
        rows=torch.from_numpy(rows).to(column.device),
        targets=column[where],
        lens=tuple(sizes.tolist()),
        lengths=tuple((lens[parents[branches]] + sizes).tolist()),
        owners=tuple(np.repeat(np.arange(len(counts)), counts).tolist()),
        labels=tuple(label for row in labels for label in row),
        active=active,
        fields=fields,
    )

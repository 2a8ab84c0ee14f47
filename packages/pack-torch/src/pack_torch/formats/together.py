"""Many packs laid out at once, each as if it had been laid out by itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from pack_torch.formats.columns import Row, origins_of
from pack_torch.formats.encoded import Encoded
from pack_torch.formats.format import Format

#: Most tokens of several packs laid out at once: what a core's cache holds, and what a pack that is kept keeps.
_TOKENS = 1 << 15


def encode_together(format: Format, packs: Sequence[Sequence[Row]]) -> list[Encoded]:
    """Return the first of these packs, each as the format's `encode` makes it: as many as are laid out at once.

    The columns of a pack are stretches of arrays that its neighbours share. For formats that lay every row out by
    itself, one after the other, a segment each.

    >>> from pack_torch import Sft
    >>> packs = [[{"input_ids": [1, 2]}, {"input_ids": [3]}], [{"input_ids": [4, 5]}]]
    >>> [one.columns["labels"].tolist() for one in encode_together(Sft(label_mode="tokens"), packs)]
    [[2, -100, -100], [5, -100]]
    """
    some = packs[:1]
    try:
        some = packs[: max(1, _fitting(format, packs))]
        if len(some) > 1 and _alike(format, some):
            whole = format.encode(list(chain.from_iterable(some)))
            return split_rows(whole, list(map(len, some)))
    except Exception:
        pass  # one of the packs is at fault, and is refused in its turn, by itself
    laid = [format.encode(some[0])]
    for pack in some[1:]:
        try:
            laid.append(format.encode(pack))
        except Exception:
            break
    return laid


def _fitting(format: Format, packs: Sequence[Sequence[Row]]) -> int:
    """Return how many packs are laid out at once."""
    tokens = 0
    for number, pack in enumerate(packs):
        tokens += sum(format.lengths(pack))
        if tokens > _TOKENS:
            return number
    return len(packs)


def _alike(format: Format, packs: Sequence[Sequence[Row]]) -> bool:
    """Return whether names and their order, and the dtype of every column, are those that each pack has by itself."""
    if not all(packs) or len({tuple(pack[0]) for pack in packs}) > 1:
        return False
    first = packs[0][0]
    undeclared = [name for name in first if name in format.fields and format.fields[name].dtype is None]
    if not all(isinstance(first[name], np.ndarray) for name in undeclared):
        return False
    rows = list(chain.from_iterable(packs))
    return all(isinstance(origins_of([row[name] for row in rows]), np.dtype) for name in undeclared)


def split_rows(whole: Encoded, counts: Sequence[int]) -> list[Encoded]:
    """Return rows that were laid out together as packs of so many rows each, for rows that are a segment each.

    >>> whole = Encoded({"input_ids": np.array([1, 2, 3, 4, 5])}, (2, 1, 2))
    >>> [(one.columns["input_ids"].tolist(), one.cu_seqlens.tolist()) for one in split_rows(whole, [2, 1])]
    [([1, 2, 3], [0, 2, 3]), ([4, 5], [0, 2])]
    """
    packs: list[Encoded] = []
    positions, starts = whole.position_ids, whole.cu_seqlens
    bounds = starts.tolist()
    first = 0
    for count in counts:
        rows = slice(first, first + count)
        tokens = slice(bounds[first], bounds[first + count])
        pack = Encoded(
            {name: column[tokens] for name, column in whole.columns.items()},
            whole.segment_lens[rows],
            values={name: values[rows] for name, values in whole.values.items()},
            names=whole.names,
            origins={name: one[rows] if isinstance(one, tuple) else one for name, one in whole.origins.items()},
            heads={name: heads[rows] for name, heads in whole.heads.items()},
        )
        # What these properties would find is known, and is found for all packs in one go much sooner.
        vars(pack).update(
            tokens=tokens.stop - tokens.start,
            position_ids=positions[tokens],
            cu_seqlens=starts[first : first + count + 1] - starts[first],
        )
        packs.append(pack)
        first += count
    return packs

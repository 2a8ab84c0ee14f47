"""Many packs laid out at once, each as if it had been laid out by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain

import numpy as np

from pack_torch.formats.columns import Row, origins_of
from pack_torch.formats.encoded import Encoded
from pack_torch.formats.format import Format

#: Most packs laid out at once, and the tokens they may have: what a core's cache holds, and what one kept pack keeps.
_PACKS, _TOKENS = 16, 1 << 15


def encode_together(format: Format, packs: Sequence[Sequence[Row]]) -> Iterator[Encoded]:
    """Return what the format's `encode` makes of each pack, for a third of the time where packs are short.

    The columns of a pack are stretches of arrays that its neighbours share. For formats that lay every row out by
    itself, one after the other, a segment each.

    >>> from pack_torch import Sft
    >>> packs = [[{"input_ids": [1, 2]}, {"input_ids": [3]}], [{"input_ids": [4, 5]}]]
    >>> [one.columns["labels"].tolist() for one in encode_together(Sft(label_mode="tokens"), packs)]
    [[2, -100, -100], [5, -100]]
    """
    for some in _gathered(format, packs):
        yield from _encoded(format, some)


def _gathered(format: Format, packs: Iterable[Sequence[Row]]) -> Iterator[list[Sequence[Row]]]:
    """Return as many packs at a time as are laid out at once."""
    some: list[Sequence[Row]] = []
    tokens = 0
    for pack in packs:
        more = sum(format.lengths(pack))
        if some and (len(some) == _PACKS or tokens + more > _TOKENS):
            yield some
            some, tokens = [], 0
        some.append(pack)
        tokens += more
    if some:
        yield some


def _encoded(format: Format, packs: Sequence[Sequence[Row]]) -> Iterable[Encoded]:
    rows = list(chain.from_iterable(packs))
    if len(packs) > 1 and _alike(format, rows):
        try:
            return split_rows(format.encode(rows), list(map(len, packs)))
        except Exception:
            pass  # one of the packs is at fault, and is refused in its turn, by itself
    return map(format.encode, packs)


def _alike(format: Format, rows: Sequence[Row]) -> bool:
    """Return whether a column's dtype does not depend on which rows it is made of."""
    undeclared = [name for name in rows[0] if name in format.fields and format.fields[name].dtype is None]
    return all(isinstance(origins_of([row.get(name) for row in rows]), np.dtype) for name in undeclared)


def split_rows(whole: Encoded, counts: Sequence[int]) -> list[Encoded]:
    """Return rows that were laid out together as packs of so many rows each, for rows that are a segment each.

    >>> whole = Encoded({"input_ids": np.array([1, 2, 3, 4, 5])}, (2, 1, 2))
    >>> [(one.columns["input_ids"].tolist(), one.cu_seqlens.tolist()) for one in split_rows(whole, [2, 1])]
    [([1, 2, 3], [0, 2, 3]), ([4, 5], [0, 2])]
    """
    packs: list[Encoded] = []
    starts = np.fromiter(accumulate(whole.segment_lens, initial=0), np.int32, len(whole.segment_lens) + 1)
    positions, bounds = whole.position_ids, starts.tolist()
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

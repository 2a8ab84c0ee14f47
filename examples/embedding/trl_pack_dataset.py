"""TRL's `pack_dataset` by pack-core: the whole data set is planned at once, from its lengths alone.

A data set is columns of lists: a dict, or a table of Arrow, which is turned into one and back.
"""

from array import array
from itertools import chain

from pack_core import pack

#: TRL's name of a strategy -> ours, and what becomes of a row that is too long.
STRATEGIES = {
    "bfd": ("best_fit_decreasing", "truncate"),
    "bfd_split": ("best_fit_decreasing", "split"),
    "wrapped": ("concat_split", "split"),
}


def pack_dataset(dataset, seq_length, strategy="bfd", map_kwargs=None):
    """Return the columns packed, and `seq_lengths` with the length of every part of a row.

    `map_kwargs` is taken and not needed. Columns must all be lists of the same lengths; any other is an error.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}; it must be one of {', '.join(STRATEGIES)}")
    columns = dataset if isinstance(dataset, dict) else dataset.to_pydict()
    lengths = array("q", map(len, next(iter(columns.values()))))
    for name, column in columns.items():
        if list(map(len, column)) != list(lengths):
            raise ValueError(f"column {name!r} has other lengths than {next(iter(columns))!r}")
    name, overlong = STRATEGIES[strategy]
    kept = [row for row, length in enumerate(lengths) if length]  # a row without a token has nothing to pack
    packing = pack([lengths[row] for row in kept], capacity=seq_length, strategy=name, overlong=overlong)
    parts = packing.parts
    spans = dict(zip(parts.places, zip(parts.starts, parts.stops, strict=True), strict=True))
    pieces = [(kept[one], *spans.get(place, (0, lengths[kept[one]]))) for place, one in enumerate(packing.order)]
    rows = [pieces[start:stop] for start, stop in zip(packing.offsets, packing.offsets[1:], strict=False)]
    packed = {
        name: [list(chain.from_iterable(column[row][start:stop] for row, start, stop in pieces)) for pieces in rows]
        for name, column in columns.items()
    }
    if strategy != "wrapped":
        packed["seq_lengths"] = [[stop - start for _, start, stop in pieces] for pieces in rows]
    return packed if isinstance(dataset, dict) else type(dataset).from_pydict(packed)

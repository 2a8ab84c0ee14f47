"""TRL's `pack_dataset` by pack-core: the whole data set is planned at once, from its lengths alone.

A data set is columns of lists: a dict, or a Hugging Face dataset or table of Arrow, turned into one and back.
"""

from itertools import chain

from pack_core import pack

#: TRL's name of a strategy -> ours, and what becomes of a row that is too long.
STRATEGIES = {
    "bfd": {"strategy": "best_fit_decreasing", "overlong": "truncate"},
    "bfd_split": {"strategy": "best_fit_decreasing", "overlong": "split"},
    "wrapped": {"strategy": "concat_split", "overlong": "split"},
}


def pack_dataset(dataset, seq_length, strategy="bfd", map_kwargs=None):
    """Return the columns packed, and `seq_lengths` with the length of every part of a row.

    `map_kwargs` is taken and not needed. Columns must all be lists of the same lengths; any other is an error.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}; it must be one of {', '.join(STRATEGIES)}")
    if isinstance(dataset, dict):
        if any(hasattr(one, "column_names") for one in dataset.values()):  # splits, not columns
            return type(dataset)({name: pack_dataset(one, seq_length, strategy) for name, one in dataset.items()})
        return _packed(dataset, seq_length, strategy)
    if hasattr(dataset, "to_pydict"):
        return type(dataset).from_pydict(_packed(dataset.to_pydict(), seq_length, strategy))
    if not hasattr(dataset, "to_dict"):
        raise ValueError(f"dataset is a {type(dataset).__name__}; give columns, a datasets.Dataset or an Arrow table")
    return type(dataset).from_dict(_packed(dataset.to_dict(), seq_length, strategy)).with_format(dataset.format["type"])


def _packed(columns, seq_length, strategy):
    if not columns:
        raise ValueError("the data set has no columns; give one of lists at least")
    for name, column in columns.items():
        if wrong := {type(row) for row in column if isinstance(row, (str, bytes, dict)) or not hasattr(row, "__len__")}:
            raise ValueError(f"column {name!r} holds {wrong.pop().__name__}, not a list of values a row; remove it")
    lengths, *others = ([len(row) for row in column] for column in columns.values())
    for name, other in zip(list(columns)[1:], others, strict=True):
        if other != lengths:
            raise ValueError(f"column {name!r} has other lengths than {next(iter(columns))!r}")
    rows = _rows(lengths, seq_length, strategy) if any(lengths) else []
    packed = {
        name: [list(chain.from_iterable(column[row][start:stop] for row, start, stop in pieces)) for pieces in rows]
        for name, column in columns.items()
    }
    return packed if strategy == "wrapped" else packed | {"seq_lengths": [[b - a for _, a, b in row] for row in rows]}


def _rows(lengths, seq_length, strategy):
    kept = [row for row, length in enumerate(lengths) if length]  # a row without a token has nothing to pack
    packing = pack([lengths[row] for row in kept], capacity=seq_length, **STRATEGIES[strategy])
    spans = dict(zip(packing.parts.places, zip(packing.parts.starts, packing.parts.stops, strict=True), strict=True))
    pieces = [(kept[one], *spans.get(place, (0, lengths[kept[one]]))) for place, one in enumerate(packing.order)]
    return [pieces[start:stop] for start, stop in zip(packing.offsets, packing.offsets[1:], strict=False)]

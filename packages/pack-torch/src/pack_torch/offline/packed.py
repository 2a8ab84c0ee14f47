"""Packed rows as a dataset that gathers each row when it is read: it holds indices, not copies."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import pyarrow as pa
import torch

from pack_torch.offline.columns import (
    TokenColumn,
    choose_added,
    choose_columns,
    listed,
    open_columns,
    read_lengths,
)
from pack_torch.offline.errors import DatasetError
from pack_torch.offline.kinds import is_list, is_number
from pack_torch.offline.layout import Layout, Losses, Recipe, Row, Rows, lay_out
from pack_torch.offline.sources import Source

#: What a row says beside its tokens unless asked otherwise.
TRACED = ("seq_lengths", "documents", "starts")

_FORMATS = ("python", "numpy", "torch")


@attrs.frozen(eq=False)
class Gatherer:
    """Opens documents and makes tables of packed rows from them; all that another process needs to do the same.

    Attributes:
        source: where the documents lie.
        columns: names of those that hold a list a document, joined within each row.
        per_document: names of those carried as a list with one value a document.
        add: which of `seq_lengths`, `documents`, `starts`, `position_ids` each row says too.
    """

    source: Source
    columns: tuple[str, ...]
    per_document: tuple[str, ...] = ()
    add: tuple[str, ...] = TRACED

    def open(self) -> "Opened":
        """Return it with its documents open."""
        table = self.source.table()
        return Opened(self, open_columns(table, self.columns), table.select(list(self.per_document)))


@attrs.frozen(eq=False)
class Opened:
    """A gatherer whose documents are open."""

    gatherer: Gatherer
    columns: tuple[TokenColumn, ...]
    beside: Any

    def table(self, rows: Rows) -> Any:
        """Return an Arrow table with one row a packed row, every column a list."""
        places = self.gatherer.source.rows
        documents = rows.documents if places is None else places[rows.documents]
        starts: Row | int = 0 if rows.starts is None else rows.starts
        bounds = np.concatenate([[0], np.cumsum(rows.totals())])
        made = {column.name: _lists(bounds, column.gather(documents, starts, rows.sizes)) for column in self.columns}
        for name in self.gatherer.per_document:
            values = self.beside.column(name).take(pa.array(documents))
            made[name] = _lists(rows.offsets, pa.concat_arrays(values.chunks or [pa.array([], values.type)]))
        for name in self.gatherer.add:
            made[name] = self._added(name, rows, bounds)
        return pa.table(made)

    def _added(self, name: str, rows: Rows, bounds: Row) -> Any:
        if name == "position_ids":
            begins = np.cumsum(rows.sizes) - rows.sizes
            return _lists(bounds, pa.array(np.arange(bounds[-1]) - np.repeat(begins, rows.sizes)))
        if name == "seq_lengths":
            return _lists(rows.offsets, pa.array(rows.sizes.astype(np.int32)))
        starts = np.zeros(len(rows.sizes), np.int64) if rows.starts is None else rows.starts
        return _lists(rows.offsets, pa.array(rows.documents if name == "documents" else starts))


class PackedRows(torch.utils.data.Dataset[dict[str, Any]]):
    """Packed rows by number, gathered from the documents when asked for; a map-style dataset for a `DataLoader`.

    `packed[p]` is one row, a dict of lists; `packed[p:q]` a dict of lists of rows, as of Hugging Face datasets.

    >>> from pack_torch.offline.sources import TableSource
    >>> packed = pack_source(TableSource(pa.table({"input_ids": [[1, 2, 3], [4], [5, 6]]})), Recipe(4))
    >>> packed[0]
    {'input_ids': [1, 2, 3, 4], 'seq_lengths': [3, 1], 'documents': [0, 1], 'starts': [0, 0]}
    >>> len(packed), packed.with_format("torch")[1]["input_ids"]
    (2, tensor([5, 6]))
    """

    def __init__(self, gatherer: Gatherer, layout: Layout, left_out: Sequence[str] = (), kind: str = "python") -> None:
        """Join the documents of a gatherer to a layout over them; `pack_source` and `pack_dataset` do."""
        self.gatherer, self.layout, self.left_out, self.kind = gatherer, layout, tuple(left_out), kind
        self._opened: Opened | None = None

    @property
    def column_names(self) -> list[str]:
        """Names of the columns of each row."""
        return [*self.gatherer.columns, *self.gatherer.per_document, *self.gatherer.add]

    @property
    def losses(self) -> Losses:
        """What is in no row, by reason."""
        return self.layout.losses

    def with_format(self, kind: str) -> "PackedRows":
        """Return the same rows, given out as lists (`"python"`), NumPy rows or torch tensors."""
        if kind not in _FORMATS:
            raise DatasetError(f"format is {kind!r}; it must be one of {listed(_FORMATS)}")
        return PackedRows(self.gatherer, self.layout, self.left_out, kind)

    def table(self, first: int, last: int) -> Any:
        """Return rows `first` up to `last` as an Arrow table."""
        return self.gather(self.layout.rows.part(first, last))

    def gather(self, rows: Rows) -> Any:
        """Return an Arrow table of rows over the same documents."""
        if self._opened is None:
            self._opened = self.gatherer.open()
        return self._opened.table(rows)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.layout.rows)

    def __getitem__(self, place: int | slice) -> dict[str, Any]:
        """Return one row, or the columns of several."""
        if isinstance(place, slice):
            rows = [self[p] for p in range(*place.indices(len(self)))]
            return {name: [row[name] for row in rows] for name in self.column_names}
        p = place + len(self) if place < 0 else place
        if not 0 <= p < len(self):
            raise IndexError(f"row {place} does not exist; there are {len(self):,} rows")
        table = self.table(p, p + 1)
        shown: Callable[[Any], Any] = {"python": _python, "numpy": _numpy, "torch": _torch}[self.kind]
        return {name: shown(table.column(name).chunk(0).values) for name in table.column_names}

    def __getitems__(self, places: Sequence[int]) -> list[dict[str, Any]]:
        """Return several rows; what a `DataLoader` calls."""
        return [self[p] for p in places]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield every row."""
        for p in range(len(self)):
            yield self[p]

    def __getstate__(self) -> dict[str, Any]:
        """Leave the open documents behind: each process opens them for itself."""
        return self.__dict__ | {"_opened": None}

    def __repr__(self) -> str:
        """Show how many rows of which columns there are."""
        return f"PackedRows({len(self):,} rows of up to {self.layout.recipe.capacity:,} tokens: {self.column_names})"


def pack_source(
    source: Source,
    recipe: Recipe,
    *,
    columns: Sequence[str] | None = None,
    per_document: Sequence[str] = (),
    add: Sequence[str] = TRACED,
) -> PackedRows:
    """Return the packed rows of a source's documents, planned over all of them at once from their lengths alone.

    `pack_dataset` says what the arguments mean, and what is refused.
    """
    table = source.table()
    chosen, left_out = choose_columns(table.schema, columns, per_document)
    add = choose_added(add)
    layout = lay_out(read_lengths(table, chosen, source.rows), recipe)
    return PackedRows(Gatherer(source, chosen, tuple(per_document), add), layout, left_out)


def _lists(bounds: Row, values: Any) -> Any:
    return pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32)), values)


def _python(values: Any) -> list[Any]:
    listed: list[Any] = values.to_pylist()
    return listed


def _numpy(values: Any) -> Row:
    row: Row = values.to_numpy(zero_copy_only=False)
    return row


def _torch(values: Any) -> "torch.Tensor | list[Any]":
    """Return numbers as a tensor, and what no tensor holds as a list."""
    if not is_number(values.type):
        return _python(values)
    row = values.to_pylist() if is_list(values.type) else _numpy(values)
    if isinstance(row, np.ndarray) and row.dtype == object:  # true and false, some of them missing
        return _python(values)
    try:
        return torch.tensor(row)
    except (TypeError, ValueError, RuntimeError):  # lists of lists of several lengths, or with missing values
        return _python(values)

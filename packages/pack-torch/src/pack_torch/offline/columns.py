"""Columns of documents in Arrow memory: lengths read from their offsets, tokens gathered when they are asked for."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pack_torch.offline.errors import DatasetError
from pack_torch.offline.kinds import is_list, is_text

Row: TypeAlias = NDArray[Any]

#: What a packed row adds by itself; a column of documents may not be called so.
ADDED = ("seq_lengths", "documents", "starts", "position_ids")

#: The column that holds token ids wherever there is one of this name.
TOKENS = "input_ids"


@attrs.frozen(eq=False)
class TokenColumn:
    """One column that holds a list of values a document.

    Attributes:
        name: its name.
        kind: Arrow type of one value.
        firsts: first document of each stretch of memory, `[stretches]`.
        begins: where each document begins in its stretch, `[documents]`, int64.
        values: the values of each stretch, one document after another.
        flat: the same as NumPy rows where that is the very memory, else None.
    """

    name: str
    kind: Any
    firsts: Row
    begins: Row
    values: tuple[Any, ...]
    flat: tuple[Row, ...] | None

    def gather(self, documents: Row, starts: Row | int, sizes: Row) -> Any:
        """Return `sizes[i]` values of `documents[i]` from its value `starts[i]` on, one after another, as an array."""
        stretches = (np.searchsorted(self.firsts, documents, side="right") - 1).tolist()
        begins = self.begins[documents] + starts
        if self.flat is not None:
            spans = zip(stretches, begins.tolist(), (begins + sizes).tolist(), strict=True)
            found = [self.flat[c][begin:end] for c, begin, end in spans]
            return pa.array(np.concatenate(found) if found else [], self.kind)
        spans = zip(stretches, begins.tolist(), sizes.tolist(), strict=True)
        if not stretches:
            return pa.array([], self.kind)
        return pa.concat_arrays([self.values[c].slice(begin, size) for c, begin, size in spans])


def read_lengths(table: Any, names: Sequence[str], rows: Row | None = None, first: int = 0) -> Row:
    """Return the tokens of each document of a table, `[documents]`, int64, after checking that its columns agree.

    Args:
        table: an Arrow table or record batch.
        names: columns that hold a list a document.
        rows: which row of the table each document is, `[documents]`; None for all in order.
        first: number of the table's first document, for error messages.

    Raises:
        DatasetError: a document has lists of different lengths, or a list or a value of one is missing.

    >>> read_lengths(pa.table({"input_ids": [[1, 2], [3]], "labels": [[1, 2], [3]]}), ["input_ids", "labels"])
    array([2, 1])
    """
    found = np.zeros(0, np.int64)
    for name in names:
        pieces = _pieces(table, name)
        lengths = _selected([np.diff(_offsets(piece)) for piece in pieces], rows)
        missing = [_missing(piece) for piece in pieces]
        if any(row.any() for row in missing) and (bad := np.flatnonzero(_selected(missing, rows))).size:
            raise DatasetError(
                f"document {first + bad[0]} has no {name!r}, or a missing value (null) in it; every document needs "
                "every packed column: fill it or leave the document out"
            )
        if name != names[0] and (bad := np.flatnonzero(found != lengths)).size:
            raise DatasetError(
                f"document {first + bad[0]} has {found[bad[0]]:,} values of {names[0]!r} but {lengths[bad[0]]:,} of "
                f"{name!r}; every packed column must hold one value a token: mend the document, or carry {name!r} "
                "whole (per_document)"
            )
        found = lengths
    return found


def open_columns(table: Any, names: Sequence[str]) -> tuple[TokenColumn, ...]:
    """Return the columns of an Arrow table, their values left where they are; columns of one layout share `begins`.

    >>> column, = open_columns(pa.table({"input_ids": [[1, 2], [3]]}), ["input_ids"])
    >>> column.gather(np.array([1, 0]), 0, np.array([1, 2])).to_pylist()
    [3, 1, 2]
    """
    opened: list[TokenColumn] = []
    for name in names:
        pieces = _pieces(table, name)
        counts = [len(piece) for piece in pieces]
        begins = np.concatenate([np.zeros(0, np.int64), *(_offsets(piece)[:-1] for piece in pieces)])
        for earlier in opened:
            if np.array_equal(earlier.begins, begins):
                begins = earlier.begins
        values = tuple(piece.values for piece in pieces)
        kind = table.schema.field(name).type.value_type
        plain = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        plain = plain and not any(row.null_count for row in values)
        opened.append(
            TokenColumn(
                name=name,
                kind=kind,
                firsts=np.cumsum([0, *counts])[:-1],
                begins=begins,
                values=values,
                flat=tuple(row.to_numpy(zero_copy_only=True) for row in values) if plain else None,
            )
        )
    return tuple(opened)


def choose_columns(
    schema: Any, columns: Sequence[str] | None, per_document: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns to concatenate, and those of the schema that are left out because others were named.

    Raises:
        DatasetError: a name is unknown, given twice or taken; or none were named and a column holds no tokens.

    >>> schema = pa.schema({"input_ids": pa.list_(pa.int32()), "text": pa.string()})
    >>> choose_columns(schema, ["input_ids"], [])
    (('input_ids',), ('text',))
    """
    given = list(schema.names)
    per_document = as_names(per_document, "per_document")
    columns = None if columns is None else as_names(columns, "columns")
    named = [*(columns or ()), *per_document]
    for place, name in enumerate(named):
        if name not in given:
            raise DatasetError(f"there is no column {name!r}; the columns are {listed(given)}")
        if name in named[:place]:
            raise DatasetError(f"column {name!r} is named twice; it is either packed or carried one value a document")
    chosen = [name for name in given if name not in per_document] if columns is None else list(columns)
    if not chosen:
        raise DatasetError(f"no column is left to pack; the columns are {listed(given)}")
    for name in [*chosen, *per_document]:
        if given.count(name) > 1:
            raise DatasetError(f"there are {given.count(name)} columns {name!r}; rename them, so that each is known")
    for name in chosen:
        _check_kind(name, schema.field(name).type, columns is None)
    for name in [*chosen, *per_document]:
        if name in ADDED:
            raise DatasetError(
                f"column {name!r} has the name of one that packing adds; rename it, or leave it out by naming columns"
            )
    return tuple(chosen), tuple(name for name in given if name not in chosen and name not in per_document)


def choose_added(names: Sequence[str]) -> tuple[str, ...]:
    """Return what rows say beside their tokens, which is of `ADDED`.

    Raises:
        DatasetError: a name is none of them, or is given twice.

    >>> choose_added(["documents"])
    ('documents',)
    """
    chosen = as_names(names, "add")
    for place, name in enumerate(chosen):
        if name not in ADDED:
            raise DatasetError(f"add names {name!r}; it may name {listed(ADDED)}")
        if name in chosen[:place]:
            raise DatasetError(f"add names {name!r} twice; once is enough")
    return chosen


def as_names(given: Sequence[str], argument: str) -> tuple[str, ...]:
    """Return names that were given as a list.

    Raises:
        DatasetError: it is one name, whose letters would be taken for names.

    >>> as_names(["labels"], "columns")
    ('labels',)
    """
    if isinstance(given, str):
        raise DatasetError(f"{argument} is the text {given!r}; it must be a list of names, such as [{given!r}]")
    return tuple(given)


def listed(names: Iterable[str]) -> str:
    """Return names as an error shows them.

    >>> listed(["a", "b"])
    "'a', 'b'"
    """
    return ", ".join(map(repr, names)) or "none"


def _check_kind(name: str, kind: Any, unasked: bool) -> None:
    within = kind.value_type if is_list(kind) else kind
    if within is not kind and not pa.types.is_struct(within) and not is_text(within):
        if name == TOKENS and (pa.types.is_floating(within) or pa.types.is_boolean(within)):
            raise DatasetError(
                f"column {name!r} holds {kind}, but token ids are whole numbers; mend the documents, cast the column "
                "to integers, or rename it where it holds no tokens"
            )
        return
    text = is_text(within)
    what = "text, not tokens" if text else f"{kind}, not a list of tokens a document"
    remedy = "tokenize it first" if text else "only lists with one value a token can be packed"
    if unasked:
        remedy += "; or name the columns to pack (columns), or those to carry one value a document (per_document)"
    raise DatasetError(f"column {name!r} holds {what}; {remedy}")


def _pieces(table: Any, name: str) -> list[Any]:
    """Return the stretches of memory of a list column that hold documents."""
    column = table.column(name)
    pieces = [piece for piece in getattr(column, "chunks", [column]) if len(piece)]
    if pieces and pa.types.is_fixed_size_list(pieces[0].type):
        return [piece.cast(pa.large_list(piece.type.value_type)) for piece in pieces]
    return pieces


def _selected(stretches: Sequence[Row], rows: Row | None) -> Row:
    joined = np.concatenate([np.zeros(0, np.int64), *stretches])
    return joined if rows is None else joined[rows]


def _missing(piece: Any) -> Row:
    """Return which documents of a stretch have no list, or one that lacks a value."""
    none: Row = piece.is_null().to_numpy(zero_copy_only=False)
    if not piece.values.null_count:
        return none
    before = np.concatenate([[0], np.cumsum(piece.values.is_null().to_numpy(zero_copy_only=False))])
    return none | (np.diff(before[_offsets(piece)]) > 0)


def _offsets(piece: Any) -> Row:
    row: Row = piece.offsets.to_numpy(zero_copy_only=True)
    return row.astype(np.int64)

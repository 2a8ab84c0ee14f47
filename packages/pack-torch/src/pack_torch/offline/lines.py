"""Documents in JSON lines, plain or gzip: read some thousand at a time, each column in the type of the first ones."""

import gzip
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from pack_torch.offline.columns import listed
from pack_torch.offline.errors import DatasetError
from pack_torch.offline.kinds import can_hold, is_list

#: Documents read at a time; the types of the first ones are those of all.
AT_A_TIME = 8192

_GZIP = b"\x1f\x8b"


def first_columns(path: Path) -> list[str]:
    """Return the columns of the first line; none where there is no line.

    Raises:
        DatasetError: the line is no JSON object with columns.
    """
    return next((list(_document(path, number, line)) for number, line in _lines(path)), [])


def read_lines(path: Path, names: Sequence[str], others: bool, schema: Any = None) -> Iterator[Any]:
    """Yield the documents of a file as tables of the columns `names`, some thousand at a time.

    Args:
        path: the file.
        names: the columns to read; every line must have them.
        others: whether lines may have other columns, which are passed over unread.
        schema: types of the columns; None for those of the first table.

    Raises:
        DatasetError: a line is no JSON object, lacks a column or has another, or holds a value that its column's type
            cannot hold unchanged; the line is named.
    """
    held: list[dict[str, Any]] = []
    number = 0
    for number, line in _lines(path):
        held.append(_document(path, number, line))
        if len(held) == AT_A_TIME:
            table = _table(path, number - len(held) + 1, held, names, others, schema)
            schema = table.schema
            yield table
            held = []
    if held:
        yield _table(path, number - len(held) + 1, held, names, others, schema)


def _document(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        what = "is blank" if not line.strip() else f"is no JSON: {error}"
        raise DatasetError(f"{path}:{number}: the line {what}; every line holds one document as an object") from None
    if not isinstance(document, dict) or not document:
        raise DatasetError(
            f"{path}:{number}: the line holds {type(document).__name__}, not an object with columns, such as "
            '{"input_ids": [5, 6, 7]}'
        )
    return document


def _table(
    path: Path, first: int, documents: Sequence[dict[str, Any]], names: Sequence[str], others: bool, schema: Any
) -> Any:
    """Return documents, the first of them on line `first`, as a table."""
    wanted = set(names)
    for number, document in enumerate(documents, first):
        if lacking := wanted - document.keys():
            raise DatasetError(f"{path}:{number}: the line has no {min(lacking)!r}; all lines must have it")
        if not others and (own := document.keys() - wanted):
            raise DatasetError(
                f"{path}:{number}: the line has column {min(own)!r}, which line 1 of the first file has not; all lines "
                f"must have the same columns, unless those to pack are named (columns), such as {listed(names)}"
            )
    made = {}
    for name in names:
        kind = None if schema is None else schema.field(name).type
        made[name] = _column(path, first, name, [document[name] for document in documents], kind)
    return pa.table(made)


def _column(path: Path, first: int, name: str, values: list[Any], kind: Any) -> Any:
    try:
        return _array(values, kind)
    except (pa.ArrowException, OverflowError):
        place = bisect_left(range(len(values)), True, key=lambda end: _told(values[: end + 1], kind) is None)
    found = _told(values[place : place + 1], None)
    shown = msgspec.json.encode(values[place])[:40].decode(errors="replace")
    where = f"{path}:{first + place}: {name!r} holds {shown}"
    if found is None:
        raise DatasetError(f"{where}, which no column can hold; mend the line, or leave {name!r} out (columns)")
    raise DatasetError(
        f"{where}, while the lines before hold {_told(values[:place], kind)} and this one {found}; every line must "
        f"hold the same kind of value, for which the first {AT_A_TIME:,} stand: mend the line, or leave {name!r} out "
        "by naming the columns to pack (columns)"
    )


def _array(values: list[Any], kind: Any) -> Any:
    """Return values as an Arrow array of a kind, their own where it is None; none is changed.

    Raises:
        pa.ArrowException, OverflowError: a value is not of this kind, or too large.
    """
    if kind is not None and not can_hold(kind, own := pa.infer_type(values)):
        raise pa.ArrowTypeError(f"{own} for {kind}")  # Arrow itself would round and drop
    row = pa.array(values, kind)
    if "double" in str(row.type) and _mixed(values, row.type):
        raise pa.ArrowTypeError("true or false among numbers")
    if kind is None and is_list(row.type) and pa.types.is_null(row.type.value_type):
        return row.cast(pa.list_(pa.int64()))
    return row


def _mixed(values: Sequence[Any], kind: Any) -> bool:
    """Return whether true or false stands where a kind says a number with a fraction, which Arrow would make of it."""
    if pa.types.is_floating(kind):
        return bool in set(map(type, values))
    if is_list(kind):
        return any(_mixed(value, kind.value_type) for value in values if value)
    if pa.types.is_struct(kind):
        return any(_mixed([value.get(field.name) for value in values if value], field.type) for field in kind)
    return False


def _told(values: list[Any], kind: Any) -> str | None:
    """Return the kind of values as text, None where they are of none."""
    try:
        return str(_array(values, kind).type)
    except (pa.ArrowException, OverflowError):
        return None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with path.open("rb") as raw:
            zipped = raw.peek(2)[:2] == _GZIP
            yield from (
                (number := place, line) for place, line in enumerate(gzip.GzipFile(fileobj=raw) if zipped else raw, 1)
            )
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DatasetError(f"{path}: the gzip file is damaged after line {number}: {error}; copy it again") from None
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror}") from None

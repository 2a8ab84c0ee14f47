"""Documents in files: JSON lines, Parquet or Arrow, read a stretch at a time, or staged where Arrow can map them."""

import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pack_torch.offline.columns import Row, choose_columns, listed, read_lengths
from pack_torch.offline.errors import DatasetError
from pack_torch.offline.formats import SUFFIXES
from pack_torch.offline.layout import fingerprint
from pack_torch.offline.sources import ArrowSource, identify, map_arrow

#: Documents read at a time.
AT_A_TIME = 8192

_GZIP = b"\x1f\x8b"


@attrs.frozen
class Files:
    """Files of documents in one format, and the columns chosen of them.

    Attributes:
        paths: the files, in order.
        suffix: `.parquet`, `.arrow` or `.jsonl`.
        columns: those to pack.
        per_document: those to carry one value a document.
        left_out: the others.
    """

    paths: tuple[Path, ...]
    suffix: str
    columns: tuple[str, ...]
    per_document: tuple[str, ...]
    left_out: tuple[str, ...]

    def tables(self) -> Iterator[Any]:
        """Yield the chosen columns, some thousand documents at a time, in the types of the first."""
        names, schema = [*self.columns, *self.per_document], None
        for path in self.paths:
            for table in _tables(path, self.suffix, names if self.suffix == ".parquet" else None):
                missing = [name for name in names if name not in table.schema.names]
                if missing:
                    raise DatasetError(f"{path}: there is no column {missing[0]!r}, which other files have")
                chosen = table.select(names)
                schema = schema or chosen.schema.remove_metadata()
                try:
                    yield chosen.cast(schema)
                except (pa.ArrowInvalid, ValueError) as error:
                    raise DatasetError(f"{path}: its columns differ from those of the first file: {error}") from None

    def lengths(self) -> Row:
        """Return the tokens of each document, holding no more than some thousand documents."""
        found: list[Row] = []
        for table in self.tables():
            found.append(read_lengths(table, self.columns, first=sum(map(len, found))))
        return np.concatenate(found)

    def source(self, folder: Path) -> ArrowSource:
        """Return where Arrow maps the documents: the files themselves, or the copy that `stage` makes in a folder."""
        paths = tuple(map(str, self.paths))
        if self.suffix == ".arrow":
            return ArrowSource(paths)
        name = identify(paths)
        asked = fingerprint({"files": name, "columns": [*self.columns, *self.per_document]})
        return ArrowSource((str(folder / f".staged-{asked}.arrow"),), name)

    def stage(self, folder: Path) -> None:
        """Copy the chosen columns to where `source` says, unless they are there: whole, from an earlier call."""
        staged = Path(self.source(folder).paths[0])
        if staged.exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        partial = staged.with_name(f"{staged.name}.{os.getpid()}.partial")
        writer = None
        try:
            for table in self.tables():
                writer = writer or pa.ipc.new_file(str(partial), table.schema)
                writer.write_table(table)
        finally:
            if writer is not None:
                writer.close()
        partial.replace(staged)


def find_files(given: str | Path, columns: Sequence[str] | None = None, per_document: Sequence[str] = ()) -> Files:
    """Return the documents of a file, or of all files of a folder in the order of their names.

    Raises:
        DatasetError: there is none, it is empty or of another format, or `choose_columns` refuses its columns.
    """
    given = Path(given)
    if not given.exists():
        raise DatasetError(f"{given}: there is no such file or folder; give one of {listed(SUFFIXES)}")
    paths = [given]
    if given.is_dir():
        paths = sorted(path for path in given.iterdir() if path.name.endswith(SUFFIXES) and path.name[0] != ".")
        if not paths:
            raise DatasetError(f"{given}: the folder holds no file of {listed(SUFFIXES)}")
    kinds = {path: next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None) for path in paths}
    kinds = {path: ".jsonl" if kind == ".jsonl.gz" else kind for path, kind in kinds.items()}
    suffix = kinds[paths[0]]
    if suffix is None:
        raise DatasetError(f"{given}: files end in {listed(SUFFIXES)}; convert it, or rename it to what it is")
    other = next((path for path, kind in kinds.items() if kind != suffix), None)
    if other is not None:
        raise DatasetError(f"{given}: holds {paths[0].name} and {other.name}; a folder must hold files of one format")
    first = next((table for path in paths for table in _tables(path, suffix, None)), None)
    if first is None:
        raise DatasetError(f"{given}: there are no documents in it")
    try:
        chosen, left_out = choose_columns(first.schema, columns, per_document)
    except DatasetError as error:
        raise DatasetError(f"{given}: {error}") from None
    return Files(tuple(paths), suffix, chosen, tuple(per_document), left_out)


def _tables(path: Path, suffix: str, names: Sequence[str] | None) -> Iterator[Any]:
    if suffix == ".jsonl":
        yield from _json_tables(path)
        return
    try:
        if suffix == ".arrow":
            for batch in map_arrow(path).to_batches(max_chunksize=AT_A_TIME):
                yield pa.Table.from_batches([batch])
            return
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(AT_A_TIME, columns=None if names is None else list(names)):
                yield pa.Table.from_batches([batch])
    except (pa.ArrowInvalid, OSError) as error:
        raise DatasetError(f"{path}: cannot be read as {suffix}: {error}") from None


def _json_tables(path: Path) -> Iterator[Any]:
    schema = None
    held: list[dict[str, Any]] = []
    number = 0
    for number, line in _lines(path):
        held.append(_document(path, number, line))
        if len(held) == AT_A_TIME:
            table = _table(path, number, held, schema)
            schema = table.schema
            yield table
            held = []
    if held:
        yield _table(path, number, held, schema)


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


def _table(path: Path, last: int, documents: list[dict[str, Any]], schema: Any) -> Any:
    """Return lines as a table; all have the columns of the first line, in its types."""
    first = last - len(documents) + 1
    names = list(documents[0]) if schema is None else schema.names
    for place, document in enumerate(documents):
        if document.keys() != set(names):
            own = document.keys() - set(names)
            lacks = f"has column {min(own)!r}, which line 1 has not" if own else f"has no {_first(names, document)!r}"
            raise DatasetError(f"{path}:{first + place}: the line {lacks}; all lines must have the same columns")
    made = {}
    for name in names:
        kind = None if schema is None else schema.field(name).type
        made[name] = _array(path, first, name, [document[name] for document in documents], kind)
    return pa.table(made)


def _array(path: Path, first: int, name: str, values: list[Any], kind: Any) -> Any:
    try:
        row = pa.array(values, kind)
        empty = pa.types.is_list(row.type) and pa.types.is_null(row.type.value_type)
        return row.cast(pa.list_(pa.int64())) if empty else row
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        kind = kind or pa.array(values[:1]).type
        for place, value in enumerate(values):
            try:
                pa.array([value], kind)
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
                shown = msgspec.json.encode(value)[:40].decode(errors="replace")
                raise DatasetError(
                    f"{path}:{first + place}: {name!r} holds {shown}, while the lines before hold {kind}; "
                    "every line must hold the same kind of value"
                ) from None
        raise DatasetError(f"{path}: {name!r} from line {first} on cannot be read: {error}") from None


def _first(names: Sequence[str], document: dict[str, Any]) -> str:
    return next(name for name in names if name not in document)


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

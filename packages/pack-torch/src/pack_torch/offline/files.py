"""Documents in files: JSON lines, Parquet or Arrow, read a stretch at a time, or staged where Arrow can map them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pack_torch.offline.columns import Row, as_names, choose_columns, listed, read_lengths
from pack_torch.offline.errors import DatasetError
from pack_torch.offline.formats import SUFFIXES
from pack_torch.offline.kinds import can_hold
from pack_torch.offline.layout import fingerprint
from pack_torch.offline.lines import AT_A_TIME, first_columns, read_lines
from pack_torch.offline.partials import remove_orphans, written_whole
from pack_torch.offline.sources import ArrowSource, identify, map_arrow


@attrs.frozen
class Files:
    """Files of documents in one format, and the columns chosen of them.

    Attributes:
        paths: the files, in order.
        suffix: `.parquet`, `.arrow` or `.jsonl`.
        columns: those to pack.
        per_document: those to carry one value a document.
        left_out: the others, of the first file that holds documents.
        named: whether the columns were named, and others may be there.
        mapped: whether Arrow can map the files as they are, all in the same types.
    """

    paths: tuple[Path, ...]
    suffix: str
    columns: tuple[str, ...]
    per_document: tuple[str, ...]
    left_out: tuple[str, ...]
    named: bool
    mapped: bool

    def tables(self) -> Iterator[Any]:
        """Yield the chosen columns, some thousand documents at a time, in the types of the first."""
        names, schema, first = [*self.columns, *self.per_document], None, self.paths[0]
        for path in self.paths:
            tables = (
                read_lines(path, names, self.named, schema)
                if self.suffix == ".jsonl"
                else _tables(path, self.suffix, names)
            )
            for table in tables:
                if schema is None:
                    schema, first = table.schema.remove_metadata(), path
                yield _alike(table, schema, path, first)

    def lengths(self) -> Row:
        """Return the tokens of each document, holding no more than some thousand documents."""
        found: list[Row] = []
        for table in self.tables():
            found.append(read_lengths(table, self.columns, first=sum(map(len, found))))
        return np.concatenate(found)

    def source(self, folder: Path) -> ArrowSource:
        """Return where Arrow maps the documents: the files themselves, or the copy that `stage` makes in a folder."""
        paths = tuple(map(str, self.paths))
        return ArrowSource(paths) if self.mapped else ArrowSource((str(self._staged(folder)),), identify(paths))

    def stage(self, folder: Path) -> None:
        """Copy the chosen columns to where `source` says, unless they are there: whole, from an earlier call."""
        if self.mapped:
            return
        folder.mkdir(parents=True, exist_ok=True)
        remove_orphans(folder)
        if (staged := self._staged(folder)).exists():
            return
        with written_whole(staged) as partial:
            writer = None
            try:
                for table in self.tables():
                    writer = writer or pa.ipc.new_file(str(partial), table.schema)
                    writer.write_table(table)
            finally:
                if writer is not None:
                    writer.close()

    def unstage(self, folder: Path) -> None:
        """Remove the copy that `stage` made in a folder."""
        if not self.mapped:
            self._staged(folder).unlink(missing_ok=True)

    def _staged(self, folder: Path) -> Path:
        asked = {"files": identify(self.paths), "columns": [*self.columns, *self.per_document]}
        return folder / f".staged-{fingerprint(asked)}.arrow"


def find_files(given: str | Path, columns: Sequence[str] | None = None, per_document: Sequence[str] = ()) -> Files:
    """Return the documents of a file, or of all files of a folder in the order of their names.

    Raises:
        DatasetError: there is none, it is empty or of another format, `choose_columns` refuses its columns, or a file
            holds them in types that cannot become those of the first file unchanged.
    """
    given = Path(given)
    paths, suffix = _listed(given)
    named = columns is not None
    wanted = None if columns is None else [*as_names(columns, "columns"), *as_names(per_document, "per_document")]
    found = ((path, _schema(path, suffix, wanted)) for path in paths)
    first, schema = next(((path, schema) for path, schema in found if schema is not None), (given, None))
    if schema is None:
        raise DatasetError(f"{given}: there are no documents in it")
    try:
        chosen, left_out = choose_columns(schema, columns, per_document)
    except DatasetError as error:
        raise DatasetError(f"{first}: {error}") from None
    mapped = False
    if suffix != ".jsonl":
        names = (*chosen, *per_document)
        for path in paths:
            _compare(path, _schema(path, suffix, None), first, schema, names, named)
        mapped = suffix == ".arrow" and _joins(paths)
    return Files(tuple(paths), suffix, chosen, tuple(per_document), left_out, named, mapped)


def _listed(given: Path) -> tuple[list[Path], str]:
    """Return the files of a file or folder, and the one format they are in."""
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
    return paths, suffix


def _schema(path: Path, suffix: str, wanted: Sequence[str] | None) -> Any:
    """Return the names and types of a file's columns, None where it holds no document.

    Of JSON lines the columns that are not `wanted` are not read, and have the type null; `wanted` None is all.
    """
    if suffix == ".jsonl":
        if not (given := first_columns(path)):
            return None
        names = [name for name in given if wanted is None or name in wanted]
        kinds = next(read_lines(path, names, wanted is not None)).schema
        return pa.schema([(name, kinds.field(name).type if name in names else pa.null()) for name in given])
    try:
        if suffix == ".arrow":
            table = map_arrow(path)
            return table.schema if table.num_rows else None
        with pq.ParquetFile(path) as file:
            return file.schema_arrow if file.metadata.num_rows else None
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{path}: cannot be read as {suffix}: {error}") from None


def _compare(path: Path, schema: Any, first: Path, wanted: Any, names: Sequence[str], named: bool) -> None:
    """Refuse a file whose columns `names` cannot become those of the first file, or that has more of them."""
    if schema is None:
        return
    for name in names:
        if schema.names.count(name) != 1:
            found = "are several columns" if name in schema.names else "is no column"
            raise DatasetError(f"{path}: there {found} {name!r}; {first} has one")
        kind, own = wanted.field(name).type, schema.field(name).type
        if not can_hold(kind, own):
            raise DatasetError(
                f"{path}: column {name!r} holds {own}, which cannot become {kind}, as {first} has it, unchanged; "
                "convert one of the files, or pack them apart"
            )
    more = next((name for name in schema.names if name not in names), None)
    if more is not None and not named:
        raise DatasetError(
            f"{path}: there is a column {more!r}, which {first} has not; name the columns to pack (columns), such as "
            f"{listed(names)}"
        )


def _joins(paths: Sequence[Path]) -> bool:
    """Return whether Arrow makes one table of files as they are."""
    try:
        pa.concat_tables([map_arrow(path).schema.empty_table() for path in paths])
    except pa.ArrowException:
        return False
    return True


def _alike(table: Any, schema: Any, path: Path, first: Path) -> Any:
    """Return a table in the types of the first file, which no value may change by."""
    made = []
    for field in schema:
        try:
            made.append(table.column(field.name).cast(field.type))
        except (pa.ArrowException, ValueError) as error:
            raise DatasetError(
                f"{path}: column {field.name!r} does not fit the type that {first} has, {field.type}: {error}; convert "
                "one of the files, or pack them apart"
            ) from None
    return pa.table(made, schema)


def _tables(path: Path, suffix: str, names: Sequence[str]) -> Iterator[Any]:
    try:
        if suffix == ".arrow":
            for batch in map_arrow(path).select(list(names)).to_batches(max_chunksize=AT_A_TIME):
                yield pa.Table.from_batches([batch])
            return
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(AT_A_TIME, columns=list(names)):
                yield pa.Table.from_batches([batch]).select(list(names))
    except (pa.ArrowInvalid, OSError) as error:
        raise DatasetError(f"{path}: cannot be read as {suffix}: {error}") from None

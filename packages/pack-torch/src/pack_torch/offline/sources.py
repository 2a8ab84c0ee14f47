"""Where documents lie: something that opens as an Arrow table, here or in another process, and says what it is."""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import attrs
import pyarrow as pa
from numpy.typing import NDArray

from pack_torch.offline.errors import DatasetError


class Source(Protocol):
    """Documents in Arrow memory; it can be sent to another process."""

    @property
    def rows(self) -> NDArray[Any] | None:
        """Which row of the table each document is, `[documents]`; None where document i is row i."""

    def table(self) -> Any:
        """Return the Arrow table, in place where that can be."""

    def identity(self) -> str:
        """Return a name that another content does not have, by which an interrupted write knows its documents."""


@attrs.frozen(eq=False)
class TableSource:
    """An Arrow table in memory.

    >>> TableSource(pa.table({"input_ids": [[1, 2]]})).table().num_rows
    1
    """

    held: Any
    rows: None = None

    def table(self) -> Any:
        """Return the table."""
        return self.held

    def identity(self) -> str:
        """Return a digest of all that it holds."""
        name = blake2b(str(self.held.schema).encode(), digest_size=16)
        for batch in self.held.to_batches(max_chunksize=2**16):
            name.update(batch.serialize())
        return f"table {name.hexdigest()}"


@attrs.frozen(eq=False)
class ArrowSource:
    """Arrow files of either format, mapped into memory: what is not read is not loaded.

    Attributes:
        paths: the files, in order.
        name: their identity where they stand for other files, else None.
    """

    paths: tuple[str, ...]
    name: str | None = None
    rows: None = None

    def table(self) -> Any:
        """Return their rows, one file after another.

        Raises:
            DatasetError: a file cannot be read, or has other columns or types than the first.
        """
        tables = [map_arrow(path) for path in self.paths]
        try:
            return pa.concat_tables(tables)
        except pa.ArrowException:
            first = tables[0].schema
            other = next(p for p, table in enumerate(tables) if not table.schema.equals(first))
            told = [[f"{field.name!r}: {field.type}" for field in schema] for schema in (tables[other].schema, first)]
            raise DatasetError(
                f"{self.paths[other]}: its columns are {', '.join(told[0])}, while those of {self.paths[0]} are "
                f"{', '.join(told[1])}; write both with the same columns, in the same order and types"
            ) from None

    def identity(self) -> str:
        """Return names, sizes and times of the files."""
        return self.name or identify(self.paths)


def map_arrow(path: str | Path) -> Any:
    """Return the table of an Arrow file (IPC, file or stream format) without loading it.

    Raises:
        DatasetError: the file is missing, or is no Arrow file.
    """
    try:
        memory = pa.memory_map(str(path))
    except OSError as error:
        raise DatasetError(f"{path}: cannot be opened: {error}") from None
    try:
        return pa.ipc.open_file(memory).read_all()
    except pa.ArrowInvalid:
        memory.seek(0)
    try:
        return pa.ipc.open_stream(memory).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise DatasetError(f"{path}: is no Arrow file: {error}") from None


def identify(paths: Sequence[str | Path]) -> str:
    """Return the names, sizes and times of change of files, from which a resumed write knows them.

    Raises:
        DatasetError: a file is missing.
    """
    told = []
    for path in map(Path, paths):
        try:
            known = path.stat()
        except OSError as error:
            raise DatasetError(f"{path}: {error.strerror}") from None
        told.append(f"{path.name}:{known.st_size}:{known.st_mtime_ns}")
    return " ".join(told)

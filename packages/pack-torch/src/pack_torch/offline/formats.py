"""The file formats of packed rows: how each is written a table at a time, and how many rows a file holds."""

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from pack_torch.offline.columns import listed
from pack_torch.offline.errors import DatasetError
from pack_torch.offline.sources import map_arrow

SUFFIXES = (".parquet", ".arrow", ".jsonl", ".jsonl.gz")


def format_of(path: Path) -> str:
    """Return the suffix that says the format of a folder or file; Parquet where there is none.

    Raises:
        DatasetError: the suffix is of another kind of file.

    >>> format_of(Path("packed.jsonl.gz")), format_of(Path("packed"))
    ('.jsonl.gz', '.parquet')
    """
    for suffix in SUFFIXES:
        if path.name.endswith(suffix):
            return suffix
    if path.suffix in (".json", ".csv", ".txt", ".gz", ".zst", ".feather", ".pt", ".bin"):
        raise DatasetError(f"{path} ends in {path.suffix!r}; rows are written as {listed(SUFFIXES)}")
    return ".parquet"


def write_tables(tables: Iterable[Any], path: Path, suffix: str) -> None:
    """Write tables of one schema into one file; at most one of them is held."""
    if suffix.startswith(".jsonl"):
        with path.open("wb") as raw:
            # No name and no time in the header: the same rows give the same bytes.
            stream = gzip.GzipFile("", "wb", 6, raw, mtime=0) if suffix == ".jsonl.gz" else raw
            for table in tables:
                stream.writelines(msgspec.json.encode(row) + b"\n" for row in table.to_pylist())
            if stream is not raw:
                stream.close()
        return
    writer = None
    try:
        for table in tables:
            writer = writer or _writer(path, table.schema, suffix)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def count_rows(path: Path) -> int:
    """Return the rows of a written file, -1 where it cannot be read to its end."""
    suffix = format_of(path)
    try:
        if suffix == ".parquet":
            return int(pq.read_metadata(path).num_rows)
        if suffix == ".arrow":
            return int(map_arrow(path).num_rows)
        with gzip.open(path) if suffix == ".jsonl.gz" else path.open("rb") as lines:
            return sum(1 for _ in lines)
    except (DatasetError, pa.ArrowInvalid, OSError, EOFError):
        return -1


def _writer(path: Path, schema: Any, suffix: str) -> Any:
    if suffix == ".arrow":
        return pa.ipc.new_stream(str(path), schema)  # the kind that Hugging Face datasets map into memory
    # Token ids repeat too little for dictionaries to pay: without, writing is several times faster.
    return pq.ParquetWriter(str(path), schema, compression="zstd", compression_level=1, use_dictionary=False)

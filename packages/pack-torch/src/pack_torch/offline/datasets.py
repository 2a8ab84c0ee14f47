"""`pack_dataset`: a Hugging Face dataset into packed rows, in the call that TRL's users know."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pack_torch.offline.errors import DatasetError
from pack_torch.offline.layout import Recipe
from pack_torch.offline.packed import TRACED, PackedRows, pack_source
from pack_torch.offline.sources import Source, TableSource
from pack_torch.offline.writing import write_rows

_LOG = logging.getLogger("pack_torch.offline")


@attrs.frozen(eq=False)
class DatasetSource:
    """The table of a Hugging Face dataset, which maps its files in every process that opens it.

    Attributes:
        held: `Dataset.data`.
        rows: which row of it each document is, for a dataset that was shuffled, filtered or selected from.
        name: the dataset's own fingerprint.
    """

    held: Any
    rows: NDArray[Any] | None
    name: str

    def table(self) -> Any:
        """Return the Arrow table."""
        return self.held.table

    def identity(self) -> str:
        """Return the dataset's fingerprint."""
        return f"dataset {self.name}"


def pack_dataset(
    dataset: Any,
    capacity: int,
    strategy: str = "best_fit_decreasing",
    *,
    columns: Sequence[str] | None = None,
    per_document: Sequence[str] = (),
    add: Sequence[str] = TRACED,
    overlong: str | None = None,
    max_documents: int | None = None,
    align: int = 1,
    seed: int = 0,
) -> Any:
    """Return packed rows of up to `capacity` tokens over all documents of a dataset, gathered when they are read.

    Planning looks at lengths alone and at all documents at once; nothing is copied. `write_rows` writes the rows,
    `to_dataset` makes a `datasets.Dataset` of them. What is in no row is counted by reason and logged as a warning.

    Args:
        dataset: a `datasets.Dataset`, a `DatasetDict` (each split by itself) or an Arrow table, a document a row.
        capacity: most tokens a row may hold.
        strategy: one of `pack_core.pack`, or as TRL spells them: `"bfd"` is `"best_fit_decreasing"` with documents over
            the capacity truncated, `"bfd_split"` the same with them split, `"wrapped"` is `"concat_split"`.
        columns: those joined within a row; each holds a list with one value a token. Others are left out then. None
            takes every column, and refuses one that holds no such list.
        per_document: columns carried as a list with one value a document.
        add: what each row says beside: `"seq_lengths"` (tokens of each document in it, TRL's name), `"documents"`
            (which of the dataset), `"starts"` (its first token there), `"position_ids"` (from 0 in each document).
        overlong: `"error"` (where the strategy is ours), `"drop"`, `"truncate"` or `"split"`.
        max_documents: most documents a row may hold.
        align: room is taken in steps of so many tokens by each document.
        seed: for the strategy `"fewest"`.

    Returns:
        `PackedRows`, or a dict of them by split.

    Raises:
        DatasetError: a column is unknown, holds no tokens or does not match the others in a document, which is named;
            a document is over the capacity and nothing was said about it; or the dataset is a stream.

    >>> table = pa.table({"input_ids": [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]]})
    >>> packed = pack_dataset(table, 5)
    >>> packed[:]["input_ids"], packed[:]["documents"]
    ([[1, 2, 3, 4, 5], [8, 9, 10, 6, 7], [11]], [[0], [2, 1], [3]])
    """
    recipe = Recipe.of(capacity, strategy, overlong, max_documents=max_documents, align=align, seed=seed)
    chosen: dict[str, Any] = {"columns": columns, "per_document": per_document, "add": add}
    if isinstance(dataset, Mapping):
        return {name: _logged(pack_source(_source(one), recipe, **chosen)) for name, one in dataset.items()}
    return _logged(pack_source(_source(dataset), recipe, **chosen))


def to_dataset(packed: PackedRows, folder: str | Path, *, processes: int = 1) -> Any:
    """Write packed rows to Arrow files in a folder and return them as a `datasets.Dataset` that maps the files.

    The folder's name must end in `.arrow`; a folder that holds these rows already is taken as it is.
    """
    from datasets import Dataset, concatenate_datasets

    if Path(folder).suffix != ".arrow":
        raise DatasetError(f"{folder} does not end in '.arrow', the format a dataset maps into memory")
    written = write_rows(packed, folder, processes=processes)
    return concatenate_datasets([Dataset.from_file(str(path)) for path in written.paths])


def _source(dataset: Any) -> Source:
    if isinstance(dataset, pa.Table):
        return TableSource(dataset)
    if not hasattr(dataset, "data") or not hasattr(dataset, "_fingerprint"):
        raise DatasetError(
            f"dataset is a {type(dataset).__name__}; give a datasets.Dataset, a DatasetDict or an Arrow table. A "
            "stream has no lengths to plan from: pack it on the fly"
        )
    indices = dataset._indices  # what shuffle, filter and select leave behind; no public name gives it without a copy
    rows = None if indices is None else indices.table.column(0).to_numpy().astype(np.int64)
    return DatasetSource(dataset.data, rows, str(dataset._fingerprint))


def _logged(packed: PackedRows) -> PackedRows:
    for line in packed.losses.lines():
        _LOG.warning(line)
    return packed

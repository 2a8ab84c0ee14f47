"""The same packing on Ray Data: past one machine, planned block by block or over all documents at once."""

import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import pyarrow as pa
import pyarrow.compute as pc

from pack_torch.offline.columns import as_names, choose_added, choose_columns, read_lengths
from pack_torch.offline.errors import DatasetError, NothingToPack, counted
from pack_torch.offline.kinds import is_number
from pack_torch.offline.layout import Losses, Recipe
from pack_torch.offline.packed import TRACED, Gatherer, pack_source
from pack_torch.offline.sources import ArrowSource, TableSource, map_arrow
from pack_torch.offline.writing import PART_TOKENS, tables

_LOG = logging.getLogger("pack_torch.offline")


def pack_files(
    paths: str | Path | Sequence[str | Path],
    capacity: int,
    strategy: str = "best_fit_decreasing",
    *,
    plan: str = "block",
    columns: Sequence[str] | None = None,
    per_document: Sequence[str] = (),
    add: Sequence[str] = TRACED,
    overlong: str | None = None,
    part_tokens: int = PART_TOKENS,
    ray_arguments: Mapping[str, Any] | None = None,
) -> Any:
    """Return a `ray.data.Dataset` of packed rows over the documents of Arrow files that every node can open.

    A task that dies with its worker is run again by Ray and gives the same rows: each depends on its block or part of
    the plan alone. Nothing runs before the dataset is read or written (`write_parquet` and its like).

    Args:
        paths: Arrow files, in order, or one; documents are numbered through all of them.
        capacity: most tokens a row may hold.
        strategy: as of `pack_dataset`, and so the arguments not named here.
        plan: `"block"` packs each file by itself, with a planner in every task: no step sees all documents. `"global"`
            plans on the driver from the lengths of all documents, and tasks gather parts of that plan. A file with
            nothing to pack gives no rows under either.
        part_tokens: tokens a task gathers of a global plan.
        ray_arguments: for `map_batches`, such as `{"num_cpus": 1}`.

    Raises:
        DatasetError: as `pack_dataset`, at once for a global plan, by the task that meets it for blocks. At once for
            both if there are no files, one cannot be opened, or no document of any has a token.
    """
    import ray

    recipe = Recipe.of(capacity, strategy, overlong)
    names = tuple(map(str, [paths] if isinstance(paths, str | Path) else paths))
    if not names:
        raise DatasetError("paths is empty; give one Arrow file or more")
    if plan == "global":
        packed = pack_source(ArrowSource(names), recipe, columns=columns, per_document=per_document, add=add)
        for line in packed.losses.lines():
            _LOG.warning(line)
        each = max(1, part_tokens // capacity)
        rows = packed.layout.rows
        parts = [rows.part(first, min(first + each, len(rows))) for first in range(0, len(rows), each)]
        tasks: list[dict[str, Any]] = [{"rows": pickle.dumps(part)} for part in parts]
        work: Any = _GatherPart(packed.gatherer)
    elif plan == "block":
        work = _PackFile.of(recipe, columns, per_document, add)
        tasks = _number_files(names, work)
    else:
        raise DatasetError(f"plan is {plan!r}; it must be 'block' or 'global'")
    given = ray.data.from_items(tasks, override_num_blocks=max(1, len(tasks)))  # no tasks: every document was dropped
    return given.map_batches(work, batch_size=1, batch_format="pyarrow", **dict(ray_arguments or {}))


def pack_blocks(
    dataset: Any,
    capacity: int,
    strategy: str = "best_fit_decreasing",
    *,
    columns: Sequence[str] | None = None,
    per_document: Sequence[str] = (),
    add: Sequence[str] = TRACED,
    overlong: str | None = None,
    ray_arguments: Mapping[str, Any] | None = None,
) -> Any:
    """Return a `ray.data.Dataset` with each block of another one packed by itself; `documents` count within the block.

    For documents that come out of a pipeline, a tokenizer say: lists, or one-dimensional arrays or tensors of numbers.
    What the arguments mean says `pack_dataset`; to trace rows past their block, carry a name of the document with
    `per_document`. A block with nothing to pack gives no rows, and so does a dataset of such blocks alone: no step sees
    all of it. The log of each task says what is in no row.
    """
    work = _PackTable.of(Recipe.of(capacity, strategy, overlong), columns, per_document, add)
    return dataset.map_batches(work, batch_size=None, batch_format="pyarrow", **dict(ray_arguments or {}))


@attrs.frozen(eq=False)
class _PackTable:
    """Packs one table; Ray sends it to its workers and calls it with a block."""

    recipe: Recipe
    columns: tuple[str, ...] | None
    per_document: tuple[str, ...]
    add: tuple[str, ...]

    @classmethod
    def of(
        cls, recipe: Recipe, columns: Sequence[str] | None, per_document: Sequence[str], add: Sequence[str]
    ) -> "_PackTable":
        """Return it for names as they were given, after checking them before any task runs."""
        named = None if columns is None else as_names(columns, "columns")
        return cls(recipe, named, as_names(per_document, "per_document"), choose_added(add))

    def __call__(self, table: Any) -> Iterator[Any]:
        if table.num_rows:
            with _named("a block"):
                table = _unwrap_tensors(table, self.columns, self.per_document)
                chosen, _ = choose_columns(table.schema, self.columns, self.per_document)
            yield from self.pack(table.select([*chosen, *self.per_document]), "a block", 0)

    def has_tokens(self, table: Any, name: str) -> bool:
        """Return whether there is anything to pack in a table."""
        with _named(name):
            chosen, _ = choose_columns(table.schema, self.columns, self.per_document)
            return bool(read_lengths(table, chosen).any())

    def pack(self, table: Any, name: str, first: int) -> Iterator[Any]:
        """Yield the packed rows of a table whose first document has a number."""
        chosen: dict[str, Any] = {"columns": self.columns, "per_document": self.per_document, "add": self.add}
        try:
            with _named(name):
                packed = pack_source(TableSource(table), self.recipe, **chosen)
        except NothingToPack:  # an error for a whole dataset, but not for a part of one
            _tell(Losses(empty=table.num_rows), name)
            return
        _tell(packed.losses, name)
        rows = packed.layout.rows
        for made in tables(packed.gatherer.open(), rows):
            if "documents" in self.add:
                place = made.schema.get_field_index("documents")
                lists = made.column(place).combine_chunks()
                moved = pa.ListArray.from_arrays(lists.offsets, pc.add(lists.values, first))
                made = made.set_column(place, "documents", moved)
            yield made


@attrs.frozen(eq=False)
class _PackFile(_PackTable):
    """Packs the files that rows name."""

    def __call__(self, table: Any) -> Iterator[Any]:
        for task in table.to_pylist():
            yield from self.pack(map_arrow(task["path"]), task["path"], task["first"])


@attrs.frozen(eq=False)
class _GatherPart:
    """Gathers parts of a plan over documents that it opens by itself."""

    gatherer: Gatherer

    def __call__(self, table: Any) -> Iterator[Any]:
        opened = self.gatherer.open()
        for task in table.to_pylist():
            yield from tables(opened, pickle.loads(task["rows"]))


def _number_files(names: Sequence[str], work: _PackTable) -> list[dict[str, Any]]:
    """Return a task a file, with the number of its first document; lengths are read up to a file that has any."""
    documents = [map_arrow(path).num_rows for path in names]
    if not any(work.has_tokens(map_arrow(path), path) for path in names):
        total = counted(sum(documents), "document")
        raise DatasetError(f"there is nothing to pack: {total} in {counted(len(names), 'file')}, none with a token")
    firsts = accumulate(documents, initial=0)
    return [{"path": path, "first": first} for path, first in zip(names, firsts, strict=False)]


def _unwrap_tensors(table: Any, columns: Sequence[str] | None, per_document: Sequence[str]) -> Any:
    """Return a table with lists for the one-dimensional tensors that Ray makes of arrays, in the same memory.

    Ray stores tensors of one shape as lists of their values, of several shapes as structs of such a list and a shape.

    Raises:
        DatasetError: tensors of another kind are to be packed.
    """
    packed = table.schema.names if columns is None else columns
    for place, field in enumerate(table.schema):
        rank = _rank(field.type)
        if rank is None:
            continue
        stored = [piece.storage for piece in table.column(place).chunks]
        lists = [pc.struct_field(row, "data") if pa.types.is_struct(row.type) else row for row in stored]
        if rank == 1 and is_number(lists[0].type):
            table = table.set_column(place, field.name, pa.chunked_array(lists))
        elif field.name in packed and field.name not in per_document:
            raise DatasetError(
                f"column {field.name!r} holds {field.type} a document; tensors are packed if they have one dimension "
                "and one number a token: flatten or tokenize them before, name the columns to pack without this one "
                "(columns), or carry it one value a document (per_document)"
            )
    return table


def _rank(kind: Any) -> int | None:
    """Return the dimensions of a type of tensors, Ray's or Arrow's own; None for any other type."""
    if not isinstance(kind, pa.BaseExtensionType):
        return None
    shape = getattr(kind, "shape", None)
    return getattr(kind, "ndim", None) if shape is None else len(shape)


def _tell(losses: Losses, name: str) -> None:
    for line in losses.lines():
        _LOG.warning("%s: %s", name, line)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Say in an error which file or block it is about."""
    try:
        yield
    except DatasetError as error:
        raise type(error)(f"{name}: {error}") from None

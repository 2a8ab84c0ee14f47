"""The same packing on Ray Data: past one machine, planned block by block or over all documents at once."""

import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pyarrow as pa
import pyarrow.compute as pc

from pack_torch.offline.columns import choose_columns
from pack_torch.offline.errors import DatasetError
from pack_torch.offline.layout import Recipe
from pack_torch.offline.packed import TRACED, Gatherer, pack_source
from pack_torch.offline.sources import ArrowSource, TableSource, map_arrow
from pack_torch.offline.writing import PART_TOKENS, tables

_LOG = logging.getLogger("pack_torch.offline")


def pack_files(
    paths: Sequence[str | Path],
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
        paths: Arrow files, in order; documents are numbered through all of them.
        capacity: most tokens a row may hold.
        strategy: as of `pack_dataset`, and so the arguments not named here.
        plan: `"block"` packs each file by itself, with a planner in every task: no step sees all documents. `"global"`
            plans on the driver from the lengths of all documents, and tasks gather parts of that plan.
        part_tokens: tokens a task gathers of a global plan.
        ray_arguments: for `map_batches`, such as `{"num_cpus": 1}`.

    Raises:
        DatasetError: as `pack_dataset`, at once for a global plan, by the task that meets it for blocks.
    """
    import ray

    recipe = Recipe.of(capacity, strategy, overlong)
    names = tuple(map(str, paths))
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
        documents = [map_arrow(path).num_rows for path in names]
        firsts = [sum(documents[:place]) for place in range(len(documents))]
        tasks = [{"path": path, "first": first} for path, first in zip(names, firsts, strict=True)]
        work = _PackFile(recipe, columns, tuple(per_document), tuple(add))
    else:
        raise DatasetError(f"plan is {plan!r}; it must be 'block' or 'global'")
    given = ray.data.from_items(tasks, override_num_blocks=len(tasks))
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

    For documents that come out of a pipeline, a tokenizer say. What the arguments mean says `pack_dataset`; to trace
    rows past their block, carry a name of the document with `per_document`.
    """
    work = _PackTable(Recipe.of(capacity, strategy, overlong), columns, tuple(per_document), tuple(add))
    return dataset.map_batches(work, batch_size=None, batch_format="pyarrow", **dict(ray_arguments or {}))


@attrs.frozen(eq=False)
class _PackTable:
    """Packs one table; Ray sends it to its workers and calls it with a block."""

    recipe: Recipe
    columns: Sequence[str] | None
    per_document: tuple[str, ...]
    add: tuple[str, ...]

    def __call__(self, table: Any) -> Iterator[Any]:
        if table.num_rows:
            chosen, _ = choose_columns(table.schema, self.columns, self.per_document)
            yield from self.pack(table.select([*chosen, *self.per_document]), "a block", 0)

    def pack(self, table: Any, name: str, first: int) -> Iterator[Any]:
        """Yield the packed rows of a table whose first document has a number."""
        chosen: dict[str, Any] = {"columns": self.columns, "per_document": self.per_document, "add": self.add}
        try:
            packed = pack_source(TableSource(table), self.recipe, **chosen)
        except DatasetError as error:
            raise DatasetError(f"{name}: {error}") from None
        for line in packed.losses.lines():
            _LOG.warning("%s: %s", name, line)
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

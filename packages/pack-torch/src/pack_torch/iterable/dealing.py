"""Whose rows are whose: a source dealt out to all readers, row by row, or by groups of neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pack_core.errors import PackError
from pack_core.lengths import as_identity
from torch.utils.data import IterableDataset

from pack_torch.formats.columns import Row
from pack_torch.iterable.readers import IndexReader, IterableReader, Reader, Rows
from pack_torch.iterable.shard import Shard


class GroupReader:
    """Every `count`-th group of neighbours of a reader that goes through all rows.

    >>> rows = [{"pair": number // 2, "n": number} for number in range(6)]
    >>> reader = GroupReader(IndexReader(rows, Shard()), 1, 2, "pair")
    >>> reader.start(0)
    >>> [row["n"] for row in reader.read(9)[0]]
    [2, 3]
    """

    def __init__(self, inner: Reader, index: int, count: int, field: str) -> None:
        """Read nothing yet; a row without a value in `field` is a group of its own."""
        self._inner, self._index, self._count, self._field = inner, index, count, field
        self.replays, self.sized, self.alone, self.names = inner.replays, inner.sized, inner.alone, inner.names
        self._number = -1
        self._value: str | int | None = None

    def start(self, epoch: int) -> None:
        """Go to the first row."""
        self._inner.start(epoch)
        self._number, self._value = -1, None

    def read(self, count: int) -> Rows:
        """Return the next rows."""
        rows: list[Row] = []
        while len(rows) < count:
            wanted = count - len(rows)
            some = self._inner.read(wanted)[0]
            rows += [row for row in some if self._is_own(row)]
            if len(some) < wanted:
                break
        return rows, None

    def _is_own(self, row: Row) -> bool:
        if not hasattr(row, "get"):
            raise PackError(f"the source gives one {type(row).__name__}, but rows have fields, one of them the group")
        value = row.get(self._field)
        if value is not None:
            value = as_identity(value, f"group, in field {self._field!r},")
        if value is None or value != self._value:
            self._number, self._value = self._number + 1, value
        return self._number % self._count == self._index

    def state(self) -> list[Any]:
        """Return where the other is, and the group it is in."""
        return [self._inner.state(), self._number, self._value]

    def load(self, state: Any) -> None:
        """Go on from there."""
        own, self._number, self._value = state
        self._inner.load(own)


def open_leaf(source: Any, shard: Shard, deals: str | None, first: dict[int, Any], group: str | None = None) -> Reader:
    """Return the reader of one source; `deals` is `PackedIterable`'s `source_shards`.

    `first` remembers the first state of sources that were read before. With a `group` all rows are gone through, and
    neighbours that are alike in this field are dealt out together.

    Raises:
        PackError: it cannot be dealt out to the readers, or is no source.
    """
    if isinstance(source, Mapping) and all(isinstance(name, str) for name in source):
        some = ", ".join([*source][:3]) + (", ..." if len(source) > 3 else "")
        raise PackError(f"the source is one {type(source).__name__} of {some}; give one of them, or mix them")
    if not isinstance(source, IterableDataset) and hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        if group is None or shard.count == 1:
            return IndexReader(source, shard)
        return GroupReader(IndexReader(source, Shard()), shard.index, shard.count, group)
    if not isinstance(source, Iterable):
        raise PackError(
            f"the source is one {type(source).__name__}; give an iterable of rows, or what has a length and an index"
        )
    shards = getattr(source, "num_shards", None)
    in_files = isinstance(shards, int) and callable(getattr(source, "shard", None))
    if deals is None and in_files:
        if group is not None and shard.count > 1:
            raise PackError(
                f"the source deals out its {shards} files, and a group={group!r} over two files would be torn apart; "
                "say source_shards='workers' where no group is, or put a whole group into each row"
            )
        return _open_files(source, shards or 0, shard, first)
    if deals is None and isinstance(source, IterableDataset) and shard.workers > 1:
        raise PackError(
            f"{type(source).__name__} is an IterableDataset, read by {shard.workers} workers, and cannot tell whether "
            "it deals its rows out to them; say source_shards='workers' if it does, or 'nothing' if every worker "
            "sees all rows"
        )
    if deals == "workers":
        return _dealt(source, shard.rank, shard.world, first, group)
    return _dealt(source, shard.index, shard.count, first, group)


def _dealt(source: Any, index: int, count: int, first: dict[int, Any], group: str | None) -> Reader:
    if group is None or count == 1:
        return IterableReader(source, index, count, first)
    return GroupReader(IterableReader(source, 0, 1, first), index, count, group)


def _open_files(source: Any, shards: int, shard: Shard, first: dict[int, Any]) -> Reader:
    """Return the reader of a Hugging Face streaming dataset, which deals its files out to workers by itself."""
    if shard.world == 1:
        return IterableReader(source, 0, 1, first)
    if shards >= shard.world:
        return IterableReader(source.shard(num_shards=shard.world, index=shard.rank), 0, 1, {})
    if shard.workers == 1:
        return IterableReader(source, shard.rank, shard.world, first)
    raise PackError(
        f"the source is in {shards} files, which it deals out to workers by itself, so they cannot be dealt to "
        f"{shard.world} ranks as well; have at least as many files as ranks, or no more than one worker"
    )

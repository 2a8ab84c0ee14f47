"""Reading a source some rows at a time, from where one left off: by index, by the source's own state, or by replay."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from pack_core.errors import PackError, RecordError

from pack_torch.formats.columns import Row
from pack_torch.iterable.shard import Shard

#: Rows, and of each the number of the dataset it is from; None: all are of the first.
Rows = tuple[list[Row], Sequence[int] | None]


class Reader(Protocol):
    """Rows in order. One epoch after the other is started, read to its end, and never beyond."""

    #: Whether `load` has to read everything again.
    replays: bool
    #: Whether it reads what is there already, so that reading on never waits for whoever uses what was read.
    sized: bool
    #: Whether its source keeps its own place, so that only one may read it at a time.
    alone: bool
    #: Of the datasets it reads.
    names: tuple[str, ...]

    def start(self, epoch: int) -> None:
        """Go to the first row of an epoch."""

    def read(self, count: int) -> Rows:
        """Return the next rows; fewer than `count` only at the end of the epoch."""

    def state(self) -> Any:
        """Return where it is, as what JSON holds; it does not change afterwards."""

    def load(self, state: Any) -> None:
        """Go to where `state` was taken."""


class IndexReader:
    """Every `count`-th row of what has a length and takes an index.

    >>> reader = IndexReader([{"n": number} for number in range(5)], Shard(rank=1, world=2))
    >>> reader.start(0)
    >>> reader.read(9), reader.state()
    (([{'n': 1}, {'n': 3}], None), 2)
    """

    replays, sized, alone = False, True, False
    names: tuple[str, ...] = ("0",)

    def __init__(self, source: Any, shard: Shard) -> None:
        """Read nothing yet."""
        self._source, self._shard = source, shard
        self._size = len(range(shard.index, len(source), shard.count))
        self._next = 0

    def start(self, epoch: int) -> None:
        """Go to the first row."""
        self._next = 0

    def read(self, count: int) -> Rows:
        """Return the next rows."""
        stop = min(self._next + count, self._size)
        first, step = self._shard.index, self._shard.count
        places = range(first + self._next * step, first + stop * step, step)
        self._next = stop
        if type(self._source) is list:
            return self._source[places.start : places.stop : step], None
        many = getattr(self._source, "__getitems__", None)
        rows = list(many(list(places)) if callable(many) else map(self._source.__getitem__, places))
        if len(rows) != len(places):
            raise PackError(
                f"the source has {len(self._source):,} rows by its length and gave {len(rows):,} for {len(places):,} "
                f"places from {places.start:,} on; mend its __getitem__, or its __len__"
            )
        return rows, None

    def state(self) -> int:
        """Return how many rows were read."""
        return self._next

    def load(self, state: Any) -> None:
        """Go on after so many rows."""
        if not isinstance(state, int) or not 0 <= state <= self._size:
            raise RecordError(f"the source has {self._size:,} rows for this shard, but {state!r} were read; it changed")
        self._next = state


class IterableReader:
    """Every `count`-th row of what can only be gone through.

    A source with `state_dict` and `load_state_dict` goes on from its state; others are gone through again, with a
    warning that says so.
    """

    sized = False
    names: tuple[str, ...] = ("0",)

    def __init__(self, source: Any, index: int, count: int, first: dict[int, Any]) -> None:
        """Read nothing yet; `first` has the first state of every source that was read before."""
        self._source, self._index, self._count = source, index, count
        self._stateful = all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))
        self.replays, self.alone = not self._stateful, self._stateful
        self._firsts, self._once = first, id(source) in first
        self._rows: Iterator[Row] = iter(())
        self._read = self._epoch = 0
        self._over = False
        self._begun: list[Any] = []  # the state it was opened in, until a row is read: a generator does not know yet

    def start(self, epoch: int) -> None:
        """Go to the first row."""
        self._set_epoch(epoch)
        if self._stateful and self._once:
            self._source.load_state_dict(copy.deepcopy(self._firsts[id(self._source)]))
        self._rows = self._opened()
        self._begun = [self._firsts[id(self._source)]]

    def _set_epoch(self, epoch: int) -> None:
        self._epoch, of_epoch = epoch, getattr(self._source, "set_epoch", None)
        if callable(of_epoch):
            of_epoch(epoch)

    def _remember(self) -> None:
        """Keep the first state of the source, unless it was read before."""
        if id(self._source) not in self._firsts:
            self._firsts[id(self._source)] = copy.deepcopy(self._source.state_dict()) if self._stateful else None

    def _opened(self) -> Iterator[Row]:
        self._remember()
        rows: Iterator[Row] = iter(self._source)
        if rows is self._source and self._once and not self._stateful:
            raise PackError(
                "the source is an iterator, which can be gone through once, and a second time was asked for; give "
                "something that can be iterated again, such as an object whose __iter__ makes a new iterator"
            )
        self._once, self._read, self._over = True, 0, False
        return rows

    def read(self, count: int) -> Rows:
        """Return the next rows."""
        if count:
            self._begun = []
        if self._count == 1:
            rows = list(islice(self._rows, count))
            self._read += len(rows)
            self._over = len(rows) < count
            return rows, None
        rows = []
        while len(rows) < count:
            block = list(islice(self._rows, (count - len(rows)) * self._count))
            rows += block[(self._index - self._read) % self._count :: self._count]
            self._read += len(block)
            if not block:
                self._over = True
                break
        return rows, None

    def state(self) -> list[Any]:
        """Return the epoch, how many rows of all shards were gone through, the source's own state, and if it ended."""
        own = self._begun or [self._source.state_dict() if self._stateful else None]
        return [self._epoch, self._read, copy.deepcopy(own[0]), self._over]

    def load(self, state: Any) -> None:
        """Go on from there."""
        epoch, read, own, over = state
        self._set_epoch(epoch)
        self._remember()
        if over:  # it may be back at its first row by itself, which is not to be read before the next epoch
            self._rows, self._begun, self._once, self._over = iter(()), [own], True, True
        elif self._stateful:
            self._source.load_state_dict(copy.deepcopy(own))
            self._rows, self._begun = self._opened(), [own]
        else:
            self._rows = self._opened()
            if read:
                warnings.warn(
                    f"the source has neither an index nor a state, so its first {read:,} rows are read again to go on "
                    "after them; that takes as long as it took, and is exact only if they come the same way",
                    stacklevel=2,
                )
            skipped = sum(1 for _ in islice(self._rows, read))
            if skipped < read:
                raise RecordError(f"the source had {read:,} rows and now has {skipped:,}; it changed, or was read from")
        self._read = read

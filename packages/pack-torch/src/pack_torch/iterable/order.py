"""The order of rows: shuffled in a buffer, mixed of several datasets, repeated over epochs. All can be resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import attrs
import numpy as np
from numpy.typing import NDArray
from pack_core.errors import PackError
from pack_core.lengths import LARGEST, as_integer

from pack_torch.formats.columns import Row
from pack_torch.iterable.dealing import open_leaf
from pack_torch.iterable.readers import Reader, Rows
from pack_torch.iterable.shard import Shard

Stop = Literal["first_exhausted", "all_exhausted", "drain", "never"]

_STEP = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def words(seed: int, first: int, count: int) -> NDArray[np.uint64]:
    """Return random numbers `first` up to `first + count` of a seed: SplitMix64, the same everywhere.

    >>> hex(int(words(0, 0, 1)[0]))
    '0xe220a8397b1dcdaf'
    """
    start = np.uint64((seed + (first + 1) * _STEP) & _MASK)
    z = start + np.arange(count, dtype=np.uint64) * np.uint64(_STEP)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


def _seed_of(seed: int, *places: int) -> int:
    """Return another seed for each place."""
    for place in places:
        seed = int(words(seed ^ 0x5851F42D4C957F2D, place & 0xFFFFFFFF, 1)[0])
    return seed


@attrs.frozen(eq=False)
class Shuffled:
    """A source to be read in a shuffled order, see `shuffle`."""

    source: Any
    buffer: int
    seed: int


@attrs.frozen(eq=False)
class Mixed:
    """Sources to be read by turns drawn at random, see `mix`."""

    sources: tuple[Any, ...]
    names: tuple[str, ...]
    weights: tuple[float, ...]
    stop: Stop
    seed: int


def shuffle(source: Any, buffer: int = 1_000, *, seed: int = 0) -> Shuffled:
    """Return a source whose rows come shuffled: `buffer` are read, and given in a random order, then the next.

    Another order every epoch. To resume reads at most one buffer again. A buffer as large as the source is a full
    shuffle.

    Raises:
        PackError: the buffer holds nothing.

    >>> from pack_torch import PackedIterable, Sft
    >>> rows = [{"input_ids": [number]} for number in range(6)]
    >>> dataset = PackedIterable(shuffle(rows, 6), format=Sft(label_mode="tokens"), capacity=6)
    >>> next(iter(dataset))["input_ids"].tolist()
    [0, 5, 4, 3, 1, 2]
    """
    return Shuffled(source, as_integer(buffer, "buffer"), as_integer(seed, "seed", least=-LARGEST))


def mix(
    datasets: Mapping[str, Any] | Sequence[Any],
    weights: Sequence[float] | None = None,
    *,
    stop: Stop = "first_exhausted",
    seed: int = 0,
) -> Mixed:
    """Return a source of rows of several datasets, each row's dataset drawn with these weights.

    Args:
        datasets: sources; by name, or their numbers are their names in metrics.
        weights: one each, above 0; only their ratios matter, and they count rows, not tokens. None: equal ones.
        stop: `first_exhausted`: once one that is drawn has no more row. `all_exhausted`: once that has happened to
            each; they start over until then. `drain`: each is read once, and the others keep their ratios when one has
            ended. `never`: all start over.
        seed: of the draws.

    Raises:
        PackError: weights that are none, or no such policy.

    >>> from pack_torch import PackedIterable, Sft
    >>> one, two = ([{"input_ids": [number]} for number in numbers] for numbers in (range(3), range(10, 16)))
    >>> both = mix({"one": one, "two": two}, [1, 2], stop="drain")
    >>> next(iter(PackedIterable(both, format=Sft(label_mode="tokens"), capacity=9)))["input_ids"].tolist()
    [10, 11, 12, 13, 0, 14, 1, 15, 2]
    """
    named = datasets if isinstance(datasets, Mapping) else {str(at): one for at, one in enumerate(datasets)}
    given = tuple(float(weight) for weight in weights) if weights is not None else (1.0,) * len(named)
    if not named or len(given) != len(named) or not all(0 < weight < float("inf") for weight in given):
        raise PackError(f"weights are {given} for {len(named)} datasets; give each one above 0, or leave it out")
    if stop not in get_args(Stop):
        raise PackError(f"stop is {stop!r}; it must be one of {', '.join(map(repr, get_args(Stop)))}")
    return Mixed(tuple(named.values()), tuple(map(str, named)), given, stop, as_integer(seed, "seed", least=-LARGEST))


def open_reader(
    source: Any, shard: Shard, deals: str | None, first: dict[int, Any], group: str | None = None
) -> Reader:
    """Return the reader of a source: dealt out first, then shuffled, then mixed; with a `group`, dealt out by it.

    Raises:
        PackError: there is a group, and rows are moved one by one, away from their neighbours.
    """
    if group is not None and isinstance(source, (Mixed, Shuffled)):
        moves = "mix" if isinstance(source, Mixed) else "shuffle"
        raise PackError(
            f"group={group!r} keeps neighbours together, and {moves} moves rows one by one; give a source whose groups "
            "are in their order already, or put a whole group into each row, as Preference and SharedPrompt do"
        )
    if isinstance(source, Mixed):
        return MixedReader(source, [open_reader(one, shard, deals, first) for one in source.sources])
    if isinstance(source, Shuffled):
        return ShuffledReader(source, open_reader(source.source, shard, deals, first), shard.index)
    return open_leaf(source, shard, deals, first, group)


class ShuffledReader:
    """Buffers of rows, each in an order of its own."""

    def __init__(self, how: Shuffled, inner: Reader, index: int) -> None:
        """Read nothing yet."""
        self._how, self._inner, self._index = how, inner, index
        self.replays, self.sized, self.alone, self.names = inner.replays, inner.sized, inner.alone, inner.names
        self._start_from(0, 0)

    def _start_from(self, epoch: int, filled: int) -> None:
        self._epoch, self._filled, self._given = epoch, filled, 0
        self._rows: list[Row] = []
        self._kinds: list[int] | None = None
        self._before: Any = None

    def start(self, epoch: int) -> None:
        """Go to the first row."""
        self._inner.start(epoch)
        self._start_from(epoch, 0)

    def _fill(self) -> None:
        self._before = self._inner.state()
        rows, kinds = self._inner.read(self._how.buffer)
        seed = _seed_of(self._how.seed, self._epoch, self._index, self._filled)
        order = np.argsort(words(seed, 0, len(rows)), kind="stable").tolist()
        self._rows = [rows[place] for place in order]
        self._kinds = None if kinds is None else [kinds[place] for place in order]
        self._filled, self._given = self._filled + 1, 0

    def read(self, count: int) -> Rows:
        """Return the next rows."""
        rows: list[Row] = []
        kinds: list[int] = []
        while len(rows) < count:
            if self._given == len(self._rows):
                self._fill()
                if not self._rows:
                    break
            stop = self._given + count - len(rows)
            rows += self._rows[self._given : stop]
            kinds += self._kinds[self._given : stop] if self._kinds is not None else []
            self._given = min(stop, len(self._rows))
        return rows, kinds if self._kinds is not None else None

    def state(self) -> list[Any]:
        """Return the epoch, the buffers before this one, the rows given of it, and where it was read."""
        if self._given == len(self._rows):
            return [self._epoch, self._filled, 0, self._inner.state()]
        return [self._epoch, self._filled - 1, self._given, self._before]

    def load(self, state: Any) -> None:
        """Fill the same buffer again."""
        epoch, filled, given, before = state
        self._inner.load(before)
        self._start_from(epoch, filled)
        if given:
            self._fill()
            self._given = given


class MixedReader:
    """Rows of several readers, by draws that depend on nothing but their number."""

    def __init__(self, how: Mixed, inner: Sequence[Reader]) -> None:
        """Read nothing yet."""
        self._how, self._inner = how, inner
        self.replays, self.names = any(one.replays for one in inner), how.names
        self.sized, self.alone = all(one.sized for one in inner), any(one.alone for one in inner)
        for one, name in zip(inner, how.names, strict=True):
            if len(one.names) > 1:
                raise PackError(f"dataset {name!r} is mixed itself; mix all datasets at once, with weights multiplied")
        self._bounds = np.cumsum(how.weights) / sum(how.weights)
        self._reset(0)

    def _reset(self, epoch: int) -> None:
        self._epoch, self._drawn, self._over = epoch, 0, False
        self._epochs, self._ended = [epoch] * len(self._inner), [False] * len(self._inner)

    def start(self, epoch: int) -> None:
        """Go to the first row."""
        self._reset(epoch)
        for one in self._inner:
            one.start(epoch)

    def read(self, count: int) -> Rows:
        """Return the next rows."""
        rows: list[Row] = []
        kinds: list[int] = []
        while len(rows) < count and not self._over:
            draws = words(_seed_of(self._how.seed, self._epoch), self._drawn, count - len(rows)) / 2.0**64
            chosen = np.searchsorted(self._bounds, draws, side="right").clip(max=len(self._inner) - 1)
            more, of = self._serve(chosen)
            rows += more
            kinds += of
            self._drawn += len(chosen)
        return rows, kinds

    def _serve(self, chosen: NDArray[np.intp]) -> tuple[list[Row], list[int]]:
        """Return the rows of these draws, up to where the policy says to stop."""
        served: list[Row | None] = [None] * len(chosen)
        stops: list[int] = []
        for kind, reader in enumerate(self._inner):
            places = (chosen == kind).nonzero()[0].tolist()
            rows = [] if self._ended[kind] and self._how.stop == "drain" else reader.read(len(places))[0]
            if len(rows) < len(places) and not self._ended[kind]:
                self._ended[kind] = True
                stops.append(places[len(rows)])
            if self._how.stop in ("all_exhausted", "never"):
                rows += self._again(kind, len(places) - len(rows))
            for place, row in zip(places, rows, strict=False):
                served[place] = row
        stop = len(chosen)
        if self._how.stop == "first_exhausted" and stops:
            self._over, stop = True, min(stops)
        elif self._how.stop == "all_exhausted" and stops and all(self._ended):
            self._over, stop = True, max(stops)
        elif self._how.stop == "drain" and all(self._ended):
            self._over = True
        there = [(row, kind) for row, kind in zip(served[:stop], chosen.tolist(), strict=False) if row is not None]
        return [row for row, _ in there], [kind for _, kind in there]

    def _again(self, kind: int, count: int) -> list[Row]:
        """Return rows of a dataset that starts over, as often as it takes."""
        rows: list[Row] = []
        while len(rows) < count:
            self._epochs[kind] += 1
            self._inner[kind].start(self._epochs[kind])
            more = self._inner[kind].read(count - len(rows))[0]
            if not more:
                raise PackError(f"dataset {self.names[kind]!r} has no rows for this shard, so it cannot start over")
            rows += more
        return rows

    def state(self) -> list[Any]:
        """Return how much was drawn, which datasets have ended, and where each is."""
        own = [one.state() for one in self._inner]
        return [self._epoch, self._drawn, self._over, [*self._epochs], [*self._ended], own]

    def load(self, state: Any) -> None:
        """Go on from there."""
        self._epoch, self._drawn, self._over, epochs, ended, own = state
        self._epochs, self._ended = [*epochs], [*ended]
        for one, where in zip(self._inner, own, strict=True):
            one.load(where)


class Repeated:
    """Some epochs of a reader, one after another, as if they were one.

    >>> reader = Repeated(open_leaf([{"n": 1}, {"n": 2}], Shard(), None, {}), 2)
    >>> reader.start(0)
    >>> [row["n"] for row in reader.read(9)[0]]
    [1, 2, 1, 2]
    """

    def __init__(self, inner: Reader, epochs: int | None) -> None:
        """Read nothing yet; None is for ever."""
        self._inner, self._epochs = inner, epochs
        self.replays, self.sized, self.alone, self.names = inner.replays, inner.sized, inner.alone, inner.names
        self.first = self.epoch = 0
        #: Of the rows read last: where an epoch begins among them, and which.
        self.begins: list[tuple[int, int]] = []

    def start(self, epoch: int) -> None:
        """Go to the first row."""
        self.first = self.epoch = epoch
        self._inner.start(epoch)

    def read(self, count: int) -> Rows:
        """Return the next rows."""
        rows, kinds = self._inner.read(count)
        fresh, self.begins = False, []
        while len(rows) < count and (self._epochs is None or self.epoch + 1 < self.first + self._epochs):
            self.epoch += 1
            self.begins.append((len(rows), self.epoch))
            self._inner.start(self.epoch)
            more, of = self._inner.read(count - len(rows))
            if not more and fresh:
                raise PackError("the source has no rows for this shard, so there is nothing to repeat")
            fresh = not more
            rows = [*rows, *more]
            kinds = None if kinds is None or of is None else [*kinds, *of]
        return rows, kinds

    def state(self) -> list[Any]:
        """Return the epochs and where it is."""
        return [self.first, self.epoch, self._inner.state()]

    def load(self, state: Any) -> None:
        """Go on from there."""
        self.first, self.epoch, own = state
        self._inner.load(own)

"""Blocks of documents read, pushed and packed in one go, each from nothing but the mark before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from pack_core import stream
from pack_core.errors import PackError, RecordError
from pack_core.stream import Counts, Documents, StreamOptions, StreamPack, StreamState, Tally

from pack_torch.formats.columns import Row
from pack_torch.formats.cutting import split_row, truncate_row
from pack_torch.formats.encoded import Encoded
from pack_torch.formats.format import Format
from pack_torch.iterable.mark import Mark
from pack_torch.iterable.order import Repeated
from pack_torch.iterable.setup import CUTTING

#: Most packs that a format is given to lay out at once.
_AT_ONCE = 16


@attrs.frozen(eq=False)
class Block:
    """Packs that closed because of one block of documents, with the rows of each, and what is known about it."""

    mark: Mark
    after: Mark
    packs: Sequence[StreamPack]
    rows: Sequence[list[Row]]
    info: Mapping[str, int]

    def encoded(self, format: Format, first: int) -> Sequence[Encoded]:
        """Return packs from one on as the format lays them out: that one, and those after it that it does at once.

        Raises:
            PackError: the format gives none, or too many.
            Exception: what the format raises, with a note that says for which documents.
        """
        packs = self.rows[first : first + _AT_ONCE]
        try:
            laid = format.encode_some(packs)
        except Exception as error:
            keys = ", ".join(map(str, self.packs[first].keys))
            error.add_note(f"in the pack of documents {keys}, counted from 0 as this reader reads them")
            if isinstance(error, StopIteration):  # it would end the iteration without a word
                raise RuntimeError(f"{type(format).__name__} or a row raised StopIteration") from error
            raise
        if not 0 < len(laid) <= len(packs):
            raise PackError(
                f"{type(format).__name__}.encode_some gave {len(laid):,} packs of {len(packs):,}; it must give the "
                "first of them, or more of them"
            )
        return laid


@attrs.frozen(eq=False)
class _Read:
    """Rows of one block as they go into the stream, and what is to be told of them as they came.

    Args:
        rows: those that were too long cut by the format, if they must not be cut everywhere.
        lengths: of these.
        kinds: the number of the dataset of each; None: all are of the first.
        lengths_before: of the rows as they came.
        kinds_before: theirs.
        groups: of the rows, those of later epochs under names of their own; None: there are no groups.
        ended: whether there are no more.
        trims: of every row that the format cut: the reason, the tokens lost or cut, and the pieces.
    """

    rows: Sequence[Row]
    lengths: list[int]
    kinds: Sequence[int] | None
    lengths_before: list[int]
    kinds_before: Sequence[int] | None
    groups: Sequence[int | str | None] | None
    ended: bool
    trims: Sequence[tuple[str, int, int]] = ()


class Blocks:
    """Makes one block after the other."""

    def __init__(
        self, reader: Repeated, options: StreamOptions, format: Format, *, block: int, group: str | None
    ) -> None:
        """Open the stream; the reader stands where it is to begin."""
        self._reader, self._options, self._format = reader, options, format
        self._size, self._group = block, group
        self._stream = stream.open_stream(options)
        self._made = 0
        self._rows: dict[int, Row] = {}
        self._places: deque[tuple[int, Any]] = deque()
        self._told: dict[str, int] = {}

    @property
    def sized(self) -> bool:
        """Whether the next block can be made before the last one was used."""
        return self._reader.sized

    @property
    def alone(self) -> bool:
        """Whether the source may be read by nobody else meanwhile."""
        return self._reader.alone

    def mark(self) -> Mark:
        """Return where the next block begins."""
        now = self._reader.state()
        oldest = min(self._rows, default=self._made)
        while len(self._places) > 1 and self._places[1][0] <= oldest:
            self._places.popleft()
        if not self._rows:
            self._places.clear()
        first, reader = self._places[0] if self._places else (self._made, now)
        return Mark(reader, first, now, self._made, self._stream, dict(self._told))

    def load(self, mark: Mapping[str, Any]) -> None:
        """Go to where a mark was taken: read the rows of all that waits again.

        Raises:
            RecordError: the source gives other rows than it did.
        """
        self._stream = StreamState.from_text(mark["stream"])
        self._told, self._made = dict(mark["told"]), mark["first"]
        state = self._stream
        held = {part.key: part for part in state.parts}
        self._reader.load(mark["reader"])
        while self._made < mark["made"]:
            first = self._made
            lengths = self._read().lengths
            for key in held.keys() & range(first, self._made):
                if lengths[key - first] < held[key].stop:
                    raise RecordError(
                        f"document {key} had at least {held[key].stop:,} tokens and now has {lengths[key - first]:,}; "
                        "the source is not what it was, so it cannot be gone on with exactly"
                    )
            self._keep(held)
            if self._made == first:
                break
        if self._made != mark["made"] or held.keys() - self._rows.keys():
            raise RecordError(
                f"the source gave {mark['made']:,} documents up to here and now gives {self._made:,}; it changed"
            )

    def _keep(self, held: Mapping[int, Any]) -> None:
        rows = self._rows
        self._rows = {key: rows[key] for key in held if key in rows}

    def _read(self) -> _Read:
        """Read a block; rows that are too long and must not be cut everywhere are cut by the format."""
        self._places.append((self._made, self._reader.state()))
        epoch = self._reader.epoch
        rows, kinds = self._reader.read(self._size)
        lengths = self._lengths(rows)
        found = _Read(rows, lengths, kinds, lengths, kinds, self._groups(rows, epoch), ended=len(rows) < self._size)
        if lengths and max(lengths) > self._options.capacity and self._options.overlong in CUTTING:
            found = self._trim(found)
        self._rows.update(zip(range(self._made, self._made + len(found.rows)), found.rows, strict=True))
        self._made += len(found.rows)
        return found

    def _lengths(self, rows: Sequence[Row]) -> list[int]:
        try:
            return self._format.lengths(rows)
        except (KeyError, TypeError, AttributeError):
            for number, row in enumerate(rows, self._made):
                _check_row(self._format, row, number)
            raise

    def _groups(self, rows: Sequence[Row], epoch: int) -> list[int | str | None] | None:
        """Return the group of each row; the same one in two epochs is two."""
        if self._group is None:
            return None
        begins, groups = dict(self._reader.begins), []
        for place, row in enumerate(rows):
            epoch, group = begins.get(place, epoch), row.get(self._group)
            later = group is not None and epoch > self._reader.first
            groups.append(f"{group}, epoch {epoch + 1}" if later else group)
        return groups

    def _trim(self, read: _Read) -> _Read:
        """Let the format cut overlong rows that must not be cut everywhere; all others the stream cuts."""
        capacity, overlong, format = self._options.capacity, self._options.overlong, self._format
        made: list[tuple[Row, int, int | str | None]] = []
        trims: list[tuple[str, int, int]] = []
        count = len(read.rows)
        whole = zip(read.rows, read.lengths, read.kinds or [0] * count, read.groups or [None] * count, strict=True)
        for row, length, kind, group in whole:
            if length <= capacity or not format.spans(row):
                made.append((row, kind, group))
            elif overlong == "split":
                pieces = split_row(format, row, capacity)
                made += [(piece, kind, group) for piece in pieces]
                trims.append(("overlong", length, len(pieces)))
            else:
                side = "right" if overlong == "truncate" else "left"
                short = truncate_row(format, row, capacity, side=side)  # type: ignore[arg-type]  # one of the two
                made.append((short, kind, group))
                trims.append(("truncated", length - format.length(short), 1))
        rows = [row for row, _, _ in made]
        kinds = None if read.kinds is None else [kind for _, kind, _ in made]
        groups = None if read.groups is None else [group for _, _, group in made]
        lengths = format.lengths(rows)
        return attrs.evolve(read, rows=rows, lengths=lengths, kinds=kinds, groups=groups, trims=trims)

    def next(self) -> Block | None:
        """Return the next block, None after the last.

        Raises:
            PackError: what the stream, the source or the format refuses.
        """
        if self._stream.finished:
            return None
        mark = self.mark()
        if not self._rows:
            self._places.clear()
        first, read = self._made, self._read()
        packs: list[StreamPack] = []
        state = self._stream
        if read.lengths:
            state, packs = stream.push_many(self._options, state, self._documents(first, read))
        if read.trims:
            state = state.counting(_trimmed(state.counts, read.trims))
        if read.ended:
            state, last = stream.finish(self._options, state)
            packs = [*packs, *last]
        rows = self._rows
        laid = [self._laid(pack, rows) for pack in packs]
        info = self._info(read.lengths_before, read.kinds_before, state.counts)
        self._told = {} if packs else info
        self._stream = state
        self._keep(dict.fromkeys(part.key for part in state.parts))
        return Block(mark, self.mark(), packs, laid, info | {"waiting": len(self._rows)})

    def _documents(self, first: int, read: _Read) -> Documents:
        keys = range(first, first + len(read.rows))
        costs = None if self._options.max_cost is None else list(map(self._format.cost, read.rows))
        return Documents(keys, read.lengths, groups=read.groups, costs=costs, kinds=read.kinds)

    def _laid(self, pack: StreamPack, rows: Mapping[int, Row]) -> list[Row]:
        """Return the rows of a pack, cut where the stream said so."""
        laid = [rows[key] for key in pack.keys]
        if any(pack.starts) or self._options.cuts or self._options.overlong in CUTTING:
            for place, (start, stop) in enumerate(zip(pack.starts, pack.stops, strict=True)):
                if start or stop < self._format.length(laid[place]):
                    laid[place] = self._format.cut(laid[place], start, stop)
        return laid

    def _info(self, lengths: Sequence[int], kinds: Sequence[int] | None, counts: Counts) -> dict[str, int]:
        """Return what this block adds to all counts, on top of what no pack has carried yet."""
        info = dict(self._told)

        def add(name: str, value: int) -> None:
            if value:
                info[name] = info.get(name, 0) + value

        sizes = np.asarray(lengths, np.int64)
        of = np.zeros(len(sizes), np.int64) if kinds is None else np.asarray(kinds, np.int64)
        documents = np.bincount(of, minlength=len(self._reader.names)).tolist()
        tokens = np.bincount(of, weights=sizes, minlength=len(self._reader.names)).tolist()
        for name, some, many in zip(self._reader.names, documents, tokens, strict=True):
            add(f"consumed_documents/{name}", some)
            add(f"consumed_tokens/{name}", int(many))
        for place, some in enumerate(np.bincount(length_classes(sizes)).tolist()):
            add(f"lengths/{place}", some)
        before = self._stream.counts
        for name, now, then in (("lost", counts.lost, before.lost), ("cut", counts.cut, before.cut)):
            for reason, tally in now.items():
                was = then.get(reason, Tally())
                add(f"{name}_documents/{reason}", tally.documents - was.documents)
                add(f"{name}_tokens/{reason}", tally.tokens - was.tokens)
        info["epochs"] = self._reader.epoch + 1
        return info


def length_classes(lengths: Any) -> Any:
    """Return the class of each length: 0 for none, else four to an octave, class c up to 2^(c / 4) tokens.

    >>> length_classes(np.array([0, 1, 2, 3, 4, 1000])).tolist()
    [0, 0, 4, 7, 8, 40]
    """
    return np.ceil(4 * np.log2(np.maximum(lengths, 1)) - 1e-9).astype(np.int64)


def _trimmed(counts: Counts, trims: Sequence[tuple[str, int, int]]) -> Counts:
    """Return the counts as if the stream had been given the rows whole, and had cut them as the format did."""
    seen, lost, cut = counts.seen, dict(counts.lost), dict(counts.cut)
    for reason, tokens, pieces in trims:
        tallies = lost if reason == "truncated" else cut
        tallies[reason] = tallies.get(reason, Tally()).plus(1, tokens)
        seen = seen.plus(1 - pieces, tokens if reason == "truncated" else 0)
    return Counts(seen, counts.packed, counts.packs, lost, cut, counts.padding)


def _check_row(format: Format, row: Any, number: int) -> None:
    """Raise, if the format cannot say how long a row is, what is amiss with it."""
    try:
        format.length(row)
    except (KeyError, TypeError, AttributeError) as error:
        has = f"has fields {', '.join(map(str, row))}" if isinstance(row, Mapping) else f"is one {type(row).__name__}"
        fault = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise PackError(
            f"document {number}, counted from 0 as this reader reads them, {has}, and {type(format).__name__} cannot "
            f"say its length: {fault}; rows are mappings with the fields the format names"
        ) from error

"""Documents that arrive one after another, the packs made of them, and what a strategy sees and answers.

These are the values of the innermost loop, so they are made by msgspec: a frozen attrs value costs five times as much.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from pack_core.errors import RecordError


class Document(msgspec.Struct, frozen=True, gc=False):
    """A document of a stream, known by a number and its length.

    Attributes:
        key: the caller's number for it, a running index for instance.
        length: tokens.
        group: documents of one group that come one after another are never put into different packs.
        cost: what it adds to a pack's cost; None is its length squared.
        kind: the class the strategy `binned` counts it to, where that has no edges: its dataset for instance.

    >>> Document(7, 120)
    Document(key=7, length=120, group=None, cost=None, kind=0)
    """

    key: int
    length: int
    group: int | str | None = None
    cost: int | None = None
    kind: int = 0


class Part(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Tokens `start` up to `stop` of a document.

    >>> Part(7, 0, 120).tokens
    120
    """

    key: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.stop - self.start


class Waiting(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a strategy chooses from: one document, one part of an overlong one, or one whole group.

    Attributes:
        length: tokens, of a group of all its documents.
        cost: of a group the sum.
        kind: of a group its first document's.
        group: its name, None outside groups.
        ticket: how many were admitted before it.
        parts: which documents these are.

    >>> Waiting(120, 14_400, 0, None, 3, (Part(7, 0, 120),)).key
    7
    """

    length: int
    cost: int
    kind: int
    group: int | str | None
    ticket: int
    parts: tuple[Part, ...]

    @property
    def key(self) -> int:
        """The key of its first document."""
        return self.parts[0].key

    @property
    def documents(self) -> int:
        """How many documents these are."""
        return len(self.parts)


class Room(msgspec.Struct, frozen=True, gc=False):
    """What the open pack can still take, and what it holds.

    Attributes:
        tokens: that fit.
        documents: that fit; infinite where there is no such limit.
        cost: that fits; infinite where there is no such limit.
        held: documents it holds; 0 for a pack that nothing was put into yet.
        used: tokens it holds.

    >>> room = Room(100, 1, float("inf"), 3, 412)
    >>> room.fits(Waiting(120, 14_400, 0, None, 3, (Part(7, 0, 120),)))
    False
    """

    tokens: int
    documents: float
    cost: float
    held: int
    used: int

    def fits(self, unit: Waiting) -> bool:
        """Return whether it can be put into the open pack."""
        return unit.length <= self.tokens and len(unit.parts) <= self.documents and unit.cost <= self.cost

    def fitting(self, waiting: Sequence[Waiting]) -> list[int]:
        """Return the places of all that can be put into the open pack."""
        tokens, documents, cost = self.tokens, self.documents, self.cost
        return [
            place
            for place, unit in enumerate(waiting)
            if unit.length <= tokens and unit.cost <= cost and len(unit.parts) <= documents
        ]


class Choice(msgspec.Struct, frozen=True, gc=False):
    """What a strategy answers. To take and discard nothing is to close the open pack.

    Attributes:
        take: places in what waits, put into the open pack in this order.
        discard: places of what is to go into no pack, each with a reason, under which it is counted.
        close: whether the open pack closes after that; it does anyway once it is full.
        memory: what the strategy is given the next time: None, or what JSON holds.

    >>> Choice(take=(0, 3), close=True).discard
    ()
    """

    take: Sequence[int] = ()
    discard: Sequence[tuple[int, str]] = ()
    close: bool = False
    memory: Any = None


class Strategy(Protocol):
    """How documents are chosen: one method, asked whenever the window is full, and at the end until nothing waits.

    A resume compares how it was made: its fields if attrs made it, else the plain values it holds to begin with.

    A strategy that sets `cuts = True` may take a document longer than the room: it is cut there, and the rest put back.

    >>> class Newest:
    ...     def choose(self, waiting, room, memory):
    ...         return Choice(take=(len(waiting) - 1,) if room.fits(waiting[-1]) else ())
    """

    def choose(self, waiting: Sequence[Waiting], room: Room, memory: Any) -> Choice:
        """Return what is put into the open pack next, given what waits, oldest first, and the last choice's memory."""


class StreamPack(msgspec.Struct, frozen=True, gc=False):
    """A closed pack: tokens `starts[i]` up to `stops[i]` of document `keys[i]`, one after another.

    Attributes:
        keys: of its documents, `[documents]`.
        starts: `[documents]`, 0 for all that were not cut.
        stops: `[documents]`.
        reason: why it closed. `"full"`: nothing more can fit; `"closed"`: the strategy took nothing more; `"due"`:
            a document that could wait no longer did not fit; `"last"`: the stream ended.

    >>> pack = StreamPack((7, 8), (0, 0), (120, 80), "closed")
    >>> pack.tokens, pack.lengths, pack.parts[1]
    (200, (120, 80), Part(key=8, start=0, stop=80))
    """

    keys: tuple[int, ...]
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    reason: str

    @property
    def parts(self) -> tuple[Part, ...]:
        """The same, document by document."""
        return tuple(map(Part, self.keys, self.starts, self.stops))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document in this pack, `[documents]`."""
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return sum(self.stops) - sum(self.starts)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.keys)


class Tally(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How many documents, and how many tokens.

    >>> Tally(2, 100).plus(1, 50)
    Tally(documents=3, tokens=150)
    """

    documents: int = 0
    tokens: int = 0

    def plus(self, documents: int, tokens: int) -> "Tally":
        """Return this and so many more."""
        return Tally(self.documents + documents, self.tokens + tokens)


class Counts(msgspec.Struct, frozen=True):
    """What became of all documents so far.

    Tokens are conserved: `seen` has those of `packed`, of everything `lost`, and of what waits or lies in the open
    pack, and no others.

    Attributes:
        seen: documents pushed.
        packed: documents, and parts of documents, in closed packs.
        packs: that were closed.
        lost: by reason: `"overlong"` and `"zero_length"` were dropped whole, `"truncated"` were cut short, `"last"` lay
            in the incomplete last pack; all other reasons are the strategy's.
        cut: by reason, without loss: `"overlong"` documents that were split, `"full"` those cut where a pack was full.
        padding: tokens that fill up the last pack, where `last` is `"pad"`.

    >>> Counts().lost_tokens
    0
    """

    seen: Tally = Tally()
    packed: Tally = Tally()
    packs: int = 0
    lost: Mapping[str, Tally] = {}
    cut: Mapping[str, Tally] = {}
    padding: int = 0

    @property
    def lost_tokens(self) -> int:
        """Tokens that are in no pack and never will be."""
        return sum(tally.tokens for tally in self.lost.values())


class StreamState(msgspec.Struct, frozen=True):
    """A stream between two documents: keys, lengths and counts, all that is needed to go on exactly.

    Attributes:
        waiting: what a strategy may choose from, oldest first; at most the window.
        row: what lies in the open pack.
        row_cost: of all that.
        gathering: the group whose last document may not have come yet.
        memory: the strategy's own.
        tickets: documents, parts and groups admitted so far.
        idle: documents lost since one was last put into a pack.
        counts: what became of all documents.
        finished: whether the stream has ended.

    >>> StreamState.from_json(StreamState().to_json()) == StreamState()
    True
    """

    waiting: tuple[Waiting, ...] = ()
    row: tuple[Part, ...] = ()
    row_cost: int = 0
    gathering: Waiting | None = None
    memory: Any = None
    tickets: int = 0
    idle: int = 0
    counts: Counts = Counts()
    finished: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the state as what JSON holds: a few numbers for each document that waits."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "StreamState":
        """Return the state that `to_json` gave.

        Raises:
            RecordError: this is none, or its numbers contradict each other.
        """
        try:
            return msgspec.convert(value, cls)._checked()
        except msgspec.ValidationError as error:
            raise RecordError(f"this is no state of a stream: {error}; give what to_json returned") from None

    def to_text(self) -> str:
        """Return the JSON of the state as text, which is made and passed on sooner than what it holds.

        >>> StreamState.from_text(StreamState().to_text()) == StreamState()
        True
        """
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_text(cls, text: str) -> "StreamState":
        """Return the state that `to_text` gave.

        Raises:
            RecordError: this is none, or its numbers contradict each other.
        """
        try:
            return msgspec.json.decode(text, type=cls)._checked()
        except (msgspec.DecodeError, TypeError) as error:
            raise RecordError(f"this is no state of a stream: {error}; give what to_text returned") from None

    @property
    def parts(self) -> list[Part]:
        """All that is in no pack yet: what lies in the open one, waits, or is of a group that may go on.

        >>> StreamState(row=(Part(7, 0, 5),)).parts
        [Part(key=7, start=0, stop=5)]
        """
        waiting = [part for unit in self.waiting for part in unit.parts]
        return [*self.row, *waiting, *(self.gathering.parts if self.gathering else ())]

    def counting(self, counts: Counts) -> "StreamState":
        """Return the state with other counts, for whoever cuts documents before they are pushed."""
        return msgspec.structs.replace(self, counts=counts)

    def _checked(self) -> "StreamState":
        """Return it if its numbers agree with each other."""
        units = [*self.waiting, *([self.gathering] if self.gathering else [])]
        for unit in units:
            if not unit.parts or unit.length != sum(part.tokens for part in unit.parts):
                raise RecordError(f"what waits at ticket {unit.ticket} does not have the tokens of its parts")
        tickets = [unit.ticket for unit in self.waiting]
        if tickets != sorted(set(tickets)) or (tickets and tickets[-1] >= self.tickets):
            raise RecordError("what waits is not in the order it was admitted; the state was changed")
        held = sum(unit.length for unit in units) + sum(part.tokens for part in self.row)
        counts = self.counts
        if counts.seen.tokens != counts.packed.tokens + counts.lost_tokens + held:
            raise RecordError("the counts of the state do not add up to the tokens it has seen; it was changed")
        return self

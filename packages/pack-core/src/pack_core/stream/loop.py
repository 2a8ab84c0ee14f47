"""The loop of a stream, plainly: admit a document, and while the window is full let the strategy choose."""

from bisect import insort
from collections.abc import Mapping
from typing import Any

import attrs

from pack_core.errors import LengthError, PackError
from pack_core.stream.limits import fits_alone, joined, largest_part, most_within, part_of, room_left
from pack_core.stream.options import StreamOptions
from pack_core.types.stream import Choice, Counts, Document, Part, Room, StreamPack, StreamState, Tally, Waiting


@attrs.define
class Run:
    """A state while it changes; it lives no longer than the one call that thaws and freezes it.

    >>> run = Run.thawed(StreamOptions(capacity=10, window=1), StreamState())
    >>> run.push(Document(0, 10))
    >>> run.packs[0].keys, run.frozen().counts.packs
    ((0,), 1)
    """

    options: StreamOptions
    waiting: list[Waiting]
    row: list[Part]
    row_cost: int
    gathering: Waiting | None
    memory: Any
    tickets: int
    idle: int
    seen: Tally
    packed: Tally
    lost: dict[str, Tally]
    cut: dict[str, Tally]
    closed: int
    padding: int
    room: Room
    held: int
    packs: list[StreamPack]

    @classmethod
    def thawed(cls, options: StreamOptions, state: StreamState) -> "Run":
        """Return a state that can be worked on."""
        if state.finished:
            raise PackError("the stream is finished and takes no more documents; open another one")
        counts = state.counts
        used = sum(part.tokens for part in state.row)
        return cls(
            options=options,
            waiting=list(state.waiting),
            row=list(state.row),
            row_cost=state.row_cost,
            gathering=state.gathering,
            memory=state.memory,
            tickets=state.tickets,
            idle=state.idle,
            seen=counts.seen,
            packed=counts.packed,
            lost=dict(counts.lost),
            cut=dict(counts.cut),
            closed=counts.packs,
            padding=counts.padding,
            room=room_left(options, len(state.row), used, state.row_cost),
            held=sum(len(unit.parts) for unit in state.waiting),
            packs=[],
        )

    def frozen(self, finished: bool = False) -> StreamState:
        """Return what became of the state."""
        return StreamState(
            waiting=tuple(self.waiting),
            row=tuple(self.row),
            row_cost=self.row_cost,
            gathering=self.gathering,
            memory=self.memory,
            tickets=self.tickets,
            idle=self.idle,
            counts=Counts(self.seen, self.packed, self.closed, self.lost, self.cut, self.padding),
            finished=finished,
        )

    def push(self, document: Document) -> None:
        """Take one document in: into its group, or to what waits."""
        options, group = self.options, document.group
        self.seen = self.seen.plus(1, document.length)
        if not document.length:
            if options.zero_length == "error":
                raise LengthError(
                    f"document {document.key} has no tokens and would be no document of any pack; leave it out, or set "
                    'zero_length="drop"'
                )
            self._lose("zero_length", 1, 0)
            return
        cost = document.length**2 if document.cost is None else document.cost
        unit = Waiting(document.length, cost, document.kind, group, 0, (Part(document.key, 0, document.length),))
        if self.gathering is not None:
            if self.gathering.group == group:
                self._gather(joined(self.gathering, unit))
                return
            self._admit_group()
        if group is None:
            self._admit(unit)
        else:
            self._gather(unit)

    def finish(self) -> None:
        """Let the strategy choose until nothing waits, and close the last pack."""
        if self.gathering is not None:
            self._admit_group()
        while self.waiting:
            self._step()
        if not self.row:
            return
        if self.options.last == "drop":
            self._count_lost("last", len(self.row), self.room.used)
            self._empty_row()
            return
        self.padding += self.room.tokens * (self.options.last == "pad")
        self._close("last")

    def _gather(self, group: Waiting) -> None:
        if self.options.cuts:
            raise PackError(
                f"document {group.key} is of group {group.group!r}, which must not be separated, but the strategy cuts "
                "documents wherever a pack is full; give no groups, or choose another strategy"
            )
        if any(unit.group == group.group for unit in self.waiting):
            raise PackError(
                f"group {group.group!r} was complete and comes back with document {group.parts[-1].key}; documents of "
                "one group must come one after another"
            )
        if group.documents > self.options.window:
            raise PackError(
                f"group {group.group!r} has {group.documents:,} documents and more may come, but window is "
                f"{self.options.window:,}; a group waits as a whole, so make the window at least as large"
            )
        self.gathering = group
        self._drain()

    def _admit_group(self) -> None:
        group, self.gathering = self.gathering, None
        if group is not None:
            self._admit(group)

    def _admit(self, unit: Waiting) -> None:
        """Let it wait: whole, or what the policy leaves of it where no pack can hold it."""
        options = self.options
        if fits_alone(options, unit):
            self._wait(unit)
            return
        if options.overlong == "drop":
            self._lose("overlong", unit.documents, unit.length)
            return
        most = largest_part(options, unit)
        if options.overlong != "split":
            self._count_lost("truncated", 1, unit.length - most)
            start = unit.length - most if options.overlong == "truncate_left" else 0
            self._wait(part_of(unit, start, start + most))
        elif options.cuts:
            self._wait(unit)  # it is cut where packs are full, and nowhere else
        else:
            self.cut["overlong"] = self.cut.get("overlong", Tally()).plus(1, unit.length)
            for start in range(0, unit.length, most):
                self._wait(part_of(unit, start, min(start + most, unit.length)))

    def _wait(self, unit: Waiting) -> None:
        self.waiting.append(Waiting(unit.length, unit.cost, unit.kind, unit.group, self.tickets, unit.parts))
        self.tickets += 1
        self.held += len(unit.parts)
        self._drain()

    def _drain(self) -> None:
        """Let the strategy choose while the window is full or the oldest document can wait no longer."""
        gathered = self.gathering.documents if self.gathering else 0
        while self.waiting and (self.held + gathered >= self.options.window or self._is_due()):
            self._step()

    def _is_due(self) -> bool:
        limit = self.options.max_wait
        return limit is not None and self.tickets - 1 - self.waiting[0].ticket >= limit

    def _step(self) -> None:
        if self._is_due():
            if self.room.fits(self.waiting[0]) or self.options.cuts:
                self._apply(Choice(take=(0,), memory=self.memory))
            else:
                self._close("due")
            return
        choice = self.options.chooser.choose(self.waiting, self.room, self.memory)
        self.memory = choice.memory
        self._apply(choice)

    def _apply(self, choice: Choice) -> None:
        """Do what was chosen."""
        places = sorted([*choice.take, *(place for place, _ in choice.discard)])
        if len({*places}) < len(places) or (places and not 0 <= places[0] <= places[-1] < len(self.waiting)):
            raise PackError(
                f"{_name(self.options)} chose the places {places} of {len(self.waiting)} that wait; every place must "
                "be one of them, and be chosen once"
            )
        if not self.row and not places:
            raise PackError(
                f"{_name(self.options)} put nothing into an empty pack and discarded nothing, with {self.held:,} "
                "documents waiting; it must choose, or the stream would stand still"
            )
        chosen = [self.waiting[place] for place in choice.take]
        discarded = [(self.waiting[place], reason) for place, reason in choice.discard]
        for place in reversed(places):
            self.held -= len(self.waiting.pop(place).parts)
        for unit, reason in discarded:
            self._lose(reason, len(unit.parts), unit.length)
        for unit in chosen:
            self._put(unit)
        if self.row and (choice.close or not places):
            self._close("closed")

    def _put(self, unit: Waiting) -> None:
        cut = not self.room.fits(unit)
        if cut:
            unit = self._cut(unit)
        if unit.length:
            self.idle = 0
            self.row += unit.parts
            self.row_cost += unit.cost
            self.room = room_left(self.options, len(self.row), self.room.used + unit.length, self.row_cost)
        if cut or not self.room.tokens or not self.room.documents:
            self._close("full")

    def _cut(self, unit: Waiting) -> Waiting:
        """Return what the open pack can take of a document, and put the rest back."""
        room = self.room
        if not self.options.cuts:
            raise PackError(
                f"{_name(self.options)} chose document {unit.key} ({unit.length:,} tokens, {unit.documents:,} "
                f"documents, cost {unit.cost:,}) for a pack with room for {room.tokens:,} tokens, {room.documents:,} "
                f"documents and cost {room.cost:,}; choose only what `room.fits`"
            )
        size = most_within(unit, room.tokens, room.cost)
        if size:
            self.cut["full"] = self.cut.get("full", Tally()).plus(1, unit.length)
        insort(self.waiting, part_of(unit, size, unit.length), key=lambda waits: waits.ticket)
        self.held += 1
        return part_of(unit, 0, size)

    def _close(self, reason: str) -> None:
        row = self.row
        keys = tuple([part.key for part in row])
        self.packs.append(StreamPack(keys, tuple([p.start for p in row]), tuple([p.stop for p in row]), reason))
        self.packed = self.packed.plus(len(row), self.room.used)
        self.closed += 1
        self._empty_row()

    def _empty_row(self) -> None:
        self.row, self.row_cost = [], 0
        self.room = room_left(self.options, 0, 0, 0)

    def _lose(self, reason: str, documents: int, tokens: int) -> None:
        """Count what goes into no pack, and stop a stream of which nothing does."""
        self._count_lost(reason, documents, tokens)
        self.idle += documents
        check_idle(self.options, self.idle, self.lost)

    def _count_lost(self, reason: str, documents: int, tokens: int) -> None:
        self.lost[reason] = self.lost.get(reason, Tally()).plus(documents, tokens)


def check_idle(options: StreamOptions, idle: int, lost: Mapping[str, Tally]) -> None:
    """Check that not too many documents were lost since one was last put into a pack.

    Raises:
        PackError: there were `max_idle`.

    >>> check_idle(StreamOptions(capacity=10), 9_999, {})
    """
    if idle >= options.max_idle:
        raise PackError(
            f"{idle:,} documents were lost since one was last put into a pack (by {', '.join(lost)}); check the limits "
            f"against the lengths, or raise max_idle, which is {options.max_idle:,}"
        )


def _name(options: StreamOptions) -> str:
    return f"strategy {options.to_json()['strategy']['name']}"

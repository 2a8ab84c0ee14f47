"""Where a block of a stream begins, and all it takes to go on from there."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from pack_core.stream import Counts, StreamPack, StreamState, Tally


@attrs.frozen(eq=False)
class Mark:
    """Where a block begins: all that it takes to make it, and all after it, again.

    Args:
        reader: the source before the block that has the oldest document not packed yet.
        first: that block's first document.
        now: the source before this block.
        made: documents so far.
        stream: what waits, and all counts.
        told: counts that no pack has carried yet.
    """

    reader: Any
    first: int
    now: Any
    made: int
    stream: StreamState
    told: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return it as what JSON holds."""
        own = {name: getattr(self, name) for name in ("reader", "first", "made", "told")}
        return own | {"stream": self.stream.to_text()}

    def discarding(self, packs: Sequence[StreamPack]) -> tuple[Mark, Tally]:
        """Return the mark with nothing waiting and these packs not given, and how much is lost by that."""
        state = self.stream
        held = state.parts
        given, tokens = sum(map(len, packs)), sum(pack.tokens for pack in packs)
        lost = Tally(len(held) + given, sum(part.tokens for part in held) + tokens)
        counts, before = state.counts, state.counts.lost.get("discarded", Tally())
        told = Counts(
            counts.seen,
            counts.packed.plus(-given, -tokens),
            counts.packs - len(packs),
            {**counts.lost, "discarded": before.plus(lost.documents, lost.tokens)},
            counts.cut,
            counts.padding,
        )
        empty = StreamState(tickets=state.tickets, counts=told, memory=state.memory, finished=state.finished)
        return attrs.evolve(self, reader=self.now, first=self.made, stream=empty), lost


def warn_of_discarded(lost: Tally) -> None:
    """Say how much a resume loses."""
    warnings.warn(
        f"resume='discard': {lost.documents:,} documents of {lost.tokens:,} tokens that waited, or lay in packs not "
        "given yet, when the state was saved are lost; resume='exact' loses none",
        stacklevel=3,
    )

"""Documents to packs as they arrive, with the state kept for you: `pack_core.stream` behind four methods."""

from collections.abc import Iterable, Mapping
from typing import Any

from pack_core import stream
from pack_core.errors import RecordError
from pack_core.stream import Counts, Document, Documents, StreamOptions, StreamPack, StreamState

_VERSION = 1


class StreamPacker:
    """Packs of documents that are pushed, by key and length; a thin object over the pure functions.

    The arguments are those of `StreamOptions`. The state is JSON: keys, lengths and counts of what is not packed yet.

    >>> packer = StreamPacker(strategy="best_fit", capacity=10, window=2)
    >>> packer.push(0, 6), packer.push(1, 5)
    ([], [])
    >>> resumed = StreamPacker(strategy="best_fit", capacity=10, window=2)
    >>> resumed.load_state_dict(packer.state_dict())
    >>> [pack.keys for pack in resumed.push(2, 4)], [pack.keys for pack in resumed.finish()]
    ([(0, 2)], [(1,)])
    >>> resumed.counts.packed
    Tally(documents=3, tokens=15)
    """

    def __init__(self, **options: Any) -> None:
        """Open a stream.

        Raises:
            PackError: an option is not among what is allowed.
        """
        self.options = StreamOptions(**options)
        self._state = stream.open_stream(self.options)

    @property
    def counts(self) -> Counts:
        """What became of all documents so far."""
        return self._state.counts

    @property
    def waiting(self) -> tuple[int, ...]:
        """Keys of all documents in no closed pack yet: in the open one, waiting, or in a group that may go on."""
        state = self._state
        units = [*state.waiting, *([state.gathering] if state.gathering else [])]
        return tuple(part.key for part in [*state.row, *(part for unit in units for part in unit.parts)])

    def push(
        self, key: int, length: int, *, group: int | str | None = None, cost: int | None = None, kind: int = 0
    ) -> list[StreamPack]:
        """Return the packs that closed because of one more document.

        Raises:
            PackError: see `pack_core.stream.push`; the packer is as it was before.
        """
        self._state, packs = stream.push(self.options, self._state, Document(key, length, group, cost, kind))
        return packs

    def push_many(self, documents: Documents | Iterable[Document]) -> list[StreamPack]:
        """Return the packs that closed because of more documents; the same as one by one, and sooner.

        Raises:
            PackError: see `pack_core.stream.push_many`; the packer is as it was before.
        """
        self._state, packs = stream.push_many(self.options, self._state, documents)
        return packs

    def finish(self) -> list[StreamPack]:
        """Return the packs of all that waits; the second time none."""
        self._state, packs = stream.finish(self.options, self._state)
        return packs

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on exactly, as what JSON holds."""
        return {"version": _VERSION, "options": self.options.to_json(), "state": self._state.to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where another packer with the same options was.

        Raises:
            RecordError: the state is of other options, which are listed, or is none.
        """
        if state.get("version") != _VERSION:
            raise RecordError(f"the state is of version {state.get('version')!r}; this packer reads {_VERSION}")
        was, now = state.get("options") or {}, self.options.to_json()
        other = [f"{name} was {was.get(name)!r} and is {now[name]!r}" for name in now if was.get(name) != now[name]]
        if other:
            raise RecordError(f"the state was saved with other options: {'; '.join(other)}; open the packer with those")
        self._state = StreamState.from_json(state.get("state") or {})

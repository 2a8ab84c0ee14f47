"""Packing documents as they arrive: pure functions over an explicit state of keys, lengths and counts."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from pack_core.lengths import Lengths
from pack_core.stream.columns import Documents
from pack_core.stream.loop import Run
from pack_core.stream.many import has_stroke, push_stroke
from pack_core.stream.options import StreamOptions
from pack_core.stream.strategies import (
    STRATEGIES,
    BestFit,
    Binned,
    ConcatSplit,
    FirstFit,
    LengthGrouped,
    LongestFirst,
    NextFit,
)
from pack_core.types.stream import (
    Choice,
    Counts,
    Document,
    Part,
    Room,
    Strategy,
    StreamPack,
    StreamState,
    Tally,
    Waiting,
)

__all__ = [
    "STRATEGIES",
    "BestFit",
    "Binned",
    "Choice",
    "ConcatSplit",
    "Counts",
    "Document",
    "Documents",
    "FirstFit",
    "LengthGrouped",
    "LongestFirst",
    "NextFit",
    "Part",
    "Room",
    "Strategy",
    "StreamOptions",
    "StreamPack",
    "StreamState",
    "Tally",
    "Waiting",
    "finish",
    "open_stream",
    "packs_of",
    "push",
    "push_many",
]

_FEW = 8
_MANY = 4_096


def open_stream(options: StreamOptions) -> StreamState:
    """Return the state of a stream that has seen nothing.

    >>> open_stream(StreamOptions(capacity=10)).counts.packs
    0
    """
    return StreamState()


def push(options: StreamOptions, state: StreamState, document: Document) -> tuple[StreamState, list[StreamPack]]:
    """Return the next state, and the packs that closed because of one more document.

    Raises:
        LengthError: the document is over a limit, or has no tokens, and that was not to be dropped or cut.
        PackError: the document is none, the strategy broke its rules, nothing gets into packs, or the stream is
            finished. The state given still stands.

    >>> options = StreamOptions(strategy="first_fit", capacity=10, window=2)
    >>> state = open_stream(options)
    >>> for key, length in enumerate([6, 5, 4]):
    ...     state, packs = push(options, state, Document(key, length))
    >>> packs
    [StreamPack(keys=(0, 2), starts=(0, 0), stops=(6, 4), reason='full')]
    """
    return _push_one_by_one(options, state, Documents.of([document]))


def push_many(
    options: StreamOptions, state: StreamState, documents: Documents | Iterable[Document]
) -> tuple[StreamState, list[StreamPack]]:
    """Return exactly what one `push` after the other would, sooner.

    By name `next_fit`, `first_fit`, `best_fit`, `longest_first` and `concat_split` are fast; groups, costs and
    other strategies go one by one.

    Raises:
        LengthError: as `push`.
        PackError: as `push`.

    >>> options = StreamOptions(strategy="first_fit", capacity=10, window=2)
    >>> state, packs = push_many(options, open_stream(options), Documents(keys=range(3), lengths=[6, 5, 4]))
    >>> packs[0].keys
    (0, 2)
    """
    columns = Documents.of(documents)
    if len(columns) >= _FEW and not state.finished and has_stroke(options, state, columns):
        return push_stroke(options, state, columns)
    return _push_one_by_one(options, state, columns)


def finish(options: StreamOptions, state: StreamState) -> tuple[StreamState, list[StreamPack]]:
    """Return the last state and the last packs: nothing waits any more. To finish again changes nothing.

    Raises:
        LengthError: the last group is over a limit that is an error.
        PackError: the strategy broke its rules.

    >>> options = StreamOptions(capacity=10)
    >>> state, packs = push(options, open_stream(options), Document(0, 6))
    >>> state, packs = finish(options, state)
    >>> packs[0].keys, state.counts.padding
    ((0,), 4)
    """
    if state.finished:
        return state, []
    run = Run.thawed(options, state)
    run.finish()
    return run.frozen(finished=True), run.packs


def packs_of(lengths: Lengths, **options: Any) -> Iterator[StreamPack]:
    """Yield the packs of a whole stream of lengths, numbered from 0; the arguments are those of `StreamOptions`.

    >>> [pack.keys for pack in packs_of([6, 5, 4], strategy="best_fit", capacity=10)]
    [(0, 2), (1,)]
    """
    chosen = StreamOptions(**options)
    state, come, seen = open_stream(chosen), iter(lengths), 0
    while block := list(islice(come, _MANY)):
        state, packs = push_many(chosen, state, Documents(range(seen, seen + len(block)), block))  # type: ignore[arg-type]
        seen += len(block)
        yield from packs
    yield from finish(chosen, state)[1]


def _push_one_by_one(
    options: StreamOptions, state: StreamState, documents: Documents
) -> tuple[StreamState, list[StreamPack]]:
    run = Run.thawed(options, state)
    for document in documents.rows():
        run.push(document)
    return run.frozen(), run.packs

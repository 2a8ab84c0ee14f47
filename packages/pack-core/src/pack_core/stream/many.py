"""Many documents pushed in one go: rows of numbers in, packs and the next state out."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import add

from pack_core.lengths import LARGEST
from pack_core.stream.columns import Admitted, Documents, admit
from pack_core.stream.loop import check_idle
from pack_core.stream.options import StreamOptions
from pack_core.stream.strategies import STRATEGIES, ConcatSplit
from pack_core.stream.strokes import STROKES, Limits, Rows, cut_where_full
from pack_core.types.stream import Counts, Part, StreamPack, StreamState, Tally, Waiting

_STROKES = {STRATEGIES[name]: stroke for name, stroke in STROKES.items()}


def has_stroke(options: StreamOptions, state: StreamState, documents: Documents) -> bool:
    """Return whether these documents can be packed in one stroke, rather than one by one.

    >>> has_stroke(StreamOptions(capacity=10, max_cost=50), StreamState(), Documents([0], [3]))
    False
    """
    kind = type(options.chooser)
    return (
        (kind in _STROKES or kind is ConcatSplit)
        and options.max_cost is None
        and documents.groups is None
        and documents.costs is None
        and state.gathering is None
        and all(unit.group is None and unit.cost == unit.length**2 for unit in state.waiting)
        and state.row_cost == sum(part.tokens**2 for part in state.row)
        and not (options.zero_length == "error" and not min(documents.lengths))
        and not (options.overlong == "error" and max(documents.lengths) > options.capacity)
    )


def push_stroke(
    options: StreamOptions, state: StreamState, documents: Documents
) -> tuple[StreamState, list[StreamPack]]:
    """Return the next state and the packs that closed; `has_stroke` must hold.

    >>> state, packs = push_stroke(StreamOptions(capacity=10, window=1), StreamState(), Documents([0, 1, 2], [6, 4, 5]))
    >>> [pack.keys for pack in packs], state.row
    ([(0, 1)], (Part(key=2, start=0, stop=5),))
    """
    come, waited = admit(options, documents), state.waiting
    parts = [unit.parts[0] for unit in waited]
    keys = [*[part.key for part in parts], *come.keys]
    starts = [*[part.start for part in parts], *come.starts]
    sizes = [*[unit.length for unit in waited], *come.sizes]
    kinds = [*[unit.kind for unit in waited], *come.kinds]
    tickets = [*[unit.ticket for unit in waited], *range(state.tickets, state.tickets + len(come.keys))]
    cut = [("overlong", tokens) for tokens in come.split]
    limits = _limits(options, state)
    stroke = _STROKES.get(type(options.chooser))
    if stroke is not None:
        rows = stroke(sizes, tickets, limits)
        chosen = {*chain.from_iterable(rows.closed), *rows.row}
        rest = [place for place in range(len(keys)) if place not in chosen]
        packs, row = _packs(state.row, rows, keys, starts, sizes)
    else:
        rows, pieces = cut_where_full(sizes, limits)
        rest = [*range(max(len(keys) - options.window + 1, 0), len(keys))]
        cut += [("full", sizes[place] - start) for place, start, stop in pieces if stop < sizes[place]]
        begins = [starts[place] + start for place, start, _ in pieces]
        of_pieces = [keys[place] for place, _, _ in pieces], begins, [stop - start for _, start, stop in pieces]
        packs, row = _packs(state.row, rows, *of_pieces)
    lost = [(reason, tokens) for reason, _, tokens in come.lost] + [("truncated", tokens) for tokens in come.truncated]
    before = state.counts
    counts = Counts(
        seen=before.seen.plus(len(documents), sum(documents.lengths)),
        packed=before.packed.plus(sum(map(len, packs)), sum([pack.tokens for pack in packs])),
        packs=before.packs + len(packs),
        lost=_counted(before.lost, lost),
        cut=_counted(before.cut, cut),
        padding=before.padding,
    )
    units = []
    for at in rest:
        size, start = sizes[at], starts[at]
        part = Part(keys[at], start, start + size)
        units.append(Waiting(size, size**2, kinds[at], None, tickets[at], (part,)))
    return StreamState(
        waiting=tuple(units),
        row=row,
        row_cost=sum(part.tokens**2 for part in row),
        memory=None,
        tickets=state.tickets + len(come.keys),
        idle=_idle(options, state, come, counts),
        counts=counts,
    ), packs


def _limits(options: StreamOptions, state: StreamState) -> Limits:
    most = options.max_documents or LARGEST
    room = options.capacity - sum(part.tokens for part in state.row)
    return Limits(options.window, options.capacity, most, room, most - len(state.row), options.max_wait)


def _packs(
    before: Sequence[Part], rows: Rows, keys: Sequence[int], starts: list[int], sizes: Sequence[int]
) -> tuple[list[StreamPack], tuple[Part, ...]]:
    """Return closed packs and the open one, the first of which goes on from `before`."""
    whole = not any(starts)
    stops = sizes if whole else list(map(add, starts, sizes))
    packs = []
    for places, reason in zip(rows.closed, rows.reasons, strict=True):
        begins = (0,) * len(places) if whole else tuple([starts[place] for place in places])
        packs.append(
            StreamPack(
                tuple([keys[place] for place in places]), begins, tuple([stops[place] for place in places]), reason
            )
        )
    row = tuple(Part(keys[place], starts[place], stops[place]) for place in rows.row)
    if not packs:
        return packs, (*before, *row)
    if before:
        first = packs[0]
        packs[0] = StreamPack(
            tuple(part.key for part in before) + first.keys,
            tuple(part.start for part in before) + first.starts,
            tuple(part.stop for part in before) + first.stops,
            first.reason,
        )
    return packs, row


def _counted(before: Mapping[str, Tally], more: Iterable[tuple[str, int]]) -> dict[str, Tally]:
    """Return the tallies with one document more for each reason and its tokens."""
    counted = dict(before)
    for reason, tokens in more:
        counted[reason] = counted.get(reason, Tally()).plus(1, tokens)
    return counted


def _idle(options: StreamOptions, state: StreamState, come: Admitted, counts: Counts) -> int:
    """Return how many were lost since a document was last put into a pack: with the window full, at every admission."""
    filled = options.window - len(state.waiting)
    idle, before = state.idle, 0
    for _, admitted, _ in come.lost:
        if admitted >= filled and admitted > before:
            idle = 0
        idle, before = idle + 1, admitted
        check_idle(options, idle, counts.lost)
    return 0 if len(come.keys) >= filled and len(come.keys) > before else idle

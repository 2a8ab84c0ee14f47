"""What fits: the room of a pack, and parts of documents with what they cost."""

from math import inf, isqrt

from pack_core.errors import LengthError
from pack_core.stream.options import StreamOptions
from pack_core.types.stream import Part, Room, Waiting


def room_left(options: StreamOptions, held: int, used: int, cost: int) -> Room:
    """Return the room of a pack that holds so many documents and tokens, at that cost.

    >>> room_left(StreamOptions(capacity=10, max_documents=4), 3, 8, 30).tokens
    2
    """
    documents = inf if options.max_documents is None else options.max_documents - held
    return Room(
        options.capacity - used, documents, inf if options.max_cost is None else options.max_cost - cost, held, used
    )


def most_within(unit: Waiting, tokens: int, cost: float) -> int:
    """Return how many tokens a part of the document may have to keep within so many tokens and that cost.

    A part's cost is its share of the tokens, squared, times what the document costs; rounded up.

    >>> most_within(Waiting(100, 10_000, 0, None, 0, (Part(0, 0, 100),)), 80, 2_500)
    50
    """
    most = min(tokens, unit.length)
    if cost == inf or not unit.cost:
        return most
    return min(most, isqrt(int(cost) * unit.length**2 // unit.cost))


def part_of(unit: Waiting, start: int, stop: int) -> Waiting:
    """Return tokens `start` up to `stop` of what waits as one document.

    >>> part_of(Waiting(100, 10_000, 0, None, 4, (Part(7, 20, 120),)), 10, 60)
    Waiting(length=50, cost=2500, kind=0, group=None, ticket=4, parts=(Part(key=7, start=30, stop=80),))
    """
    (whole,) = unit.parts
    tokens = stop - start
    cost = -(-unit.cost * tokens**2 // unit.length**2)
    part = Part(whole.key, whole.start + start, whole.start + stop)
    return Waiting(tokens, cost, unit.kind, unit.group, unit.ticket, (part,))


def joined(group: Waiting, unit: Waiting) -> Waiting:
    """Return the group with one more document.

    >>> pair = [Waiting(3, 9, 0, "a", 0, (Part(key, 0, 3),)) for key in (0, 1)]
    >>> joined(*pair).length, joined(*pair).documents
    (6, 2)
    """
    return Waiting(
        group.length + unit.length, group.cost + unit.cost, group.kind, group.group, 0, group.parts + unit.parts
    )


def fits_alone(options: StreamOptions, unit: Waiting) -> bool:
    """Return whether an empty pack can hold it.

    >>> fits_alone(StreamOptions(capacity=10), Waiting(11, 121, 0, None, 0, (Part(0, 0, 11),)))
    False
    """
    return room_left(options, 0, 0, 0).fits(unit)


def largest_part(options: StreamOptions, unit: Waiting) -> int:
    """Return how many tokens of an overlong document one pack can hold.

    Raises:
        LengthError: it may not be cut, because that was not asked for or because it is a group.

    >>> largest_part(StreamOptions(capacity=10, overlong="split"), Waiting(11, 121, 0, None, 0, (Part(0, 0, 11),)))
    10
    """
    limits = f"capacity is {options.capacity:,}"
    limits += f", max_documents {options.max_documents:,}" if options.max_documents is not None else ""
    limits += f", max_cost {options.max_cost:,}" if options.max_cost is not None else ""
    what = f"document {unit.key}" if unit.group is None else f"group {unit.group!r} from document {unit.key} on"
    has = f"{what} has {unit.length:,} tokens, {unit.documents:,} documents and cost {unit.cost:,}, but {limits}"
    if options.overlong == "error":
        raise LengthError(f'{has}; raise the limit, or set overlong to "drop", "truncate", "truncate_left" or "split"')
    if unit.group is not None:
        raise LengthError(f'{has}, and a group is never cut; raise the limit, or set overlong="drop"')
    most = most_within(unit, options.capacity, inf if options.max_cost is None else options.max_cost)
    if not most:
        raise LengthError(f'{has}, and not one token of it keeps within that; raise the limit, or set overlong="drop"')
    return most

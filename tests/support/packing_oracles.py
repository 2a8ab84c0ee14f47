"""Packing done one document at a time, an exact solver for a few documents, and a check token by token."""

from collections.abc import Sequence

from pack_core import Packing

Packs = list[list[int]]

STRATEGIES = [
    "next_fit",
    "first_fit",
    "best_fit",
    "first_fit_decreasing",
    "best_fit_decreasing",
    "fewest",
    "concat_split",
]
OVERLONG = ["error", "drop", "truncate", "split"]


def fit(lengths: Sequence[int], capacity: int, most: int | None = None, *, best: bool, decreasing: bool) -> Packs:
    """First fit or best fit, by looking at every open pack for every document."""
    packs: Packs = []
    rooms: list[int] = []
    arrival = range(len(lengths))
    for document in sorted(arrival, key=lambda i: -lengths[i]) if decreasing else arrival:
        fitting = [
            p for p, room in enumerate(rooms) if room >= lengths[document] and (most is None or len(packs[p]) < most)
        ]
        if not fitting:
            fitting = [len(packs)]
            packs.append([])
            rooms.append(capacity)
        pack = min(fitting, key=lambda p: (rooms[p], p)) if best else fitting[0]
        packs[pack].append(document)
        rooms[pack] -= lengths[document]
    return packs


def cut_row(
    lengths: Sequence[int], capacity: int, most: int | None = None, align: int = 1
) -> list[list[tuple[int, int, int]]]:
    """(document, first token, token after the last) of all pieces, when one row of documents is cut as packs fill."""
    packs: list[list[tuple[int, int, int]]] = [[]]
    room = capacity // align
    for document, length in enumerate(lengths):
        start = 0
        while start < length:
            if room == 0 or len(packs[-1]) == most:
                packs.append([])
                room = capacity // align
            stop = min(length, start + room * align)
            packs[-1].append((document, start, stop))
            room -= -(-(stop - start) // align)
            start = stop
    return packs


def pieces(packing: Packing, lengths: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """What a packing says lies in each pack: (document, first token, token after the last)."""
    parts = packing.parts
    cut = {place: (start, stop) for place, start, stop in zip(parts.places, parts.starts, parts.stops, strict=True)}
    placed = [
        (document, *cut.get(place, (0, lengths[document]))) for place, document in enumerate(packing.order.tolist())
    ]
    return [placed[packing.offsets[p] : packing.offsets[p + 1]] for p in range(len(packing))]


def faults(
    packing: Packing, lengths: Sequence[int], capacity: int, overlong: str, most: int | None, align: int
) -> list[str]:
    """Every broken promise: a token not there once and not counted lost, a pack too full, a wrong policy."""
    found = []
    packs = pieces(packing, lengths)
    usable = capacity // align * align
    for p, pack in enumerate(packs):
        if sum(-(-(stop - start) // align) * align for _, start, stop in pack) > capacity:
            found.append(f"pack {p} is over the capacity")
        if not pack or (most is not None and len(pack) > most):
            found.append(f"pack {p} holds {len(pack)}")
    tokens = [(d, t) for pack in packs for d, start, stop in pack for t in range(start, stop)]
    dropped = dict(zip(packing.dropped.documents, packing.dropped.tokens, strict=True))
    short = dict(zip(packing.truncated.documents, packing.truncated.tokens, strict=True))
    kept = {(d, t) for d, length in enumerate(lengths) for t in range(length - dropped.get(d, 0) - short.get(d, 0))}
    if len(tokens) != len(set(tokens)) or set(tokens) != kept:
        found.append("tokens are missing or doubled")
    over = {d: length for d, length in enumerate(lengths) if length > usable}
    if dropped != (over if overlong == "drop" else {}):
        found.append(f"dropped {dropped}")
    if short != ({d: length - usable for d, length in over.items()} if overlong == "truncate" else {}):
        found.append(f"truncated {short}")
    return found


def fewest_packs(lengths: Sequence[int], capacity: int) -> int:
    """The least packs possible, over every subset of the documents: packs, then tokens of the last one."""
    best = [(0, capacity)]
    for mask in range(1, 1 << len(lengths)):
        options = []
        for document, length in enumerate(lengths):
            if mask >> document & 1:
                packs, used = best[mask & ~(1 << document)]
                options.append((packs, used + length) if used + length <= capacity else (packs + 1, length))
        best.append(min(options))
    return best[-1][0]


def fewest_capped(lengths: Sequence[int], capacity: int, most: int) -> int:
    """The least packs of at most so many documents, over every way to choose the pack of the first one left."""
    count = len(lengths)
    least = [0] * (1 << count)
    for mask in range(1, 1 << count):
        top = 1 << (mask.bit_length() - 1)
        rest, options, some = mask ^ top, [], mask ^ top
        while True:
            chosen = some | top
            if chosen.bit_count() <= most and sum(lengths[i] for i in range(count) if chosen >> i & 1) <= capacity:
                options.append(1 + least[mask ^ chosen])
            if not some:
                break
            some = (some - 1) & rest
        least[mask] = min(options)
    return least[-1]

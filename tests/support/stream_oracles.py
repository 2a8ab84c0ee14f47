"""Packing a stream again, plainly and with nothing of the package: one list of what waits, one open pack."""

from collections.abc import Sequence
from math import inf

Piece = tuple[int, int, int]  # key, start, stop


def size(piece: Piece) -> int:
    return piece[2] - piece[1]


def one_by_one(
    lengths: Sequence[int],
    strategy: str,
    capacity: int,
    window: int,
    *,
    max_documents: float = inf,
    max_cost: float = inf,
    max_wait: float = inf,
    overlong: str = "drop",
    last: str = "pad",
) -> list[list[Piece]]:
    """Packs of pieces; a document costs its length squared, and those without tokens are left out."""
    packs: list[list[Piece]] = []
    row: list[Piece] = []
    waiting: list[tuple[int, Piece]] = []  # with the number it was admitted at
    admitted = 0

    def fits(piece: Piece) -> bool:
        held = [*row, piece]
        within = sum(map(size, held)) <= capacity and len(held) <= max_documents
        return within and sum(size(each) ** 2 for each in held) <= max_cost

    def next_place() -> int | None:
        fitting = [place for place, (_, piece) in enumerate(waiting) if fits(piece)]
        oldest_only = strategy == "next_fit" or admitted - 1 - waiting[0][0] >= max_wait
        if oldest_only or (strategy == "best_fit" and 0 in fitting):
            return 0 if 0 in fitting else None
        if not fitting:
            return None
        if strategy == "length_grouped":
            if not row:
                return 0
            mean = sum(map(size, row)) / len(row)
            return min(fitting, key=lambda place: (abs(size(waiting[place][1]) - mean), place))
        if strategy == "first_fit":
            return fitting[0]
        return max(fitting, key=lambda place: (size(waiting[place][1]), -place))

    def take_one() -> None:
        place = next_place()
        if place is None:
            packs.append(row[:])
            row.clear()
            return
        row.append(waiting.pop(place)[1])
        if sum(map(size, row)) == capacity or len(row) == max_documents:
            packs.append(row[:])
            row.clear()

    for key, length in enumerate(lengths):
        for piece in pieces(key, length, capacity, max_cost, overlong):
            waiting.append((admitted, piece))
            admitted += 1
            while waiting and (len(waiting) >= window or admitted - 1 - waiting[0][0] >= max_wait):
                take_one()
    while waiting:
        take_one()
    if row and last != "drop":
        packs.append(row)
    return packs


def pieces(key: int, length: int, capacity: int, max_cost: float, overlong: str) -> list[Piece]:
    """What the policy leaves of a document."""
    most = max(tokens for tokens in range(capacity + 1) if tokens**2 <= max_cost)
    if not length or (length > most and overlong == "drop"):
        return []
    if length <= most:
        return [(key, 0, length)]
    if overlong == "truncate":
        return [(key, 0, most)]
    if overlong == "truncate_left":
        return [(key, length - most, length)]
    return [(key, start, min(start + most, length)) for start in range(0, length, most)]


def one_long_row(lengths: Sequence[int], capacity: int) -> list[list[tuple[int, int]]]:
    """Every token `(key, place)` of all documents, cut into packs of exactly the capacity."""
    tokens = [(key, place) for key, length in enumerate(lengths) for place in range(length)]
    return [tokens[start : start + capacity] for start in range(0, len(tokens), capacity)]

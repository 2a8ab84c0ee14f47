"""Rows that are too long: how they are shortened or split without harm to what must stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pack_torch.formats.columns import Row
from pack_torch.formats.format import Format


def truncate_row(format: Format, row: Row, capacity: int, *, side: Literal["right", "left"] = "right") -> Row:
    """Return at most `capacity` tokens of the row: its beginning, or its end when the left side is cut off.

    Images and the like go as a whole, with their payload, when they do not fit; so fewer tokens may be left.

    Raises:
        ValueError: nothing is left, the format cannot be cut, or no such side.

    >>> from pack_torch import Sft
    >>> truncate_row(Sft(), {"input_ids": [5, 6, 7], "labels": [6, 7, 8]}, 2, side="left")
    {'input_ids': [6, 7], 'labels': [7, 8]}
    """
    if side not in ("right", "left"):
        raise ValueError(f"side is {side!r} but must be 'right' or 'left'")
    length = format.length(row)
    if length <= capacity:
        return row
    spans = format.spans(row)
    if side == "right":
        start, stop = 0, _whole_before(capacity, spans)
    else:
        start, stop = _whole_after(length - capacity, spans), length
    if start >= stop:
        raise ValueError(
            f"no token of {length:,} is left at capacity {capacity:,}, for what stands at the {side} is longer and "
            "must stay whole; raise the capacity or drop the document"
        )
    return format.cut(row, start, stop)


def split_row(format: Format, row: Row, capacity: int) -> list[Row]:
    """Return the row in pieces of at most `capacity` tokens, which hold every token once.

    Raises:
        ValueError: something that must stay whole is longer than that, or the format cannot be cut.

    >>> from pack_torch import Sft
    >>> [piece["input_ids"] for piece in split_row(Sft(), {"input_ids": [5, 6, 7], "labels": [6, 7, 8]}, 2)]
    [[5, 6], [7]]
    """
    length, spans = format.length(row), format.spans(row)
    if length <= capacity:
        return [row]
    pieces: list[Row] = []
    start = 0
    while start < length:
        stop = min(start + capacity, length)
        stop = stop if stop == length else _whole_before(stop, spans)
        if stop <= start:
            raise ValueError(
                f"the payload at token {start:,} is longer than capacity {capacity:,} and must stay whole; raise the "
                "capacity or drop the document"
            )
        pieces.append(format.cut(row, start, stop))
        start = stop
    return pieces


def _whole_before(place: int, spans: Sequence[tuple[int, int]]) -> int:
    return next((start for start, stop in spans if start < place < stop), place)


def _whole_after(place: int, spans: Sequence[tuple[int, int]]) -> int:
    return next((stop for start, stop in spans if start < place < stop), place)

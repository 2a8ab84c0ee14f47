"""Datasets for tests of packing on the fly: rows of known lengths, sources of every kind, and what packs hold."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pack_torch import Pack, PackedIterable, Sft
from torch.utils.data import IterableDataset

TOKENS = Sft(label_mode="tokens")


def packed(rows: object, **options: Any) -> PackedIterable:
    """Packs of ten tokens, of a window of three and blocks of four, unless told otherwise."""
    return PackedIterable(rows, **{"format": TOKENS, "capacity": 10, "window": 3, "block": 4, **options})


def rows_of_lengths(lengths: Sequence[int], first: int = 0) -> list[dict[str, Any]]:
    """Rows whose tokens are all their number."""
    return [{"input_ids": [first + number] * length} for number, length in enumerate(lengths)]


def some_rows(count: int, seed: int = 0, most: int = 9) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return rows_of_lengths([draw.randint(1, most) for _ in range(count)])


def held(pack: Pack) -> list[int]:
    """The tokens of a pack, which are the numbers of its rows."""
    return [int(token) for token in pack["input_ids"]]


def numbers(packs: Iterable[Pack]) -> list[int]:
    """Of whole rows: their numbers, as often as they are there, in order."""
    return sorted(row["input_ids"][0] for pack in packs for row in pack.documents())


class Stream:
    """What can only be iterated, again and again."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows
        self.asked = 0

    def __iter__(self) -> Iterator[Any]:
        for row in self.rows:
            self.asked += 1
            yield row


class Stateful(Stream):
    """What knows where it is, and goes on there."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__(rows)
        self.at = self.begin = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.begin = self.begin, 0
        while self.at < len(self.rows):
            self.asked += 1
            self.at += 1
            yield self.rows[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = self.begin = state["at"]


class Undeclared(IterableDataset[Any]):
    """An iterable dataset of which nobody knows whether it deals rows out to workers."""

    def __iter__(self) -> Iterator[Any]:
        return iter(some_rows(5))


def resumed_at_every_pack(make: Any) -> None:
    """Assert that a new dataset goes on exactly after every pack, from JSON, with the same packs and counts."""
    whole = make()
    straight, states = [], [whole.state_dict()]
    for pack in whole:
        straight.append((held(pack), pack.info))
        states.append(whole.state_dict())
    states.append(whole.state_dict())
    for place, state in enumerate(states):
        other: PackedIterable = make()
        other.load_state_dict(json.loads(json.dumps(state)))
        rest = [(held(pack), pack.info) for pack in other]
        assert rest == straight[place:]
        assert other.counts == whole.counts
        assert [held(pack) for pack in other] == [one for one, _ in straight]

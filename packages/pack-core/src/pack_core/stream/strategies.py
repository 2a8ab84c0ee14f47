"""The strategies: each a small pure function of what waits, of the room in the open pack and of its own memory.

All but `ConcatSplit` fill one pack after the other with whole documents. They differ in which document is next.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Literal

import attrs

from pack_core.errors import PackError
from pack_core.search.randomness import Randomness
from pack_core.types.stream import Choice, Room, Strategy, Waiting

_STEP = 0x9E3779B97F4A7C15  # of the state of SplitMix64 from one number to the next


@attrs.frozen
class NextFit:
    """The oldest; where that does not fit the pack closes, and it opens the next one.

    >>> from pack_core.stream import packs_of
    >>> [pack.lengths for pack in packs_of([6, 5, 3, 4], strategy="next_fit", capacity=10)]
    [(6,), (5, 3), (4,)]
    """

    def choose(self, waiting: Sequence[Waiting], room: Room, memory: Any) -> Choice:
        """Return the oldest or nothing."""
        return Choice(take=(0,) if room.fits(waiting[0]) else ())


@attrs.frozen
class FirstFit:
    """The oldest that fits.

    >>> from pack_core.stream import packs_of
    >>> [pack.lengths for pack in packs_of([6, 5, 3, 4], strategy="first_fit", capacity=10)]
    [(6, 3), (5, 4)]
    """

    def choose(self, waiting: Sequence[Waiting], room: Room, memory: Any) -> Choice:
        """Return the oldest that fits, or nothing."""
        return Choice(take=next(((place,) for place, unit in enumerate(waiting) if room.fits(unit)), ()))


@attrs.frozen
class BestFit:
    """The oldest; where that does not fit, what leaves the least room, which is the longest that fits.

    >>> from pack_core.stream import packs_of
    >>> [pack.lengths for pack in packs_of([6, 5, 3, 4], strategy="best_fit", capacity=10)]
    [(6, 4), (5, 3)]
    """

    def choose(self, waiting: Sequence[Waiting], room: Room, memory: Any) -> Choice:
        """Return the oldest, or the longest that fits, or nothing."""
        return Choice(take=(0,) if room.fits(waiting[0]) else _longest(waiting, room))


@attrs.frozen
class LongestFirst:
    """The longest that fits, always: best fit decreasing over the window. Short documents wait; see `max_wait`.

    >>> from pack_core.stream import packs_of
    >>> [pack.lengths for pack in packs_of([3, 5, 6, 4], strategy="longest_first", capacity=10)]
    [(6, 4), (5, 3)]
    """

    def choose(self, waiting: Sequence[Waiting], room: Room, memory: Any) -> Choice:
        """Return the longest that fits, or nothing."""
        return Choice(take=_longest(waiting, room))


@attrs.frozen
class LengthGrouped:
    """The oldest opens a pack; then whatever fits and is nearest in length to the mean of what the pack holds.

    Each token of a pack then costs about the same: the Σ length² that `max_cost` limits is about the tokens times that
    length. Where nothing like it waits any more a pack is filled with what there is, so a larger window means more
    alike. Under a `max_cost` it makes some more packs than `best_fit`, which mixes long and short.

    >>> from pack_core.stream import packs_of
    >>> [pack.lengths for pack in packs_of([6, 2, 5, 3], strategy="length_grouped", capacity=11)]
    [(6, 5), (2, 3)]
    """

    def choose(self, waiting: Sequence[Waiting], room: Room, memory: Any) -> Choice:
        """Return the oldest for an empty pack, else the nearest in length that fits, or nothing."""
        if not room.held:
            return Choice(take=(0,))
        mean = room.used / room.held
        fitting = room.fitting(waiting)
        far = [abs(waiting[place].length / len(waiting[place].parts) - mean) for place in fitting]
        return Choice(take=(fitting[far.index(min(far))],) if fitting else ())


@attrs.frozen
class ConcatSplit:
    """The oldest, cut where the pack is full: every pack but the last is exactly full, and documents are cut.

    >>> from pack_core.stream import packs_of
    >>> [pack.lengths for pack in packs_of([6, 5, 3, 4], strategy="concat_split", capacity=10)]
    [(6, 4), (1, 3, 4)]
    """

    cuts = True

    def choose(self, waiting: Sequence[Waiting], room: Room, memory: Any) -> Choice:
        """Return the oldest."""
        return Choice(take=(0,))


@attrs.frozen
class Binned:
    """Classes of documents, drawn at random with given weights; of the class drawn, the oldest that fits.

    A class is a range of lengths, or a document's `kind` where no edges are given. With `surplus="keep"` the draw is
    among the classes of which something fits. Nothing is lost then, so that over a whole stream each class goes out as
    often as it came in: weights decide what comes first. With `surplus="discard"` the documents taken follow the
    weights: a pack closes where the class drawn has none that fits, and while none of it waits, the oldest document
    of the window is discarded and counted as `"surplus"`.

    Attributes:
        weights: of the classes, `[classes]`; only their ratios matter.
        edges: the lengths at which a class ends and the next starts, rising, `[classes - 1]`; none for classes by kind.
        surplus: `"keep"` or `"discard"`.
        seed: of the draws; for a strategy given by its name that of the stream.

    Raises:
        PackError: weights are not of at least one class, are negative or all 0, or edges do not fit them.

    >>> from pack_core.stream import packs_of
    >>> how = {"strategy": "binned", "capacity": 10, "strategy_options": {"weights": (1, 0), "edges": (5,)}}
    >>> [pack.lengths for pack in packs_of([1, 9, 1, 9, 1], **how)]
    [(1, 1, 1), (9,), (9,)]
    """

    weights: tuple[float, ...] = attrs.field(converter=tuple)
    edges: tuple[int, ...] = attrs.field(converter=tuple, default=())
    surplus: Literal["keep", "discard"] = "keep"
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuse weights that cannot be drawn by."""
        if not all(weight >= 0 for weight in self.weights) or not 0 < sum(self.weights) < float("inf"):
            raise PackError(f"weights are {self.weights!r}; they must be 0 or more each, and not 0 together")
        if self.edges and (len(self.edges) != len(self.weights) - 1 or [*self.edges] != sorted({*self.edges})):
            raise PackError(f"edges are {self.edges!r}; {len(self.weights)} weights need one rising edge less")
        if self.surplus not in ("keep", "discard"):
            raise PackError(f"surplus is {self.surplus!r}; it must be 'keep' or 'discard'")

    def choose(self, waiting: Sequence[Waiting], room: Room, memory: Any) -> Choice:
        """Return a document of the class drawn, nothing, or the oldest to discard; remember draws and class."""
        draws, drawn = memory or (0, None)
        kinds = self._kinds(waiting)
        fitting = {kinds[place]: place for place in reversed(room.fitting(waiting))}  # of every class the oldest
        if self.surplus == "keep":
            if not fitting:
                return Choice(memory=[draws, None])
            return Choice(take=(fitting[self._drawn(draws, sorted(fitting))],), memory=[draws + 1, None])
        if drawn is None:
            draws, drawn = draws + 1, self._drawn(draws, range(len(self.weights)))
        if drawn in fitting:
            return Choice(take=(fitting[drawn],), memory=[draws, None])
        return Choice(discard=() if drawn in kinds else ((0, "surplus"),), memory=[draws, drawn])

    def _kinds(self, waiting: Sequence[Waiting]) -> list[int]:
        if self.edges:
            return [bisect_right(self.edges, unit.length) for unit in waiting]
        kinds = [unit.kind for unit in waiting]
        if min(kinds) < 0 or max(kinds) >= len(self.weights):
            wrong = next(unit for unit in waiting if not 0 <= unit.kind < len(self.weights))
            raise PackError(
                f"document {wrong.key} is of kind {wrong.kind}, but weights are of {len(self.weights)} kinds, from 0 on"
            )
        return kinds

    def _drawn(self, draws: int, kinds: Sequence[int]) -> int:
        """Return one of the kinds by its weight; the first where all of them have weight 0."""
        word = Randomness(self.seed + draws * _STEP).word()
        point = word / 2**64 * sum(self.weights[kind] for kind in kinds)
        for kind in kinds:
            if point < self.weights[kind]:
                return kind
            point -= self.weights[kind]
        return max(kinds, key=lambda kind: (self.weights[kind] > 0, -kind))


STRATEGIES: dict[str, type[Strategy]] = {
    "next_fit": NextFit,
    "first_fit": FirstFit,
    "best_fit": BestFit,
    "longest_first": LongestFirst,
    "binned": Binned,
    "length_grouped": LengthGrouped,
    "concat_split": ConcatSplit,
}


def _longest(waiting: Sequence[Waiting], room: Room) -> tuple[int, ...]:
    """Return the place of the longest that fits, the oldest on ties."""
    fitting = room.fitting(waiting)
    return (max(fitting, key=lambda place: waiting[place].length),) if fitting else ()

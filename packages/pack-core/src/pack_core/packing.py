"""Lengths to packs: the one entry, `pack`; what cuts packs further is here by name too."""

import operator
from array import array
from collections.abc import Callable, Sequence

import attrs

from pack_core.arriving import best_fit, cut_row, first_fit, next_fit
from pack_core.decreasing import decreasing
from pack_core.equalize import check_method, equalize, fill, split
from pack_core.errors import LengthError, PackError
from pack_core.fewest import fewest
from pack_core.kernels.packing import FEW, Counts, Kernel, Pieces, Steps, packing_kernel
from pack_core.lengths import LARGEST, Lengths, as_integer, check_fit, label
from pack_core.types import Lost, Packing, Parts

__all__ = ["check_method", "equalize", "fill", "pack", "split"]

_OVERLONG = ("error", "drop", "truncate", "split")


def pack(
    lengths: Lengths,
    capacity: int,
    *,
    strategy: str = "next_fit",
    overlong: str = "error",
    max_documents: int | None = None,
    align: int = 1,
    seed: int = 0,
    attempts: int = 16,
    ids: Sequence[str | int] | None = None,
    kernels: str | None = None,
) -> Packing:
    """Return packs that hold every document exactly once, none over `capacity` tokens; a pack may be exactly full.

    Rollouts keep arrival order: that is `next_fit`, the default. For a dataset whose order does not matter take
    `best_fit_decreasing`, or `fewest` where every pack counts. Only `concat_split` cuts documents that would fit.

    | strategy | packs | documents of a pack |
    |---|---|---|
    | `next_fit` | one is open; it closes when the next document does not fit, and nothing looks back | as they arrive |
    | `first_fit` | the first one with room | as they arrive |
    | `best_fit` | the one with least room that suffices, the earliest on ties | as they arrive |
    | `first_fit_decreasing` | first fit, longest first | longest first, ties as they arrive |
    | `best_fit_decreasing` | best fit, longest first | longest first, ties as they arrive |
    | `fewest` | a search, until the lower bound is met or `attempts` are made | longest first, ties as they arrive |
    | `concat_split` | all documents in one row, cut at the capacity | as they arrive |

    Packs come in the order they are opened, of `fewest` by their longest documents.

    Args:
        lengths: tokens of each document, `[documents]`; anything `as_lengths` reads. NumPy reads arrays in place.
        capacity: most tokens a pack may hold.
        strategy: one of the table.
        overlong: what becomes of a document over the capacity: `"error"`, or `"drop"` it, `"truncate"` it to what
            fits, or `"split"` it into full parts and a rest. The result lists each with its tokens.
        max_documents: most documents, or parts, a pack may hold; 1 gives one a row; None for no cap.
        align: room is taken in steps of so many tokens, by each document for itself; "longest" is by that room.
        seed: for `fewest`, which draws at random from its third attempt on.
        attempts: most searches of `fewest`. No clock is looked at: the same arguments give the same packs.
        ids: names of the documents for error messages, `[documents]`.
        kernels: `"python"` or `"numpy"`, with the same result; None takes NumPy where it is installed and pays.

    Raises:
        LengthError: a length is not a whole number of at least 1, or is over `capacity`; the document is named.
        PackError: there are no documents, an option is unknown, or a number is below what it may be.

    >>> list(pack([300, 200, 400, 600], capacity=1024))
    [[0, 1, 2], [3]]
    >>> list(pack([300, 200, 400, 600], capacity=1024, strategy="best_fit_decreasing"))
    [[3, 2], [0, 1]]
    >>> packing = pack([9, 3], capacity=4, overlong="split")
    >>> list(packing), packing.split, packing.parts.stops
    ([[0], [0], [0, 1]], array('q', [0]), array('q', [4, 8, 9]))
    """
    if strategy not in _STRATEGIES:
        raise PackError(f"strategy is {strategy!r}; it must be one of {', '.join(map(repr, _STRATEGIES))}")
    if overlong not in _OVERLONG:
        raise PackError(f"overlong is {overlong!r}; it must be one of {', '.join(map(repr, _OVERLONG))}")
    capacity, align = as_integer(capacity, "capacity"), as_integer(align, "align")
    if align > capacity:
        raise PackError(f"align is {align:,} but capacity is {capacity:,}; no document would have room")
    cap = None if max_documents is None else as_integer(max_documents, "max_documents")
    asked = _Asked(
        capacity=capacity // align,
        most=cap or LARGEST,
        align=align,
        attempts=as_integer(attempts, "attempts", least=0),
        seed=as_integer(seed, "seed", least=-LARGEST),
    )
    kernel = packing_kernel(kernels, operator.length_hint(lengths, FEW))
    tokens, longest = kernel.read(lengths, ids)
    if not len(tokens):
        raise PackError("there are no lengths to pack; give at least one sample")
    room = asked.capacity * align
    over = kernel.over(tokens, room) if longest > room else array("q")
    if over and overlong == "error":
        check_fit(kernel.whole(tokens), capacity, ids)
        raise LengthError(
            f"{label(over[0], ids)} has {tokens[over[0]]:,} tokens, which take more than the capacity of {capacity:,} "
            f"when rounded up to a multiple of {align:,}; make capacity such a multiple, or choose another overlong"
        )
    if over and (strategy, overlong) != ("concat_split", "split"):
        return _of_pieces(kernel, tokens, over, room, overlong, strategy, asked)
    order, offsets, parts = _STRATEGIES[strategy](kernel, Pieces(tokens), asked)
    return Packing(order, offsets, parts=parts)


@attrs.frozen
class _Asked:
    """What `pack` was asked for; the capacity in steps of the alignment."""

    capacity: int
    most: int
    align: int
    attempts: int
    seed: int


def _of_pieces(
    kernel: Kernel, tokens: Sequence[int], over: Sequence[int], room: int, overlong: str, strategy: str, asked: _Asked
) -> Packing:
    """Pack what is left of documents when those over the room are dropped, cut short or split."""
    lost = Lost(kernel.whole(over), array("q", [tokens[place] - room * (overlong == "truncate") for place in over]))
    if overlong == "drop":
        pieces = kernel.without(tokens, over)
        if not len(pieces.tokens):
            return Packing(array("q"), array("q", [0]), dropped=lost)
    else:
        pieces = kernel.clipped(tokens, room) if overlong == "truncate" else kernel.cut(tokens, room)
    order, offsets, cuts = _STRATEGIES[strategy](kernel, pieces, asked)
    partial = Parts(*kernel.partial(pieces, tokens, order)) if overlong != "drop" else Parts()
    if pieces.documents is not None:
        order = kernel.take(pieces.documents, order)
    return Packing(
        order,
        offsets,
        dropped=lost if overlong == "drop" else Lost(),
        truncated=lost if overlong == "truncate" else Lost(),
        parts=_merged(partial, cuts),
    )


def _merged(partial: Parts, cuts: Parts) -> Parts:
    """Return both, those of the second where both have a place: it cuts what the first has cut."""
    if not partial or not cuts:
        return partial or cuts
    places = {
        part[0]: part for parts in (partial, cuts) for part in zip(parts.places, parts.starts, parts.stops, strict=True)
    }
    return Parts(*(array("q", column) for column in zip(*(places[place] for place in sorted(places)), strict=True)))


_Laid = tuple["array[int]", "array[int]", Parts]


def _sizes(kernel: Kernel, pieces: Pieces, asked: _Asked) -> Sequence[int]:
    return kernel.rounded(pieces.tokens, asked.align)


def _next_fit(kernel: Kernel, pieces: Pieces, asked: _Asked) -> _Laid:
    sizes = kernel.listed(_sizes(kernel, pieces, asked))
    return array("q", range(len(sizes))), next_fit(sizes, asked.capacity, asked.most), Parts()


def _concat_split(kernel: Kernel, pieces: Pieces, asked: _Asked) -> _Laid:
    totals = kernel.totals(_sizes(kernel, pieces, asked))
    return cut_row(kernel.listed(pieces.tokens), totals, asked.capacity, asked.most, asked.align)


def _first_fit(kernel: Kernel, pieces: Pieces, asked: _Asked) -> _Laid:
    sizes = kernel.listed(_sizes(kernel, pieces, asked))
    return *kernel.offsets_of(*first_fit(sizes, asked.capacity, asked.most)), Parts()


def _best_fit(kernel: Kernel, pieces: Pieces, asked: _Asked) -> _Laid:
    sizes = kernel.listed(_sizes(kernel, pieces, asked))
    return *kernel.offsets_of(*best_fit(sizes, asked.capacity, asked.most)), Parts()


def _ranked(steps: Callable[[Counts, _Asked], Steps]) -> Callable[[Kernel, Pieces, _Asked], _Laid]:
    """Return the strategy that counts and ranks documents by size, and lays them as the steps say."""

    def strategy(kernel: Kernel, pieces: Pieces, asked: _Asked) -> _Laid:
        counts, ranked = kernel.group(_sizes(kernel, pieces, asked))
        return *kernel.lay(ranked, steps(counts, asked)), Parts()

    return strategy


_STRATEGIES: dict[str, Callable[[Kernel, Pieces, _Asked], _Laid]] = {
    "next_fit": _next_fit,
    "first_fit": _first_fit,
    "best_fit": _best_fit,
    "first_fit_decreasing": _ranked(lambda counts, asked: decreasing(counts, asked.capacity, asked.most, best=False)),
    "best_fit_decreasing": _ranked(lambda counts, asked: decreasing(counts, asked.capacity, asked.most, best=True)),
    "concat_split": _concat_split,
    "fewest": _ranked(
        lambda counts, asked: fewest(counts, asked.capacity, asked.most, attempts=asked.attempts, seed=asked.seed)
    ),
}

"""Which capacity suits the documents: a sweep, its knee, and one plain sentence."""

from collections.abc import Sequence

import attrs
import numpy as np

from pack_torch.offline.errors import DatasetError, counted, percent
from pack_torch.offline.layout import Recipe, Row, lay_out

#: A capacity is good enough where its yield is this share of the best in the sweep.
ENOUGH = 0.99


@attrs.frozen
class Trial:
    """What one capacity comes to, packed by best fit, longest first, with longer documents cut short.

    Attributes:
        capacity: tokens of a row.
        rows: how many.
        fill: share of their room that holds tokens.
        overlong: documents longer than it.
        kept: share of all tokens that is in a row.
        shapes: different row lengths, if rows are not padded: as many shapes a compiler would see.
        documents: documents in the fullest row.
    """

    capacity: int
    rows: int
    fill: float
    overlong: int
    kept: float
    shapes: int
    documents: int

    @property
    def gain(self) -> float:
        """Fill times what is kept: room wasted and tokens cut count alike."""
        return self.fill * self.kept


@attrs.frozen
class Advice:
    """A sweep over capacities, and the one to take: the smallest that is nearly as good as the best.

    Attributes:
        trials: by capacity, rising.
        knee: the one to take.
        longest: tokens of the longest document.
    """

    trials: tuple[Trial, ...]
    knee: Trial
    longest: int

    @property
    def sentence(self) -> str:
        """The advice in one plain sentence."""
        knee = self.knee
        below = next((trial for trial in reversed(self.trials) if trial.capacity < knee.capacity), None)
        best = max(trial.gain for trial in self.trials)
        held = (
            "nothing is cut"
            if not knee.overlong
            else (
                f"{counted(knee.overlong, 'document')} over it would have to be cut, split or dropped "
                f"({percent(1 - knee.kept, 2)} of the tokens; the longest has {self.longest:,})"
            )
        )
        text = (
            f"Take a capacity of {knee.capacity:,}: {counted(knee.rows, 'row')}, {percent(knee.fill)} full, and {held}"
        )
        if below is not None:
            text += f"; {below.capacity:,} would waste or cut {percent(1 - below.gain)} of its room or the tokens"
        return f"{text}; no larger one of the sweep gains more than {percent(max(0.0, best - knee.gain))}."


def advise(lengths: Row, capacities: Sequence[int] | None = None) -> Advice:
    """Return a sweep over capacities for documents of these lengths.

    The advice is the smallest capacity whose yield (fill times share of tokens kept) reaches 99 % of the best. It looks
    at packing alone; a smaller capacity also means less attention work and memory a row, a larger one fewer rows.

    Args:
        lengths: tokens of each document, `[documents]`; 0 is passed over.
        capacities: those to try; None for powers of two and the halves between, from the median to the
            longest document.

    Raises:
        DatasetError: no document has a token, or there is no capacity to try.

    >>> advise(np.array([60, 60, 40, 30]), [64, 100, 200]).knee.capacity
    100
    """
    lengths = np.asarray(lengths)
    held = lengths[lengths > 0]
    if not len(held):
        raise DatasetError(f"there is nothing to plan: {counted(len(lengths), 'document')}, none with a token")
    if capacities is not None and not len(capacities):
        raise DatasetError("capacities is empty; name at least one, or leave it out (None) for a sweep")
    tried = sorted(set(capacities)) if capacities is not None else _capacities(held)
    trials = tuple(_try(held, capacity) for capacity in tried)
    best = max(trial.gain for trial in trials)
    knee = next(trial for trial in trials if trial.gain >= ENOUGH * best)
    return Advice(trials, knee, int(held.max()))


def _try(lengths: Row, capacity: int) -> Trial:
    layout = lay_out(lengths, Recipe(capacity, overlong="truncate"))
    totals = layout.rows.totals()
    kept = int(totals.sum())
    return Trial(
        capacity=capacity,
        rows=len(totals),
        fill=kept / (len(totals) * capacity),
        overlong=layout.losses.truncated,
        kept=kept / int(lengths.sum()),
        shapes=len(np.unique(totals)),
        documents=int(np.diff(layout.rows.offsets).max()),
    )


def _capacities(lengths: Row) -> list[int]:
    """Return powers of two and the halves between, from around the median to twice the longest or all tokens."""
    low = max(2, 1 << int(np.median(lengths)).bit_length())
    high = max(low, min(1 << int(2 * lengths.max() - 1).bit_length(), 1 << int(lengths.sum() - 1).bit_length()))
    powers = [1 << k for k in range(low.bit_length() - 1, high.bit_length())]
    return sorted({*powers, *(power * 3 // 2 for power in powers[:-1])})

"""What a layout or an advice comes to, in words and in characters for a terminal."""

from collections.abc import Sequence

import numpy as np

from pack_torch.offline.advice import Advice
from pack_torch.offline.errors import counted, percent
from pack_torch.offline.layout import Layout, Row

_WIDTH = 64
_SHOWN = 8


def show_layout(layout: Layout) -> str:
    """Return the report of packed rows: fill, bound, losses, the histogram of lengths and the first rows.

    >>> from pack_torch.offline.layout import Recipe, lay_out
    >>> print(show_layout(lay_out(np.array([3, 2, 5, 4, 6]), Recipe(10))).splitlines()[1])
    rows        2 rows of up to 10 tokens, 100.00 % full, by best_fit_decreasing
    """
    found, recipe = layout.certificate(), layout.recipe
    lengths = layout.lengths
    spread = f"{lengths.min():,} to {lengths.max():,} each, median {int(np.median(lengths)):,}"
    given = counted(len(lengths) + layout.losses.empty, "document")
    full = f"{percent(found.fill, 2)} full, by {recipe.strategy}"
    told = [
        f"documents   {given}, {counted(int(lengths.sum()), 'token')}: {spread}",
        f"rows        {counted(found.packs, 'row')} of up to {recipe.capacity:,} tokens, {full}",
        f"bound       no packing of these pieces has fewer than {counted(found.floors.packs, 'row')}: "
        f"{found.over:,} over it",
    ]
    told += [f"lost        {line}" for line in layout.losses.lines() or ["nothing"]]
    if layout.split:
        told.append(f"split       {counted(layout.split, 'document')} lie in several parts, all their tokens kept")
    return "\n".join([*told, "", *histogram(lengths), "", *picture(layout), ""])


def show_advice(advice: Advice, lengths: Row) -> str:
    """Return the sweep as a table with bars, and the advice in one sentence.

    >>> from pack_torch.offline.advice import advise
    >>> lengths = np.array([60, 60, 40, 30])
    >>> print(show_advice(advise(lengths, [64, 100, 200]), lengths).splitlines()[-4].split()[:4])
    ['100', '2', '95.0', '%']
    """
    told = [*histogram(lengths[lengths > 0]), ""]
    told.append(f"{'capacity':>10} {'rows':>12} {'full':>8} {'kept':>9} {'longer':>9} {'shapes':>7}  full x kept")
    for trial in advice.trials:
        drawn = f"{'#' * round(20 * trial.gain):<20}{'  <- knee' if trial is advice.knee else ''}"
        told.append(
            f"{trial.capacity:>10,} {trial.rows:>12,} {percent(trial.fill):>8} {percent(trial.kept, 2):>9} "
            f"{trial.overlong:>9,} {trial.shapes:>7,}  {drawn}".rstrip()
        )
    return "\n".join([*told, "", advice.sentence, ""])


def histogram(lengths: Row) -> list[str]:
    """Return a line for each power of two: documents of that many tokens, and a bar.

    >>> histogram(np.array([1, 2, 3]))[1].split()
    ['1', '1', '################']
    """
    powers = np.frexp(lengths)[1] - 1
    counts = np.bincount(powers)
    top = counts.max()
    told = ["tokens of a document            documents"]
    for power in range(int(powers.min()), len(counts)):
        low, high = 1 << power, (1 << power + 1) - 1
        span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        told.append(f"{span:>22} {counts[power]:>18,} {'#' * round(32 * counts[power] / top)}".rstrip())
    return told


def picture(layout: Layout) -> list[str]:
    """Return the rows of a layout as lines, eight of them spread evenly; documents alternate, room left is dotted."""
    rows, capacity = layout.rows, layout.recipe.capacity
    shown = np.unique(np.linspace(0, len(rows) - 1, min(_SHOWN, len(rows))).round().astype(int))
    told = [f"{'row':>10} {counted(capacity, 'token')} wide; documents in turn = and #, room left ."]
    for p in shown:
        told.append(f"{p:>10,} {_drawn(rows.sizes[rows.offsets[p] : rows.offsets[p + 1]].tolist(), capacity)}")
    return told


def _drawn(sizes: Sequence[int], capacity: int) -> str:
    ends = [round(_WIDTH * end / capacity) for end in np.cumsum(sizes).tolist()]
    drawn = "".join(
        "=#"[place % 2] * (end - begin) for place, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
    )
    return drawn.ljust(_WIDTH, ".")

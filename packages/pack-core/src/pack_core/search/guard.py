"""What a chosen order may not make worse."""

import math

from pack_core.kernels.loads import Loads
from pack_core.search.layout import Layout
from pack_core.types import GUARDED

#: The guarded figures, in the order of `GUARDED`.
Standing = tuple[int, int, float, float, int, int, int]


def standing(layout: Layout, loads: Loads) -> Standing:
    """Return the guarded figures of a layout.

    Skews are quotients of exact integers, one division each and one exact sum, so that every kernel gives the same.
    """
    figures = loads.figures()
    destinations = layout.rules.ranks * layout.packs // len(figures.totals)
    skews = [
        peak * destinations / total if total else 1.0 for peak, total in zip(figures.peaks, figures.totals, strict=True)
    ]
    return (
        layout.packs,
        loads.work,
        math.fsum(skews) / len(skews),
        max(skews),
        figures.largest,
        layout.token_work,
        layout.pair_work,
    )


def worse(candidate: Standing, baseline: Standing) -> list[str]:
    """Return which guarded figures of the candidate are worse than the baseline's, by name.

    >>> worse((3, 90, 1.5, 2.0, 40, 70, 600), (3, 100, 1.4, 2.0, 50, 70, 600))
    ['skew_mean']
    """
    return [name for name, one, other in zip(GUARDED, candidate, baseline, strict=True) if one > other]

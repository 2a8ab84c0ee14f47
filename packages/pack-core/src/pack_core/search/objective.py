"""What a search brings down: the three works, each over its value in arrival order."""

import math
from collections.abc import Sequence

import attrs

from pack_core.kernels.loads import Loads, Weights
from pack_core.search.layout import Layout, Swap

_WARMTH = 0.1


@attrs.frozen
class Objective:
    """The sum of expert, token and pair work, each over its value in arrival order, on one common denominator.

    Integers, so that nothing is decided by rounding. A work that arrival order does not have counts as 1.
    """

    expert: int
    token: int
    pair: int

    def value(self, expert: int, token: int, pair: int) -> int:
        """Return the objective times the product of the three values of arrival order.

        >>> Objective(2, 3, 5).value(2, 3, 5) == 3 * 2 * 3 * 5
        True
        """
        x, a, q = max(self.expert, 1), max(self.token, 1), max(self.pair, 1)
        return expert * a * q + token * x * q + pair * x * a

    def weights(self) -> Weights:
        """Return the same as weights for estimates."""
        return Weights.of(self.expert, self.token, self.pair)

    def falls(self, layout: Layout, loads: Loads, swap: Swap) -> bool:
        """Return whether a swap that leaves the objective alone strictly lowers its smooth surrogate.

        Each largest value becomes `t log sum exp(x / t)` with x the value over that of arrival order and t = 0.1 /
        packs: it also sees the second largest, and so leads off a plateau. Only packs that change are looked at.
        """
        rows = layout.rows_after(swap.changes)
        warmth = _WARMTH / layout.packs
        before = [self._smooth(loads.loads_of(p), layout.tokens[p], layout.squares[p], warmth) for p in rows]
        after = [self._smooth(loads.loads_of(p, swap.changes), *rows[p], warmth) for p in rows]
        return math.fsum(after) < math.fsum(before)

    def _smooth(
        self, loads: Sequence[Sequence[int]], tokens: Sequence[int], squares: Sequence[int], warmth: float
    ) -> float:
        rows = [(row, self.expert) for row in loads] + [(tokens, self.token), (squares, self.pair)]
        return math.fsum(_log_sum_exp(row, max(whole, 1) * warmth) * warmth for row, whole in rows)


def _log_sum_exp(values: Sequence[int], unit: float) -> float:
    top = max(values)
    return top / unit + math.log(math.fsum([math.exp((value - top) / unit) for value in values]))

"""Swaps chosen by price: the search this package uses unless told otherwise.

In each layer of each pack only the most loaded destination costs anything. What a sample brings to those places is
its price in the pack it lies in, and what it would bring elsewhere its price there; so one table of prices says at once
what every swap would save. The best ones are then scored exactly, and taken if the objective falls.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import attrs

from pack_core.kernels.loads import Loads
from pack_core.search.guard import Standing, standing, worse
from pack_core.search.layout import Layout, Rules, Swap
from pack_core.search.objective import Objective
from pack_core.search.randomness import Randomness

#: Attempts drawn together: for each of fourteen samples its best partner and its best of like length, and four pairs
#: at random. The samples come round in turn, in an order shuffled anew for each round. The size belongs to the
#: algorithm, not to a kernel: another one is another plan.
_DONORS, _RANDOM = 14, 4
_KINDS = ("targeted", "near")

#: Attempts without a new lowest objective after which the search goes back to the lowest and is shaken, and swaps
#: scored without one after which it ends.
_PATIENCE, _STAGNATION = 256, 256
#: Swaps of a shake, ties of a batch looked at closely, attempts for which a swap that went uphill is not undone.
_SHAKEN, _TIES, _TABU = 3, 4, 320


@attrs.frozen
class Limits:
    """When a search ends, apart from having nothing left to do."""

    proposals: int
    bounds: tuple[int, int, int]
    expired: Callable[[int], bool]


class PricedSearch:
    """A search of one step under way; `run` carries it on from one order.

    Attributes:
        best: the best order that the guard let pass, with its standing.
        stop: why the last run ended.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        rules: Rules,
        make_loads: Callable[[Layout], Loads],
        objective: Objective,
        baseline: tuple[tuple[int, ...], Standing],
        limits: Limits,
        seed: int,
        slot_limit: int | None,
    ) -> None:
        """Start with the baseline as the best order."""
        self._lengths, self._rules, self._make_loads, self._objective = lengths, rules, make_loads, objective
        self._weights, self._limits, self._slot_limit = objective.weights(), limits, slot_limit
        self._random = Randomness(seed)
        self._baseline, self.best = baseline[1], baseline
        self._best_value = self._value_of(baseline[1])
        self._tabu: dict[tuple[int, int], int] = {}
        self._near = _neighbours(lengths)
        self._round: list[int] = []
        self.attempts = self.proposals = self.estimated = 0
        self.screened: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.rejections: Counter[str] = Counter()
        self.paths: Counter[str] = Counter()
        self.stop = "no_candidates"

    def run(self, order: Sequence[int]) -> None:
        """Search from an order until a limit is met or nothing new is found."""
        self._enter(order)
        home, lowest, still, idle = self._layout.order(), self._value, 0, 0
        while not self._ended(idle):
            if still >= _PATIENCE:
                self._enter(home)
                self._shake()
                still = 0
            drawn, scored = self.attempts, self.proposals
            self._batch()
            still += self.attempts - drawn
            idle += max(self.proposals - scored, 1)
            if self._value < lowest:
                home, lowest, still, idle = self._layout.order(), self._value, 0, 0

    def _enter(self, order: Sequence[int]) -> None:
        self._layout = Layout(order, self._lengths, self._rules)
        self._loads = self._make_loads(self._layout)
        self._expert_work = self._loads.work
        self._seen: set[tuple[int, int]] = set()
        self._value = self._valued(self._expert_work, self._layout.token_work, self._layout.pair_work)
        self._offer()

    def _ended(self, idle: int) -> bool:
        _, expert, _, _, _, token, pair = self.best[1]  # where the search stands, the guard may refuse to stay
        works = (expert, token, pair)
        if all(work <= bound for work, bound in zip(works, self._limits.bounds, strict=True)):
            self.stop = "lower_bound"
        elif len(self._lengths) < 2:
            self.stop = "no_candidates"
        elif self.proposals >= self._limits.proposals:
            self.stop = "proposal_budget"
        elif self._limits.expired(self.attempts):
            self.stop = "deadline"
        elif idle >= _STAGNATION:
            self.stop = "stagnation"
        else:
            return False
        return True

    def _batch(self) -> None:
        """Draw, score and decide one batch."""
        swaps = self._weighed(self._drawn())
        works = self._works([swap for swap, _ in swaps])
        self.proposals += len(swaps)
        self.paths.update(swap.path for swap, _ in swaps)
        values = [
            self._valued(work, swap.token_work, swap.pair_work) for work, (swap, _) in zip(works, swaps, strict=True)
        ]
        ranked = sorted(range(len(swaps)), key=lambda number: (values[number], number))
        lower = [number for number in ranked if values[number] < self._value]
        if lower:
            self._take(swaps, works, lower)
        elif not self._creep([pair for pair, value in zip(swaps, values, strict=True) if value == self._value]):
            self._climb([(swaps[number][0], works[number]) for number in ranked[:1]])

    def _drawn(self) -> list[tuple[int, int, str]]:
        """The next attempts, as pairs of samples with their kind."""
        samples = len(self._lengths)
        donors = self._next(min(_DONORS, samples))
        found = self._loads.screen(self._layout, donors, [self._near[donor] for donor in donors], self._weights)
        self.estimated += len(donors) * samples
        pairs = [
            (donor, partner, kind)
            for donor, partners in zip(donors, found, strict=True)
            for partner, kind in zip(partners, _KINDS, strict=False)
        ]
        for _ in range(_RANDOM):
            first, second = self._random.distinct(2, samples)
            pairs.append((first, second, "random"))
        return pairs

    def _next(self, count: int) -> list[int]:
        """The samples whose turn it is."""
        turn: list[int] = []
        while len(turn) < count:
            self._round = self._round or self._random.shuffled(len(self._lengths))
            sample = self._round.pop()
            if sample not in turn:
                turn.append(sample)
        return turn

    def _weighed(self, pairs: Sequence[tuple[int, int, str]]) -> list[tuple[Swap, str]]:
        """The swaps worth scoring; the others are counted by reason."""
        swaps: list[tuple[Swap, str]] = []
        for first, second, kind in pairs:
            if len(swaps) + self.proposals >= self._limits.proposals:
                break
            self.attempts += 1
            if second < 0:
                self.screened["no_partner"] += 1
                continue
            pair = (min(first, second), max(first, second))
            known = pair in self._seen or self._tabu.get(pair, 0) > self.attempts
            swap = "seen" if known else self._layout.weigh(*pair)
            self._seen.add(pair)
            if isinstance(swap, str):
                self.screened[swap] += 1
            else:
                swaps.append((swap, kind))
        return swaps

    def _take(self, swaps: Sequence[tuple[Swap, str]], works: Sequence[int], ranked: Sequence[int]) -> None:
        """Carry out the best swap and, after it, what still lowers the objective of the others.

        Savings in other packs add up; a swap that shares a pack with one taken is scored again.
        """
        scored_at, touched = self._expert_work, set[int]()
        for number in ranked:
            (swap, kind), work = swaps[number], works[number]
            if swap.layout is not None:
                if not touched:
                    self._enter(swap.layout.order())
                    self.accepted[kind] += 1
                    return
                continue
            if touched:
                again = self._layout.weigh(swap.first, swap.second)
                if isinstance(again, str) or again.layout is not None:
                    continue
                alike = again.path == swap.path == "fixed"
                if alike and touched.isdisjoint(p for _, p, _, _ in swap.changes):
                    work += self._expert_work - scored_at
                elif self.proposals < self._limits.proposals:
                    work = self._loads.score([again.changes])[0]
                    self.attempts += 1
                    self.proposals += 1
                    self.paths[again.path] += 1
                else:
                    return
                swap = again
                if self._valued(work, swap.token_work, swap.pair_work) >= self._value:
                    continue
            self._apply(swap, work)
            self.accepted[kind] += 1
            touched.update(p for _, p, _, _ in swap.changes)

    def _creep(self, ties: Sequence[tuple[Swap, str]]) -> bool:
        """Take the first swap that keeps the objective and lowers the surrogate."""
        for swap, _ in ties[:_TIES]:
            if self._objective.falls(self._layout, self._loads, swap):
                self._apply(swap, self._expert_work)
                self.accepted["plateau"] += 1
                return True
        return False

    def _climb(self, best: Sequence[tuple[Swap, int]]) -> None:
        """Take the least bad swap of a batch without a good one, and do not undo it soon: a local optimum is left."""
        for swap, work in best:
            if swap.layout is None:
                self._apply(swap, work)
                self.accepted["uphill"] += 1
                self._tabu[min(swap.first, swap.second), max(swap.first, swap.second)] = self.attempts + _TABU

    def _apply(self, swap: Swap, expert_work: int) -> None:
        self._layout.apply(swap)
        self._loads.apply(swap.changes)
        self._expert_work, self._seen = expert_work, set()
        self._value = self._valued(expert_work, self._layout.token_work, self._layout.pair_work)
        self._offer()

    def _shake(self) -> None:
        """Carry out a few swaps at random, whatever they cost, to leave a local optimum."""
        left = _SHAKEN
        for _ in range(4 * _SHAKEN):
            swap = self._layout.weigh(*self._random.distinct(2, len(self._lengths)))
            if left and not isinstance(swap, str) and swap.layout is None:
                self._apply(swap, self._loads.score([swap.changes])[0])
                self.accepted["shaken"] += 1
                left -= 1

    def _works(self, swaps: Sequence[Swap]) -> list[int]:
        scored = iter(self._loads.score([swap.changes for swap in swaps if swap.layout is None]))
        return [next(scored) if swap.layout is None else self._make_loads(swap.layout).work for swap in swaps]

    def _valued(self, expert: int, token: int, pair: int) -> int:
        return self._objective.value(expert, token, pair)

    def _value_of(self, found: Standing) -> int:
        return self._valued(found[1], found[5], found[6])

    def _offer(self) -> None:
        """Keep the present order if it is the best so far and the guard lets it pass."""
        if self._value >= self._best_value:
            return
        found = standing(self._layout, self._loads)
        refused = worse(found, self._baseline)
        if self._slot_limit is not None and found[4] > self._slot_limit:
            refused.append("slot_limit")
        self.rejections.update(refused)
        if not refused:
            self.best, self._best_value = (self._layout.order(), found), self._value


def _neighbours(lengths: Sequence[int]) -> list[list[int]]:
    """For each sample, those nearest to it by length: an eighth of all on either side, four at least."""
    ranked = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    reach = max(4, len(lengths) // 8)
    near: list[list[int]] = [[] for _ in lengths]
    for place, index in enumerate(ranked):
        near[index] = ranked[max(0, place - reach) : place] + ranked[place + 1 : place + 1 + reach]
    return near

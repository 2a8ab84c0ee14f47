"""What planning takes off a work: before, after and bound, summed over optimizer steps. Counts are not seconds."""

from collections import Counter
from collections.abc import Iterable, Sequence

import attrs
from pack_core import SearchTrace, WorkReport

#: The works that have a bound, and what they are called; expert work is known only where routes are.
WORKS = {
    "packs_per_rank": "packs of a rank",
    "critical_work_proxy": "expert work",
    "attention_token_work": "token work",
    "attention_pair_work": "pair work",
}

#: Why a search stopped, in words; the key is what the trace says.
STOPS = {
    "lower_bound": "every bound reached",
    "stagnation": "no better order for long",
    "proposal_budget": "proposals used up",
    "deadline": "time used up",
    "no_candidates": "nothing to exchange",
}


@attrs.frozen
class Gain:
    """One work of several optimizer steps: in arrival order, as planned, and what no packing can go below.

    >>> gain = Gain("attention_token_work", before=100, after=70, bound=60)
    >>> gain.removable, gain.removed, round(gain.gap, 1)
    (40.0, 75.0, 16.7)
    """

    name: str
    before: int
    after: int
    bound: int

    @property
    def title(self) -> str:
        """What the work is called."""
        return WORKS[self.name]

    @property
    def removable(self) -> float:
        """Percent of the work in arrival order that lie over the bound."""
        return 100.0 * (self.before - self.bound) / self.before if self.before else 0.0

    @property
    def removed(self) -> float | None:
        """Percent of what lay over the bound that are gone; None where nothing did."""
        over = self.before - self.bound
        return 100.0 * (self.before - self.after) / over if over > 0 else None

    @property
    def gap(self) -> float:
        """Percent by which the work as planned is over the bound."""
        return 100.0 * (self.after - self.bound) / self.bound if self.bound else 0.0


def gains(reports: Sequence[WorkReport]) -> tuple[Gain, ...]:
    """Return the works of all reports added up, those that every report knows.

    >>> from pack_core import Bounds, Work
    >>> report = WorkReport(Work(4, 100, 900, 200, 60, 0.5), Work(3, 70, 600, 200, 70, 0.7), Bounds(2, 60, 500))
    >>> gains([report, report])[0]
    Gain(name='packs_per_rank', before=8, after=6, bound=4)
    """
    found = []
    for name in WORKS if reports else ():
        figures = [[getattr(one, name) for one in (each.before, each.after, each.bounds)] for each in reports]
        if all(value is not None for three in figures for value in three):
            before, after, bound = map(sum, zip(*figures, strict=True))
            found.append(Gain(name, before, after, bound))
    return tuple(found)


def stops_of(traces: Iterable[SearchTrace]) -> dict[str, int]:
    """Return how often searches stopped for each reason, the most frequent first."""
    return dict(Counter(trace.stop for trace in traces).most_common())


def told_stops(stops: dict[str, int]) -> str:
    """Return why searches stopped, in words.

    >>> told_stops({"deadline": 3, "lower_bound": 1})
    'time used up 3, every bound reached 1'
    """
    return ", ".join(f"{STOPS.get(stop, stop)} {count:,}" for stop, count in stops.items())


def told_layers(layers: Sequence[int], routed_layers: int) -> str:
    """Return which layers expert figures are about.

    >>> told_layers((1, 2), 2), told_layers((1, 4, 7), 9)
    ('both routed layers', '3 of 9 routed layers (layers 1, 4, 7)')
    """
    if len(layers) >= routed_layers:
        whole = {1: "the one routed layer", 2: "both routed layers"}
        return whole.get(routed_layers, f"all {routed_layers:,} routed layers")
    shown = [*map(str, layers[:3]), "…", str(layers[-1])] if len(layers) > 6 else [*map(str, layers)]
    named = f"layer{'' if len(layers) == 1 else 's'} {', '.join(shown)}"
    return f"{len(layers):,} of {routed_layers:,} routed layers ({named})"

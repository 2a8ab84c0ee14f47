"""What the order of the samples does to the work: what another order could remove, or what the balanced one removed."""

import math
from typing import Any

import attrs
from pack_core import SearchTrace, WorkReport

from pack_miles.reporting.gain import Gain, gains, stops_of, told_layers

#: The options that turn another order on, as they are written in a run file.
BALANCED = 'core.pack_order = "balanced"'
EXPERTS = "core.expert_balanced_packing = true"


@attrs.frozen
class Outlook:
    """Works of complete optimizer steps in arrival order and in another, against the bounds that no order can beat.

    The other order is the balanced one that was planned, with its search in `traces` and the `seconds` of planning;
    or, where arrival order was planned, the best one constructed at once, without a search.
    `expert_unknown` says why expert work is not among them, "" where it is.
    """

    pack_order: str
    reports: tuple[WorkReport, ...]
    traces: tuple[SearchTrace, ...] = ()
    seconds: float = 0.0
    expert_unknown: str = ""

    @property
    def balanced(self) -> bool:
        """Whether the other order is the one planned."""
        return self.pack_order == "balanced"

    @property
    def gains(self) -> tuple[Gain, ...]:
        """The works that have a bound, summed over the steps."""
        return gains(self.reports)

    @property
    def proposals(self) -> int:
        """Swaps that the searches of all steps scored fully."""
        return sum(trace.proposals for trace in self.traces)

    @property
    def expert(self) -> bool:
        """Whether expert work is known."""
        return not self.expert_unknown

    @property
    def verdict(self) -> str:
        """One sentence: whether another order can help, and what turns it on."""
        better = [gain for gain in self.gains if gain.after < gain.before]
        over = max(self.gains, key=lambda gain: gain.removable, default=None)
        if over is None:
            return "No optimizer step is complete, so there is nothing to order."
        if over.removable <= 0:
            return "No other order can help: every work of arrival order is at its bound."
        if self.balanced:
            if not better:
                return "Arrival order was kept: no order found is better."
            return f"The balanced order {_told(better)}."
        turn_on = f"{BALANCED} and {EXPERTS}" if self.expert else BALANCED
        if better:
            return f"Another order can help: one built at once {_told(better)}. To search for more: {turn_on}."
        return (
            "Another order may help a little: the one built at once is no better than arrival order, and "
            f"{over.removable:.1f} % of {over.title} lie over a bound that no order need reach. To search: {turn_on}."
        )

    @property
    def floor(self) -> str:
        """One sentence on the expert work that no order removes; "" where it is not known."""
        found = [report.bounds for report in self.reports]
        floors = [one.routing_floor for one in found]
        least = [one.critical_work_proxy for one in found]
        if not found or any(one is None for one in (*floors, *least)):
            return ""
        floor, bound = sum(one or 0 for one in floors), sum(one or 0 for one in least)
        said = (
            f"Expert work is counted over {told_layers(self.reports[0].layers, self.reports[0].routed_layers)}. Of its "
            f"bound, {floor:,} expert choices ({floor / bound if bound else 0:.1%}) are more than an even spread over "
            "the ranks: the routes ask for them, and no order removes them"
        )
        placed = [one.placed_critical_work for one in found if one.placed_critical_work is not None]
        if len(placed) == len(found):
            said += f"; placing experts anew could lower the bound to {sum(placed):,}"
        return said + "."

    @property
    def dispatch(self) -> dict[str, tuple[float, float]]:
        """Dispatch skew and the largest load of a destination, in arrival order and in the other; empty if not known.

        The mean skew is that over all steps, each with equal weight; the others are the largest of any step.
        """
        pairs = {
            name: [(getattr(one.before, name), getattr(one.after, name)) for one in self.reports]
            for name in ("skew_mean", "skew_max", "max_slot_assignments")
        }
        if not self.reports or any(value is None for two in pairs.values() for pair in two for value in pair):
            return {}
        columns = {name: tuple(zip(*two, strict=True)) for name, two in pairs.items()}
        means = tuple(math.fsum(side) / len(side) for side in columns.pop("skew_mean"))
        return {
            "skew_mean": (means[0], means[1]),
            **{name: (max(two[0]), max(two[1])) for name, two in columns.items()},
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the outlook for JSON: sums, the verdict, and a line for each complete optimizer step."""
        other = "after" if self.balanced else "constructed"
        first = self.reports[0] if self.reports else None
        told: dict[str, Any] = {
            "verdict": self.verdict,
            "total": _figures(self.gains, other),
            "steps": [_figures(gains([report]), other) for report in self.reports],
            "dispatch": {name: {"before": one, other: two} for name, (one, two) in self.dispatch.items()},
            "layers": list(first.layers) if first else [],
            "routed_layers": first.routed_layers if first else 0,
            "expert_work_unknown": self.expert_unknown or None,
        }
        if not self.balanced:
            return told
        for step, trace in zip(told["steps"], self.traces, strict=True):
            step["search"] = {"stop": trace.stop, "proposals": trace.proposals, "attempts": trace.attempts}
        search = {"stops": stops_of(self.traces), "proposals": self.proposals, "planning_seconds": self.seconds}
        return {**told, "search": search}


def _figures(found: tuple[Gain, ...], other: str) -> dict[str, Any]:
    return {
        gain.name: {
            "before": gain.before,
            other: gain.after,
            "bound": gain.bound,
            "removable_percent": gain.removable,
            "removed_percent": gain.removed,
            "gap_percent": gain.gap,
        }
        for gain in found
    }


def _told(better: list[Gain]) -> str:
    """Say what an order does: packs as numbers, the works by how much of the removable they lose."""
    packs = [f"takes {gain.after:,} packs of a rank instead of {gain.before:,}" for gain in better if _packs(gain)]
    works = [f"{gain.removed or 0:.0f} % of {gain.title}" for gain in better if not _packs(gain)]
    removes = [f"removes {_listed(works)} over the bound"] if works else []
    return " and ".join([*packs, *removes])


def _packs(gain: Gain) -> bool:
    return gain.name == "packs_per_rank"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"

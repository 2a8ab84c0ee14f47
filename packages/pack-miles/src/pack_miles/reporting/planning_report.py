"""The planning of a run as text: works before, after and at best, what it cost, and whether routers did as planned."""

import math

from pack_core import WorkReport

from pack_miles.contract.facts import counted
from pack_miles.reporting.balance import Planning
from pack_miles.reporting.gain import told_layers, told_stops
from pack_miles.reporting.summary import RunSummary

#: What the columns of planned works hold; `gap` is over the bound, `removed` of what arrival order has over it.
PLANNING_HEADINGS = ("", "arrival", "planned", "bound", "gap to bound", "of removable removed")

#: Updates whose loads differ from the plan, told one by one.
MOST_MISMATCHED = 4


def order_told(planning: Planning | None) -> str | None:
    """Return whether samples were reordered, and by what; of arrival order how far its work is from its bounds."""
    if planning is None:
        return None
    if not planning.balanced:
        over = [f"{gain.title} {gain.gap:.0f} %" for gain in planning.gains if gain.gap > 0]
        return f"arrival; over the bound: {', '.join(over)}" if over else "arrival, every work at its bound"
    by = "lengths and expert load" if any(update.report.layers for update in planning.balanced) else "lengths"
    kept = len(planning.updates) - len(planning.balanced)
    return f"balanced by {by}" + (f", arrival in {counted(kept, 'update')}" if kept else "")


def planning_rows(planning: Planning) -> list[tuple[str, ...]]:
    """Return the works of the reordered updates for a table under `PLANNING_HEADINGS`, then fill and dispatch skew."""
    rows: list[tuple[str, ...]] = [
        (
            gain.title,
            f"{gain.before:,}",
            f"{gain.after:,}",
            f"{gain.bound:,}",
            f"{gain.gap:.1f} %",
            "nothing to remove" if gain.removed is None else f"{gain.removed:.1f} %",
        )
        for gain in planning.gains
    ]
    reports = [update.report for update in planning.balanced]
    fills = [math.fsum(each) / len(reports) for each in zip(*map(_fills, reports), strict=True)]
    rows.append(("fill, mean", *(f"{fill:.1%}" for fill in fills), "", "", ""))
    for name, title in (("skew_mean", "dispatch skew, mean"), ("skew_max", "dispatch skew, largest")):
        before, after = ([getattr(getattr(one, side), name) for one in reports] for side in ("before", "after"))
        if None not in (*before, *after):
            one, two = (max(side) if name == "skew_max" else math.fsum(side) / len(side) for side in (before, after))
            rows.append((title, f"{one:.3f}", f"{two:.3f}", "", "", ""))
    largest = [(one.before.max_slot_assignments, one.after.max_slot_assignments) for one in reports]
    if all(value is not None for pair in largest for value in pair):
        one, two = (max(side) for side in zip(*largest, strict=True))
        rows.append(("largest load, one layer", f"{one:,}", f"{two:,}", "", "", ""))
    return rows


def _fills(report: WorkReport) -> tuple[float, float]:
    return report.before.fill_fraction, report.after.fill_fraction


def planning_figures(run: RunSummary, planning: Planning) -> list[tuple[str, str]]:
    """Return what the search cost, why it stopped, and whether routers did what was planned, as labels and texts."""
    rows = [("seconds an update", _seconds(run, planning))]
    if planning.mean_proposals is not None:
        rows.append(("search stopped", told_stops(planning.stops)))
        rows.append(("proposals an update", f"{planning.mean_proposals:,.1f} scored fully, on average"))
    layers = next((update.report for update in planning.balanced if update.report.layers), None)
    if layers is not None:
        rows.append(("expert figures", f"about {told_layers(layers.layers, layers.routed_layers)}"))
    if planning.observed is not None:
        rows.append(("observed loads equal predicted", _observed(planning)))
    return rows


def _seconds(run: RunSummary, planning: Planning) -> str:
    parts = {"counting": planning.counting_seconds, "planning": planning.planning_seconds}
    count = len(planning.updates)
    told = [f"{name} {seconds / count:,.3f}" for name, seconds in parts.items() if seconds is not None]
    if not told:
        return "none recorded"
    total, busy = math.fsum(seconds or 0.0 for seconds in parts.values()), run.score_seconds + run.train_seconds
    share = f"; {total / busy:.1%} of those in scoring and training" if busy else ""
    return ", ".join(told) + share


def _observed(planning: Planning) -> str:
    seen = planning.observed
    if seen is None:
        return "not recorded"
    updates = counted(seen.updates, "update")
    if not seen.mismatched:
        return f"yes, in {'all ' if seen.updates > 1 else ''}{updates} that recorded them"
    shown = [f"update {step:,}: layer {', '.join(map(str, layers))}" for step, layers in seen.mismatched.items()]
    more = f"; and {len(shown) - MOST_MISMATCHED:,} more" if len(shown) > MOST_MISMATCHED else ""
    return f"no, not in {len(shown):,} of {updates} ({'; '.join(shown[:MOST_MISMATCHED])}{more})"

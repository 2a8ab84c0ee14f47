"""What planning did in a run, read from its plan and expert_balance events: works, seconds, searches, loads."""

import math
from collections.abc import Iterable, Mapping, Sequence

import attrs
import msgspec
from pack_core import Bounds, PackError, Schedule, SearchTrace, Topology, Work, WorkReport, samples_of, schedule

from pack_miles.contract.events import Event, ExpertBalance, Plan
from pack_miles.reporting.gain import Gain, gains, stops_of

Grid = tuple[tuple[int, ...], ...]


class _Record(msgspec.Struct, frozen=True):
    """The part of a plan's record that says how good the plan is."""

    pack_order: str
    work: tuple[Work, ...]
    arrival: tuple[Work, ...]
    bounds: tuple[Bounds, ...]
    traces: tuple[SearchTrace, ...]
    layers: tuple[int, ...]
    routed_layers: int


class _Layout(msgspec.Struct, frozen=True):
    """The part of a plan's record that says how an order becomes packs."""

    topology: Topology
    capacity: int
    step_samples: int
    equalize: str
    max_documents: int | None


@attrs.frozen
class PlannedUpdate:
    """One update's work before and after, and its search; None where arrival order was kept without one."""

    step: int
    pack_order: str
    report: WorkReport
    trace: SearchTrace | None


@attrs.frozen
class LoadPicture:
    """The load of every rank in every pack of one update, `[ranks][packs]`, in arrival order and as planned.

    Loads are expert choices summed over the counted layers, with rank r = replica * destinations + destination; where
    they are not known, tokens, and `destinations` is 0.
    """

    step: int
    before: Grid
    after: Grid
    destinations: int
    gains: tuple[Gain, ...]
    layers: tuple[int, ...]
    routed_layers: int

    @property
    def experts(self) -> bool:
        """Whether the loads are expert choices."""
        return self.destinations > 0


@attrs.frozen
class Observed:
    """Whether what the routers executed is what was planned, of all updates that recorded it.

    `mismatched` holds the counted layers that differ, by update; updates without a difference are left out.
    """

    updates: int
    mismatched: Mapping[int, tuple[int, ...]]


@attrs.frozen
class Planning:
    """The planning of a run. Seconds are those of all collections, None where the log has none."""

    updates: tuple[PlannedUpdate, ...]
    counting_seconds: float | None
    planning_seconds: float | None
    observed: Observed | None
    pictures: tuple[LoadPicture, ...]

    @property
    def balanced(self) -> tuple[PlannedUpdate, ...]:
        """The updates whose samples were reordered."""
        return tuple(update for update in self.updates if update.pack_order == "balanced")

    @property
    def gains(self) -> tuple[Gain, ...]:
        """The works of the reordered updates added up, or of all where none was."""
        return gains([update.report for update in self.balanced or self.updates])

    @property
    def stops(self) -> dict[str, int]:
        """How often searches stopped for each reason."""
        return stops_of(self._traces)

    @property
    def mean_proposals(self) -> float | None:
        """Fully scored swaps of an update, on average."""
        traces = self._traces
        return sum(trace.proposals for trace in traces) / len(traces) if traces else None

    @property
    def _traces(self) -> list[SearchTrace]:
        return [update.trace for update in self.updates if update.trace is not None]


def planning_of(plans: Mapping[int, Plan], updates: Mapping[int, int], events: Iterable[Event]) -> Planning | None:
    """Return the planning of a run, or None where no plan of an update that ran can be read.

    Args:
        plans: by rollout id.
        updates: the rollout id of every update that ran, by update.
        events: all that stand.
    """
    records = {rollout_id: _read(event) for rollout_id, event in plans.items()}
    found = []
    for step, rollout_id in sorted(updates.items()):
        record = records.get(rollout_id)
        place = step - plans[rollout_id].update if record is not None else -1
        if record is not None and 0 <= place < len(record.work):
            found.append(_planned(step, place, record))
    if not found:
        return None
    used = [event for rollout_id, event in plans.items() if rollout_id in set(updates.values())]
    steps = [one.step for one in found if one.pack_order == "balanced"]
    pictures = (_picture(step, plans[updates[step]], found) for step in dict.fromkeys([*steps[:1], *steps[-1:]]))
    return Planning(
        updates=tuple(found),
        counting_seconds=_seconds([event.counting_seconds for event in used]),
        planning_seconds=_seconds([event.planning_seconds for event in used]),
        observed=_observed(events),
        pictures=tuple(picture for picture in pictures if picture is not None),
    )


def _read(event: Plan) -> _Record | None:
    try:
        record = msgspec.convert(event.record, _Record)
    except msgspec.ValidationError:
        return None  # the audit says what is wrong with the record
    steps = len(record.work)
    searched = steps if record.pack_order == "balanced" else 0
    return record if (len(record.arrival), len(record.bounds), len(record.traces)) == (steps, steps, searched) else None


def _planned(step: int, place: int, record: _Record) -> PlannedUpdate:
    three = (record.arrival[place], record.work[place], record.bounds[place])
    report = WorkReport(*three, layers=record.layers, routed_layers=record.routed_layers)
    return PlannedUpdate(step, record.pack_order, report, record.traces[place] if record.traces else None)


def _seconds(values: Sequence[float]) -> float | None:
    """Nothing takes no time at all: a sum of 0 was never measured."""
    return math.fsum(values) or None


def _observed(events: Iterable[Event]) -> Observed | None:
    found = {event.step: event for event in events if isinstance(event, ExpertBalance)}
    if not found:
        return None
    wrong = {step: tuple(one.mismatched_layers) for step, one in sorted(found.items()) if one.mismatched_layers}
    return Observed(len(found), wrong)


def _picture(step: int, event: Plan, found: Sequence[PlannedUpdate]) -> LoadPicture | None:
    planned = next(one for one in found if one.step == step)
    report = planned.report
    place = step - event.update
    grids = _expert_grids(event, place, report) if report.layers else None
    destinations = len(event.loads_after[place][0][0]) if grids and event.loads_after else 0
    grids = grids or token_grids(event, place, planned.trace)
    if grids is None:
        return None
    return LoadPicture(step, *grids, destinations, gains([report]), report.layers, report.routed_layers)


def _expert_grids(event: Plan, place: int, report: WorkReport) -> tuple[Grid, Grid] | None:
    if event.loads_before is None or event.loads_after is None:
        return None
    if not place < min(len(event.loads_before), len(event.loads_after)):
        return None
    before, after = _by_rank(event.loads_before[place]), _by_rank(event.loads_after[place])
    packs = (report.before.packs_per_rank, report.after.packs_per_rank)
    fits = len(before) == len(after) > 0 and {len(row) for row in before} == {packs[0]}
    return (before, after) if fits and {len(row) for row in after} == {packs[1]} else None


def _by_rank(loads: Sequence[Sequence[Sequence[int]]]) -> Grid:
    """`[replicas][packs][destinations]` as `[ranks][packs]`; empty where the numbers of destinations differ."""
    if len({len(pack) for replica in loads for pack in replica}) != 1:
        return ()
    return tuple(destination for replica in loads for destination in zip(*replica, strict=True))


def token_grids(event: Plan, place: int, trace: SearchTrace | None) -> tuple[Grid, Grid] | None:
    """Return the tokens of every pack of one update, in arrival order and as planned; None for an unreadable record."""
    try:
        record = msgspec.convert(event.record, _Layout)
        lengths = [sample.length for sample in samples_of(event.record)]
        start = place * record.step_samples
        orders = [range(record.step_samples), trace.order if trace else range(record.step_samples)]
        before, after = (
            schedule(
                lengths,
                record.topology.ranks,
                record.capacity,
                order=[start + local for local in order],
                equalize=record.equalize,
                max_documents=record.max_documents,
            )
            for order in orders
        )
    except (PackError, msgspec.ValidationError):
        return None
    return _tokens(before, lengths), _tokens(after, lengths)


def _tokens(laid: Schedule, lengths: Sequence[int]) -> Grid:
    return tuple(tuple(sum(lengths[index] for index in pack) for pack in packs) for packs in laid.packs)

"""What the producer hook decides about a collection: its samples checked, counted, ordered, and told in one event."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from pack_core import DispatchCounts, Plan, Sample, Search, SearchTrace, Topology, WorkReport, plan
from pack_core.errors import RoutingError

from pack_miles.contract.events import ExpertSchedule, ScheduledStep
from pack_miles.miles.collected import Collected, refuse_collected
from pack_miles.miles.options import Settings

#: The three works a search lowers together.
WORKS = ("critical_work_proxy", "attention_token_work", "attention_pair_work")

#: What is told of an order before and after.
FIGURES = (
    "packs_per_rank",
    "dispatches",
    "skew_mean",
    "skew_max",
    "max_slot_assignments",
    *WORKS,
)


@attrs.frozen
class Ordering:
    """The order chosen for a collection, as places in it, and the event that tells of it.

    `started` is when planning began, by the clock it was planned with.
    """

    order: tuple[int, ...]
    event: ExpertSchedule | None
    started: float


def order_samples(
    settings: Settings,
    samples: Sequence[Any],
    *,
    groups: Sequence[Sequence[Any]] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Ordering:
    """Return the order of a collection: complete optimizer batches reordered within themselves, the tail as it is.

    Nothing is changed. Fewer samples than one batch are all tail, and there is nothing to tell.

    Args:
        settings: what the arguments say, already found allowed.
        samples: MILES' samples, in arrival order.
        groups: the same by group, where they came so.
        clock: seconds from any start.

    Raises:
        ValueError: a sample cannot be planned: no or a repeated `index`, no `group_index`, several samples of one
            rollout, missing or malformed routes, too long for a row. It is named.
    """
    started = clock()
    collected = Collected(settings, samples, groups)
    refuse_collected(collected)
    complete = len(collected.complete)
    if not complete:
        return Ordering(tuple(range(len(samples))), None, started)
    planned, counts = collected.planned, collected.counts
    assert not isinstance(counts, RoutingError)  # that was refused
    counted = clock() - started
    made = _plan(settings, planned, counts, collected.step, clock)
    event = _event(settings, made, planned, len(samples) - complete, counted)
    return Ordering((*made.order, *range(complete, len(samples))), event, started)


def _plan(
    settings: Settings,
    samples: Sequence[Sample],
    counts: DispatchCounts | None,
    step: int,
    clock: Callable[[], float],
) -> Plan:
    core, packed = settings.core, settings.core.sequence_packing
    return plan(
        samples,
        topology=Topology(settings.ranks, core.expert_parallel_size if counts else 1),
        capacity=settings.capacity if packed else max(sample.length for sample in samples),
        step_samples=step,
        equalize=core.packing_equalize,
        max_documents=None if packed else 1,
        pack_order="balanced",
        counts=counts,
        search=Search(
            proposals=core.expert_balance_search_proposals,
            seconds=core.expert_balance_search_seconds,
            method=core.expert_balance_method if counts else "priced",  # the other one is about routes alone
            guard=core.expert_balance_guard,
            max_slot_assignments=core.expert_balance_max_slot_assignments if counts else None,
        ),
        clock=clock,
    )


def _event(settings: Settings, made: Plan, samples: Sequence[Sample], tail: int, counted: float) -> ExpertSchedule:
    return ExpertSchedule(
        rank=0,
        step=0,
        world=made.topology.ranks,
        ep_degree=made.topology.expert_parallel,
        layers=list(made.layers),
        routed_layers=made.routed_layers,
        seam=settings.seam,
        plan_digest=made.digest,
        blocks=[_block(made, samples, number) for number in range(len(made.steps))],
        untouched_tail_samples=tail,
        counting_seconds=counted,
        planning_seconds=0.0,
    )


def _block(made: Plan, samples: Sequence[Sample], number: int) -> ScheduledStep:
    size, report, trace = made.step_samples, made.report(number), made.traces[number]
    return ScheduledStep(
        block=number,
        indices=[int(sample.id) for sample in samples[number * size : (number + 1) * size]],
        before={name: getattr(report.before, name) for name in FIGURES},
        after={name: getattr(report.after, name) for name in FIGURES},
        headroom={
            name: {"removable": report.removable(name), "removed": report.removed(name)}
            for name in ("packs_per_rank", *WORKS)
        },
        reordered=trace.order != tuple(range(size)),
        search=_search(report, trace),
    )


def _search(report: WorkReport, trace: SearchTrace) -> dict[str, Any]:
    """The trace under the names of the trainer this event comes from, where it has them."""
    before, after = ([getattr(one, name) for name in WORKS] for one in (report.before, report.after))
    return {
        "seed": trace.seed,
        "method": trace.method,
        "baseline": trace.baseline,
        "iterations": trace.attempts,
        "proposals": trace.proposals,
        "accepted": sum(trace.accepted.values()),
        "guard_rejections": sum(trace.rejections.values()),
        "guard_rejections_by_metric": dict(trace.rejections),
        **{name: trace.paths.get(path, 0) for name, path in PATHS.items()},
        "lower_bound": [getattr(report.bounds, name) for name in WORKS],
        "pack_count_lower_bound": report.bounds.packs_per_rank,
        "search_work": after,
        "search_objective": sum(now / max(was, 1) for was, now in zip(before, after, strict=True) if was is not None),
        "stop": trace.stop,
        "order": list(trace.order),
    }


PATHS = {"fixed": "fixed", "columns": "columns", "global_repack": "global"}

"""The plan a configuration makes of samples: what `plan` forecasts and what the trainer follows, one call for both."""

from collections.abc import Callable, Sequence

import attrs
from pack_core import DispatchCounts, Plan, Sample, Search, dispatch_counts, dispatch_loads, fold, owners, plan, record

from pack_miles.contract import events
from pack_miles.samples import RolloutRow, to_samples
from pack_miles.settings.config import Config
from pack_miles.settings.geometry import Geometry, configured

#: Expert choices of one optimizer step, `[replicas][packs][layers][destinations]`.
Loads = list[list[list[list[int]]]]


def plan_samples(
    config: Config,
    samples: Sequence[Sample],
    counts: DispatchCounts | None = None,
    clock: Callable[[], float] | None = None,
) -> Plan:
    """Return the plan of samples, in arrival order or in the balanced order the configuration asks for.

    Args:
        config: the run's.
        samples: the collection, in arrival order.
        counts: of the same samples, from `count_rows`. Balanced order evens them out with
            `core.expert_balanced_packing` and leaves them aside without; in arrival order they are only reported. With
            None, lengths alone are balanced.
        clock: seconds from any start, for the allowance of the search; None searches without one.

    Raises:
        PackError: a sample fits no row, or two share an id; it is named.
    """
    core = config.core
    followed = core.expert_balanced_packing or config.pack_order == "arrival"
    return plan(
        samples,
        topology=config.topology,
        capacity=config.capacity,
        step_samples=config.step_samples,
        equalize=core.packing_equalize,
        max_documents=config.max_documents,
        pack_order=config.pack_order,
        counts=counts if followed else None,
        search=Search(
            proposals=core.expert_balance_search_proposals,
            seconds=core.expert_balance_search_seconds,
            method=core.expert_balance_method,
            guard=core.expert_balance_guard,
            max_slot_assignments=core.expert_balance_max_slot_assignments,
        ),
        clock=clock,
    )


def count_rows(config: Config, rows: Sequence[RolloutRow], geometry: Geometry | None = None) -> DispatchCounts | None:
    """Return where the tokens of every row go, by counted layer and expert, or None where that is not to be known.

    It is known where recorded routes are replayed in a model whose layers and experts are known, from `geometry` or, of
    the small model, from the configuration, and where ranks > expert_parallel_size > 1 leave something to even out.
    Each sample's synthetic final row is counted; dense layers are not, and of the routed ones every
    `core.expert_balance_layer_stride`-th.

    Raises:
        RoutingError: routes do not fit the model, or are missing though `core.expert_balanced_packing` needs them;
            names sample, row and layer. Without that option rows that lack routes are counted as None.
    """
    core, known = config.core, geometry or configured(config)
    even = config.run.ranks > core.expert_parallel_size > 1
    if known is None or not config.miles.use_rollout_routing_replay or not even:
        return None
    if not core.expert_balanced_packing and any(row.rollout_routed_experts is None for row in rows):
        return None
    return dispatch_counts(
        [row.rollout_routed_experts for row in rows],
        [len(row.tokens) for row in rows],
        layers=known.layers,
        experts=known.experts,
        top_k=known.top_k,
        dense_layers=known.dense_layers,
        layer_stride=core.expert_balance_layer_stride,
        ids=[number if row.index is None else row.index for number, row in enumerate(rows, start=1)],
    )


def loads_of(made: Plan, counts: DispatchCounts) -> list[Loads]:
    """Return the expert choices each destination is to execute, one entry for every optimizer step of a plan.

    Args:
        made: the plan.
        counts: of its samples, per expert or by destination.
    """
    places = made.topology.expert_parallel
    folded = counts if counts.places == places else fold(counts, owners(counts.places, places))
    return [dispatch_loads(step, folded) for step in made.steps]


def over_layers(loads: Sequence[Loads]) -> list[list[list[list[int]]]]:
    """Return loads summed over their layers, `[steps][replicas][packs][destinations]`.

    >>> over_layers([[[[[3, 5], [1, 0]]]]])
    [[[[4, 5]]]]
    """
    return [
        [[[sum(of_place) for of_place in zip(*layers, strict=True)] for layers in packs] for packs in step]
        for step in loads
    ]


def plan_collection(
    config: Config,
    rows: Sequence[RolloutRow],
    clock: Callable[[], float],
    *,
    step: int,
    rollout_id: int,
    geometry: Geometry | None = None,
) -> tuple[Plan, list[Loads] | None, events.Plan]:
    """Return the plan of a collection, the loads it foresees, and the event in which rank 0 tells of it.

    Routes are counted only where the order is to follow them; without, there are no loads.

    Args:
        config: the run's.
        rows: the collection, in arrival order.
        clock: seconds from any start: the search's allowance, and what planning costs.
        step: updates completed.
        rollout_id: the collection's number.
        geometry: of the model; None takes what the configuration says.

    Raises:
        PackError: as `plan_samples` and `count_rows`.
    """
    samples, begin = to_samples(rows), clock()
    counts = count_rows(config, rows, geometry) if config.core.expert_balanced_packing else None
    counted = clock()
    made = plan_samples(config, samples, counts, clock)
    before = after = None
    if counts is not None:
        before, after = loads_of(plan_samples(in_arrival(config), samples), counts), loads_of(made, counts)
    written = record(made, samples, counts)
    event = events.Plan(
        rank=0,
        step=step,
        rollout_id=rollout_id,
        record=written,
        counting_seconds=counted - begin,
        planning_seconds=clock() - counted,
        loads_before=None if before is None else over_layers(before),
        loads_after=None if after is None else over_layers(after),
    )
    return made, after, event


def in_arrival(config: Config) -> Config:
    """Return the configuration with samples left in arrival order."""
    return attrs.evolve(config, core=attrs.evolve(config.core, pack_order="arrival", expert_balanced_packing=False))

"""The one entry: a collection of samples to the packs of every rank and optimizer step."""

from array import array
from collections.abc import Callable, Iterator, Sequence

import attrs

from pack_core.digest import digest
from pack_core.errors import CountError, PackError, TopologyError
from pack_core.lengths import as_integer, as_lengths, check_fit
from pack_core.packing import check_method
from pack_core.routing import fold, owners
from pack_core.schedule import schedule
from pack_core.search.improve import Block, Watch, improve
from pack_core.search.layout import Rules
from pack_core.search.randomness import seed_of
from pack_core.types import (
    Bounds,
    DispatchCounts,
    Plan,
    Sample,
    Schedule,
    Search,
    SearchTrace,
    Topology,
    Work,
    WorkReport,
)
from pack_core.work import bounds, placed_critical_work, work

PACK_ORDERS = ("arrival", "balanced")


def plan(
    samples: Sequence[Sample],
    *,
    topology: Topology,
    capacity: int,
    step_samples: int,
    equalize: str = "tokens",
    max_documents: int | None = None,
    pack_order: str = "arrival",
    counts: DispatchCounts | None = None,
    search: Search | None = None,
    clock: Callable[[], float] | None = None,
) -> Plan:
    """Return the packs of every rank for every complete optimizer step of a collection.

    Complete blocks of `step_samples` samples are taken in arrival order; inside a block, position p goes to rank
    `p % ranks`. An incomplete trailing block is left untouched in `tail`; fewer samples than one block are all tail.
    With `pack_order="balanced"` the samples of each complete block change places among themselves, so that packs are
    few and full and all ranks have as much to do at the same time; no sample leaves its optimizer step.
    A pure function: the same arguments give the same plan in every process, unless a clock cuts the search short.

    Args:
        samples: the collection, in arrival order, ids unique.
        topology: the ranks.
        capacity: most tokens a pack may hold (`packing_max_tokens`).
        step_samples: samples of one optimizer step over all ranks, a positive multiple of the ranks.
        equalize: `"tokens"`, `"samples"` or `"balanced"`, see `pack_core.equalize`.
        max_documents: most samples a pack may hold; 1 forwards every sample in a row of its own; None for no cap.
        pack_order: `"arrival"` keeps the order; `"balanced"` searches a better one.
        counts: where the tokens of each sample go, per expert or already folded to the topology's destinations. With
            them expert work is measured and, in balanced order, evened out, which takes ranks > expert_parallel > 1.
        search: how to search; the default `Search()`.
        clock: seconds from any start, such as `time.monotonic`; without one the search has no allowance.

    Raises:
        CountError: `step_samples` is not a positive multiple of the ranks.
        LengthError: a sample is longer than `capacity`; it is named, with its length and the limit.
        TopologyError: counts are to be evened out on ranks that cannot.
        PackError: there are no samples, two share an id, or an option is unknown or below 1.

    >>> samples = [Sample(i, length) for i, length in enumerate([17, 87, 19, 13, 23, 89, 29, 11, 40])]
    >>> made = plan(samples, topology=Topology(ranks=2), capacity=128, step_samples=8)
    >>> made.steps[0].packs[1]
    ((1, 3), (5, 7))
    >>> made.tail
    (8,)
    >>> balanced = plan(samples, topology=Topology(ranks=2), capacity=128, step_samples=8, pack_order="balanced")
    >>> [one.attention_token_work for one in (made.work[0], balanced.work[0], balanced.bounds[0])]
    [200, 146, 144]
    """
    chosen = search or Search()
    _check_order(pack_order, counts, topology)
    blocks = len(samples) // _shared_evenly(step_samples, topology.ranks)
    watch = (
        _within(clock, chosen.seconds / max(blocks, 1)) if clock and chosen.seconds is not None else ending_after(None)
    )

    def choose(number: int, step: Step, ids: Sequence[str | int]) -> SearchTrace | None:
        return searched(step, ids, chosen, watch) if pack_order == "balanced" else None

    return plan_by(
        samples,
        choose,
        topology=topology,
        capacity=capacity,
        step_samples=step_samples,
        equalize=equalize,
        max_documents=max_documents,
        pack_order=pack_order,
        counts=counts,
        search=chosen if pack_order == "balanced" else None,
    )


def headroom(
    samples: Sequence[Sample],
    *,
    topology: Topology,
    capacity: int,
    step_samples: int,
    counts: DispatchCounts | None = None,
    equalize: str = "tokens",
) -> tuple[WorkReport, ...]:
    """Return, for every complete optimizer step, whether another order could help at all, without searching for one.

    Each report holds the work of arrival order, that of the best order constructed at once, and the bounds:
    `report.removable(name)` is the share of a work that lies above its bound, `report.removed(name)` how much of that
    the constructed order already takes away.

    Args and errors are those of `plan`.

    >>> samples = [Sample(i, length) for i, length in enumerate([17, 87, 19, 13, 23, 89, 29, 11])]
    >>> (report,) = headroom(samples, topology=Topology(ranks=2), capacity=128, step_samples=8)
    >>> round(report.removable("attention_token_work"), 1), round(report.removed("attention_token_work"))
    (28.0, 96)
    """
    made = plan(
        samples,
        topology=topology,
        capacity=capacity,
        step_samples=step_samples,
        equalize=equalize,
        pack_order="balanced",
        counts=counts,
        search=Search(proposals=0),
    )
    return tuple(made.report(number) for number in range(len(made.steps)))


@attrs.frozen
class Step:
    """One complete block: its indices in the collection, and of each its length and counts by destination."""

    span: range
    lengths: Sequence[int]
    counts: DispatchCounts | None
    bounds: Bounds
    rules: Rules


def plan_by(
    samples: Sequence[Sample],
    choose: Callable[[int, Step, Sequence[str | int]], SearchTrace | None],
    *,
    topology: Topology,
    capacity: int,
    step_samples: int,
    equalize: str,
    max_documents: int | None,
    pack_order: str,
    counts: DispatchCounts | None,
    search: Search | None,
) -> Plan:
    """Return the plan in which `choose` says the order of every complete block; None keeps arrival order.

    It is given the number of the block, the block and the ids of its samples. The rest is as in `plan`.
    """
    ids = _unique_ids(samples)
    step_samples = _shared_evenly(step_samples, topology.ranks)
    cap = None if max_documents is None else as_integer(max_documents, "max_documents")
    rules = Rules(topology.ranks, as_integer(capacity, "capacity"), equalize, cap)
    check_method(equalize)
    steps = _steps(samples, ids, step_samples, rules, counts, topology)
    traces = [choose(number, step, ids[step.span.start : step.span.stop]) for number, step in enumerate(steps)]
    before = [_laid(step, range(step_samples)) for step in steps]
    after = [
        arrival if trace is None else _laid(step, trace.order)
        for arrival, step, trace in zip(before, steps, traces, strict=True)
    ]
    arrival = [_work(step, laid) for step, laid in zip(steps, before, strict=True)]
    works = [_work(step, laid) for step, laid in zip(steps, after, strict=True)] if search else arrival
    tail = tuple(range(len(steps) * step_samples, len(samples)))
    order = (*_ordered(steps, traces), *tail)
    schedules = tuple(_at(step.span, laid) for step, laid in zip(steps, after, strict=True))
    return Plan(
        topology=topology,
        capacity=rules.capacity,
        step_samples=step_samples,
        equalize=equalize,
        max_documents=cap,
        pack_order=pack_order,
        order=order,
        steps=schedules,
        tail=tail,
        work=tuple(works),
        arrival=tuple(arrival),
        bounds=tuple(step.bounds for step in steps),
        search=search,
        traces=tuple(trace for trace in traces if trace is not None),
        layers=counts.layers if counts else (),
        routed_layers=counts.routed_layers if counts else 0,
        digest=digest(order, schedules),
    )


def _steps(
    samples: Sequence[Sample],
    ids: Sequence[str | int],
    step_samples: int,
    rules: Rules,
    counts: DispatchCounts | None,
    topology: Topology,
) -> list[Step]:
    """The complete blocks, each over its own lengths: so the cost of a plan grows with samples, not samples x steps."""
    lengths = as_lengths([sample.length for sample in samples], ids=ids)
    check_fit(lengths, rules.capacity, ids)
    folded = _folded(counts, len(samples), topology)
    complete = len(samples) - len(samples) % step_samples
    return [
        _step(range(start, start + step_samples), lengths, counts, folded, rules)
        for start in range(0, complete, step_samples)
    ]


def _ordered(steps: Sequence[Step], traces: Sequence[SearchTrace | None]) -> Iterator[int]:
    """The samples of all complete blocks in the order chosen."""
    for step, trace in zip(steps, traces, strict=True):
        yield from step.span if trace is None else (step.span[place] for place in trace.order)


def _step(
    span: range, lengths: Sequence[int], counts: DispatchCounts | None, folded: DispatchCounts | None, rules: Rules
) -> Step:
    held, taken = [lengths[index] for index in span], None if folded is None else folded.take(span)
    least = bounds(held, rules.ranks, rules.capacity, taken)
    if counts is not None and folded is not None and counts.places > folded.places:
        replicas = rules.ranks // folded.places
        least = attrs.evolve(
            least, placed_critical_work=placed_critical_work(counts.take(span), folded.places, replicas)
        )
    return Step(span, held, taken, least, rules)


def searched(step: Step, ids: Sequence[str | int], search: Search, watch: Watch) -> SearchTrace:
    """Return the trace of one block's search, which holds the order chosen; its seed comes from the ids."""
    least = step.bounds
    block = Block(
        step.lengths,
        step.counts.counts if step.counts else array("i"),
        step.counts.places if step.counts else 1,
        step.rules,
        (least.critical_work_proxy or 0, least.attention_token_work, least.attention_pair_work),
    )
    return improve(block, search, seed=seed_of(ids), watch=watch)


def ending_after(attempts: int | None) -> Watch:
    """Return a watch that needs no clock: the search is over after so many attempts, or never."""
    return lambda: lambda done: attempts is not None and done >= attempts


def _within(clock: Callable[[], float], seconds: float) -> Watch:
    def start() -> Callable[[int], bool]:
        end = clock() + seconds
        return lambda attempts: clock() >= end

    return start


def _folded(counts: DispatchCounts | None, samples: int, topology: Topology) -> DispatchCounts | None:
    if counts is None:
        return None
    if counts.samples != samples:
        raise PackError(f"there are {samples:,} samples but counts of {counts.samples:,}; give one of each")
    if counts.places == topology.expert_parallel:
        return counts
    return fold(counts, owners(counts.places, topology.expert_parallel))


def _laid(step: Step, order: Sequence[int]) -> Schedule:
    rules = step.rules
    return schedule(
        step.lengths,
        rules.ranks,
        rules.capacity,
        order=order,
        equalize=rules.equalize,
        max_documents=rules.max_documents,
    )


def _work(step: Step, laid: Schedule) -> Work:
    return work(laid, step.lengths, step.rules.capacity, step.counts)


def _check_order(pack_order: str, counts: DispatchCounts | None, topology: Topology) -> None:
    if pack_order not in PACK_ORDERS:
        raise PackError(f"pack_order is {pack_order!r}; it must be one of {', '.join(map(repr, PACK_ORDERS))}")
    if pack_order == "balanced" and counts is not None and not topology.ranks > topology.expert_parallel > 1:
        raise TopologyError(
            f"{topology.ranks} ranks with expert_parallel {topology.expert_parallel} leave no expert load to even out: "
            "that takes ranks > expert_parallel > 1; leave the counts out to balance lengths alone"
        )


def _at(block: Sequence[int], step: Schedule) -> Schedule:
    """The same packs, naming samples of the collection where `step` names places of the block."""
    return Schedule(tuple(tuple(tuple(block[place] for place in one) for one in packs) for packs in step.packs))


def _unique_ids(samples: Sequence[Sample]) -> list[str | int]:
    if not samples:
        raise PackError("there are no samples to plan; give at least one")
    first: dict[str | int, int] = {}
    for position, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            raise PackError(
                f"samples[{position}] is a {type(sample).__name__}; give pack_core.Sample values (id, length, group)"
            )
        if sample.id in first:
            raise PackError(
                f"two samples have the id {sample.id!r}, at positions {first[sample.id]} and {position}; "
                "ids must be unique in what is planned together"
            )
        first[sample.id] = position
    return list(first)


def _shared_evenly(step_samples: int, ranks: int) -> int:
    whole = as_integer(step_samples, "step_samples")
    if whole % ranks:
        below = whole - whole % ranks
        choices = f"{below:,} or {below + ranks:,}" if below else f"{ranks:,}"
        raise CountError(
            f"step_samples is {whole:,}, which {ranks} ranks cannot share evenly; "
            f"use a multiple of {ranks}, such as {choices}"
        )
    return whole

"""The figures a plan claims, each counted a second time from its packs, the samples and their counts."""

import math
from collections.abc import Iterator, Sequence

from pack_core.errors import PackError
from pack_core.schedule import schedule
from pack_core.types import Bounds, DispatchCounts, Plan, Sample, Schedule, Work

_Claim = tuple[str, float | None, float | None]

#: Of each sample, by layer, the counts of every destination.
_Rows = list[list[list[int]]]


def wrong_claims(plan: Plan, samples: Sequence[Sample], counts: DispatchCounts | None) -> Iterator[str]:
    """Yield a sentence for every figure that is not that of the packs; expert figures only with counts.

    >>> from pack_core import Topology, plan
    >>> samples = [Sample("a", 3), Sample("b", 4)]
    >>> made = plan(samples, topology=Topology(ranks=1), capacity=8, step_samples=2)
    >>> list(wrong_claims(made, samples, None))
    []
    """
    rows = None if counts is None else _by_destination(counts, plan.topology.expert_parallel)
    for number, (step, said) in enumerate(zip(plan.steps, plan.work, strict=False)):
        for name, claimed, true in _work(plan, samples, said, step, rows):
            if claimed != true:
                yield f"step {number} claims {name} {claimed} but its packs give {true}"
    size = plan.step_samples
    for number, least in enumerate(plan.bounds):
        block = range(number * size, min((number + 1) * size, len(samples)))
        if block and number < len(plan.steps):
            for name, claimed, true in _bounds(plan, samples, least, block, counts):
                if claimed != true:
                    yield f"step {number} claims {name} {claimed} but its packs give {true}"
    if plan.pack_order != "arrival":
        yield from _arrival(plan, samples, rows)


def _by_destination(counts: DispatchCounts, places: int) -> _Rows:
    """Counts per expert go to owners of equal, neighbouring shares."""
    share = max(counts.places // places, 1)
    rows = (counts.of(index).tolist() for index in range(counts.samples))
    return [
        [
            [sum(row[at + d * share : at + (d + 1) * share]) for d in range(places)]
            for at in range(0, counts.row, counts.places)
        ]
        for row in rows
    ]


def _arrival(plan: Plan, samples: Sequence[Sample], rows: _Rows | None) -> Iterator[str]:
    size = plan.step_samples
    for number, said in enumerate(plan.arrival):
        block = samples[number * size : (number + 1) * size]
        try:
            step = schedule(
                [sample.length for sample in block],
                plan.topology.ranks,
                plan.capacity,
                order=range(size),
                equalize=plan.equalize,
                max_documents=plan.max_documents,
            )
        except PackError:
            return  # what makes the order impossible is said elsewhere
        own = None if rows is None else rows[number * size : (number + 1) * size]
        for name, claimed, true in _work(plan, block, said, step, own):
            if claimed != true:
                yield f"step {number} claims {name} {claimed} in arrival order but its packs give {true}"


def _work(plan: Plan, samples: Sequence[Sample], said: Work, step: Schedule, rows: _Rows | None) -> list[_Claim]:
    packs = max((len(packs) for packs in step.packs), default=0)
    tokens, pairs, every = 0, 0, []
    for p in range(packs):
        lengths = [
            [samples[i].length for i in rank[p] if 0 <= i < len(samples)] for rank in step.packs if p < len(rank)
        ]
        tokens += max(sum(one) for one in lengths)
        pairs += max(sum(length * length for length in one) for one in lengths)
        every += [sum(one) for one in lengths]
    room = len(step.packs) * packs * plan.capacity
    return [
        ("packs_per_rank", said.packs_per_rank, packs),
        ("attention_token_work", said.attention_token_work, tokens),
        ("attention_pair_work", said.attention_pair_work, pairs),
        ("model_tokens", said.model_tokens, sum(every)),
        ("max_pack_tokens", said.max_pack_tokens, max(every, default=0)),
        ("fill_fraction", said.fill_fraction, sum(every) / room if room else 0.0),
        *(_expert_work(plan, rows, said, step) if rows and packs else ()),
    ]


def _expert_work(plan: Plan, rows: _Rows, said: Work, step: Schedule) -> list[_Claim]:
    """Expert figures, added up sample by sample."""
    places, replicas, depth = plan.topology.expert_parallel, range(plan.topology.replicas), range(len(rows[0]))
    packs_of = range(max(len(packs) for packs in step.packs))
    loads = {(g, p): [[0] * places for _ in depth] for g in replicas for p in packs_of}
    for rank, packs in enumerate(step.packs[: plan.topology.ranks]):
        for p, index in ((p, index) for p, one in enumerate(packs) for index in one if 0 <= index < len(rows)):
            for load, more in zip(loads[rank // places, p], rows[index], strict=True):
                for d in range(places):
                    load[d] += more[d]
    peaks = {where: [max(layer) for layer in load] for where, load in loads.items()}
    totals = {where: sum(map(sum, load)) for where, load in loads.items()}
    skews = [sum(peaks[one]) * places / totals[one] if totals[one] else 1.0 for one in peaks]
    work = sum(max(peaks[g, p][layer] for g in replicas) for p in packs_of for layer in depth)
    return [
        ("critical_work_proxy", said.critical_work_proxy, work),
        ("dispatches", said.dispatches, len(peaks)),
        ("skew_mean", said.skew_mean, math.fsum(skews) / len(skews)),
        ("skew_max", said.skew_max, max(skews)),
        ("max_slot_assignments", said.max_slot_assignments, max(max(one) for one in peaks.values())),
    ]


def _bounds(
    plan: Plan, samples: Sequence[Sample], said: Bounds, block: range, counts: DispatchCounts | None
) -> list[_Claim]:
    lengths, ranks = [samples[index].length for index in block], plan.topology.ranks
    squares = [length * length for length in lengths]
    return [
        ("least packs_per_rank", said.packs_per_rank, _ceil(sum(lengths), ranks * max(plan.capacity, 1))),
        ("least attention_token_work", said.attention_token_work, max(_ceil(sum(lengths), ranks), *lengths)),
        ("least attention_pair_work", said.attention_pair_work, max(_ceil(sum(squares), ranks), *squares)),
        *(_expert_bounds(plan, counts, said, block) if counts is not None else ()),
    ]


def _expert_bounds(plan: Plan, counts: DispatchCounts, said: Bounds, block: range) -> list[_Claim]:
    topology, places = plan.topology, plan.topology.expert_parallel
    share = max(counts.places // places, 1)
    rows = [counts.of(index).tolist() for index in block]
    critical = even = placed = 0
    for at in range(0, counts.row, counts.places):
        per_expert = [sum(row[at + expert] for row in rows) for expert in range(counts.places)]
        owned = [range(at + d * share, at + (d + 1) * share) for d in range(places)]
        largest = max(sum(row[expert] for expert in experts) for row in rows for experts in owned)
        totals = [sum(per_expert[d * share : (d + 1) * share]) for d in range(places)]
        critical += max(_ceil(max(totals), topology.replicas), largest)
        even += _ceil(sum(per_expert), topology.ranks)
        most = max(row[at + expert] for row in rows for expert in range(counts.places))
        placed += max(_ceil(_placed(per_expert, places, share), topology.replicas), most)
    return [
        ("least critical_work_proxy", said.critical_work_proxy, critical),
        ("even_critical_work", said.even_critical_work, even),
        *([("placed_critical_work", said.placed_critical_work, placed)] if share > 1 else []),
    ]


def _placed(loads: Sequence[int], places: int, share: int) -> int:
    """The largest load of a destination, each expert, heaviest first, at the lightest that has room, first on ties."""
    held: list[list[int]] = [[] for _ in range(places)]
    for load in sorted(loads, reverse=True):
        free = [one for one in held if len(one) < share]
        lightest = min(sum(one) for one in free)
        next(one for one in free if sum(one) == lightest).append(load)
    return max(map(sum, held))


def _ceil(numerator: int, denominator: int) -> int:
    return (numerator + denominator - 1) // denominator

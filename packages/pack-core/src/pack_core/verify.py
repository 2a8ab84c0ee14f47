"""The invariants of a plan, read from the plan and the samples alone.

Nothing here is shared with the planner but the values and the digest, so a mistake there is not repeated here; the
packs of arrival order, which a reordered plan does not hold, are the exception: `schedule` cuts them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pack_core.claims import wrong_claims
from pack_core.digest import digest
from pack_core.types import DispatchCounts, Plan, Sample


def verify(plan: Plan, samples: Sequence[Sample], counts: DispatchCounts | None = None) -> list[str]:
    """Return every violation of the invariants, each a sentence; an empty list when all hold.

    Checked: every sample is in exactly one pack or in the untouched incomplete tail; no pack is over its capacity or
    its cap of documents; the order is that of arrival, or in a balanced plan a permutation of each step, and ranks keep
    to it; all ranks have the same number of packs and none is empty; no sample leaves its optimizer step; position p
    lies on rank `p % ranks`; no step has more packs or work than in arrival order; work, bounds and digest are those
    of the packs, and the work of arrival order that of its packs. It never raises on a wrong plan, however wrong.

    Args:
        plan: the plan to judge.
        samples: the samples it was made from, in arrival order.
        counts: the counts it was made with; without them the figures of expert work are not checked.

    >>> from pack_core import Topology, plan
    >>> samples = [Sample("a", 3), Sample("b", 4)]
    >>> verify(plan(samples, topology=Topology(ranks=1), capacity=8, step_samples=2), samples)
    []
    >>> verify(plan(samples, topology=Topology(ranks=1), capacity=8, step_samples=2), samples[:1])[0]
    'the plan orders 2 samples but 1 were given'
    """
    return [
        *_inputs(plan, samples),
        *_order(plan, samples),
        *_tail(plan, samples),
        *(sentence for number in range(len(plan.steps)) for sentence in _step(plan, samples, number)),
        *_figures(plan, samples, counts),
        *_guard(plan),
    ]


def _name(samples: Sequence[Sample], index: int) -> str:
    known = 0 <= index < len(samples)
    return f"sample {samples[index].id!r} (index {index})" if known else f"unknown index {index}"


def _block(plan: Plan, samples: Sequence[Sample], number: int) -> range:
    """Arrival indices of one optimizer step."""
    start = number * plan.step_samples
    return range(min(start, len(samples)), min(start + plan.step_samples, len(samples)))


def _inputs(plan: Plan, samples: Sequence[Sample]) -> Iterator[str]:
    ranks = plan.topology.ranks
    if plan.step_samples < 1 or plan.step_samples % ranks:
        yield f"step_samples is {plan.step_samples}, not a positive multiple of {ranks} ranks"
    first: dict[str | int, int] = {}
    for index, sample in enumerate(samples):
        if sample.id in first:
            yield f"samples {first[sample.id]} and {index} share the id {sample.id!r}"
        first.setdefault(sample.id, index)
        if sample.length > plan.capacity:
            yield f"{_name(samples, index)} has {sample.length:,} tokens, over the capacity of {plan.capacity:,}"


def _order(plan: Plan, samples: Sequence[Sample]) -> Iterator[str]:
    if len(plan.order) != len(samples):
        yield f"the plan orders {len(plan.order)} samples but {len(samples)} were given"
    held = Counter(plan.order)
    for index, times in held.items():
        if not 0 <= index < len(samples):
            yield f"the order holds unknown index {index}; there are {len(samples)} samples"
        elif times > 1:
            yield f"{_name(samples, index)} is {times} times in the order"
    for index in range(len(samples)):
        if index not in held:
            yield f"{_name(samples, index)} is not in the order"
    for position, index in enumerate(plan.order):
        step = position // max(plan.step_samples, 1)
        if index != position and (plan.pack_order == "arrival" or step >= len(plan.steps)):
            yield (
                f"the order is not arrival order: position {position} holds {_name(samples, index)}, "
                f"where {_name(samples, position)} arrived"
            )
            break
    yield from _strangers(plan, samples)


def _strangers(plan: Plan, samples: Sequence[Sample]) -> Iterator[str]:
    """Samples that the order has in another step than the one they arrived in."""
    size = max(plan.step_samples, 1)
    if plan.pack_order == "arrival":
        return  # any other order than that of arrival was said
    for position, index in enumerate(plan.order[: len(plan.steps) * size]):
        if 0 <= index < len(samples) and index // size != position // size:
            step = f"step {position // size}, not its own"
            yield f"the order has {_name(samples, index)} at position {position}, in {step}"


def _tail(plan: Plan, samples: Sequence[Sample]) -> Iterator[str]:
    size = max(plan.step_samples, 1)
    complete = len(samples) // size
    if len(plan.steps) != complete:
        yield f"the plan has {len(plan.steps)} steps but {len(samples)} samples make {complete} blocks of {size}"
    waiting = tuple(range(complete * size, len(samples)))
    if plan.tail != waiting:
        yield (
            f"the tail is {_brief(plan.tail)} but the incomplete trailing block of {len(samples)} samples in steps "
            f"of {size} is {_brief(waiting)}"
        )


def _step(plan: Plan, samples: Sequence[Sample], number: int) -> Iterator[str]:
    step, block = plan.steps[number], _block(plan, samples, number)
    if len(step.packs) != plan.topology.ranks:
        yield f"step {number} has {len(step.packs)} ranks; the topology has {plan.topology.ranks}"
    counts = [len(packs) for packs in step.packs]
    if len(set(counts)) > 1:
        yield f"step {number} has unequal pack counts {counts}; every rank must forward the same number"
    yield from _packs(plan, samples, number)
    held = Counter(index for packs in step.packs for one in packs for index in one)
    for index, times in held.items():
        if times > 1:
            yield f"{_name(samples, index)} is {times} times in step {number}"
        if index not in block:
            home = "no step"
            if 0 <= index < len(samples):
                belongs = index // max(plan.step_samples, 1)
                home = f"step {belongs}" if belongs < len(samples) // max(plan.step_samples, 1) else "the tail"
            yield f"{_name(samples, index)} is in step {number} but belongs to {home}"
    for index in block:
        if index not in held:
            yield f"{_name(samples, index)} is in no pack of step {number}"
    yield from _columns(plan, samples, number)


def _packs(plan: Plan, samples: Sequence[Sample], number: int) -> Iterator[str]:
    for rank, packs in enumerate(plan.steps[number].packs):
        if not packs:
            yield f"step {number}, rank {rank} has no pack"
        for p, one in enumerate(packs):
            where = f"step {number}, rank {rank}, pack {p}"
            tokens = sum(_lengths(one, samples))
            if not one:
                yield f"{where} is empty"
            if tokens > plan.capacity:
                yield f"{where} has {tokens:,} tokens, over the capacity of {plan.capacity:,}"
            if plan.max_documents is not None and len(one) > plan.max_documents:
                yield f"{where} has {len(one)} samples, over max_documents of {plan.max_documents}"


def _columns(plan: Plan, samples: Sequence[Sample], number: int) -> Iterator[str]:
    """Each sample on the rank of its position, and on that rank in the order of the positions."""
    ranks, start = plan.topology.ranks, number * plan.step_samples
    positions = {index: p for p, index in enumerate(plan.order[start : start + plan.step_samples])}
    for rank, packs in enumerate(plan.steps[number].packs):
        before = -1
        for index in (index for one in packs for index in one):
            position = positions.get(index)
            if position is None:
                continue  # it is not of this step, which is said elsewhere
            if position % ranks != rank:
                yield (
                    f"{_name(samples, index)} is position {position} of step {number} and belongs on rank "
                    f"{position % ranks}, not on rank {rank}"
                )
            if position < before:
                yield f"{_name(samples, index)} is out of order on rank {rank} of step {number}"
            before = max(before, position)


def _guard(plan: Plan) -> Iterator[str]:
    """What a reordered step may never do: take more packs or more work than in arrival order."""
    for number, (before, after) in enumerate(zip(plan.arrival, plan.work, strict=False)):
        for name in ("packs_per_rank", "critical_work_proxy", "attention_token_work", "attention_pair_work"):
            was, now = getattr(before, name), getattr(after, name)
            if was is not None and now is not None and now > was:
                yield f"step {number} has {name} {now} but {was} in arrival order"
        if plan.pack_order == "arrival" and before != after:
            yield f"step {number} claims other work in arrival order than planned, but nothing was reordered"


def _figures(plan: Plan, samples: Sequence[Sample], counts: DispatchCounts | None) -> Iterator[str]:
    figures = (plan.work, plan.arrival, plan.bounds)
    if any(len(one) != len(plan.steps) for one in figures):
        yield (
            f"there are {len(plan.steps)} steps, {len(plan.work)} works, {len(plan.arrival)} works in arrival order "
            f"and {len(plan.bounds)} bounds"
        )
    known = counts if counts is not None and counts.samples == len(samples) else None
    yield from wrong_claims(plan, samples, known)
    found = digest(plan.order, plan.steps)
    if plan.digest != found:
        yield f"the digest is {plan.digest} but the order and packs give {found}"


def _lengths(indices: Iterable[int], samples: Sequence[Sample]) -> Iterator[int]:
    return (samples[index].length for index in indices if 0 <= index < len(samples))


def _brief(indices: tuple[int, ...]) -> str:
    return str(list(indices)) if len(indices) <= 6 else f"[{indices[0]}, ..., {indices[-1]}] ({len(indices)})"

"""The one entry: a collection of samples to the packs of every rank and optimizer step."""

from collections.abc import Sequence

from pack_core.digest import digest
from pack_core.errors import CountError, PackError
from pack_core.lengths import as_integer, as_lengths, check_fit
from pack_core.packing import check_method
from pack_core.schedule import schedule
from pack_core.types import Plan, Sample, Schedule, Topology
from pack_core.work import bounds, work


def plan(
    samples: Sequence[Sample],
    *,
    topology: Topology,
    capacity: int,
    step_samples: int,
    equalize: str = "tokens",
    max_documents: int | None = None,
) -> Plan:
    """Return the packs of every rank for every complete optimizer step of a collection.

    Complete blocks of `step_samples` samples are taken in arrival order; inside a block, position p goes to rank
    `p % ranks`. An incomplete trailing block is left untouched in `tail`; fewer samples than one block are all tail.
    A pure function: the same arguments give the same plan in every process.

    Args:
        samples: the collection, in arrival order, ids unique.
        topology: the ranks.
        capacity: most tokens a pack may hold (`packing_max_tokens`).
        step_samples: samples of one optimizer step over all ranks, a positive multiple of the ranks.
        equalize: `"tokens"`, `"samples"` or `"balanced"`, see `pack_core.equalize`.
        max_documents: most samples a pack may hold; 1 forwards every sample in a row of its own; None for no cap.

    Raises:
        CountError: `step_samples` is not a positive multiple of the ranks.
        LengthError: a sample is longer than `capacity`; it is named, with its length and the limit.
        PackError: there are no samples, two share an id, or an option is unknown or below 1.

    >>> samples = [Sample(i, length) for i, length in enumerate([17, 87, 19, 13, 23, 89, 29, 11, 40])]
    >>> made = plan(samples, topology=Topology(ranks=2), capacity=128, step_samples=8)
    >>> made.steps[0].packs[1]
    ((1, 3), (5, 7))
    >>> made.tail
    (8,)
    """
    ids = _unique_ids(samples)
    capacity = as_integer(capacity, "capacity")
    step_samples = _shared_evenly(step_samples, topology.ranks)
    cap = None if max_documents is None else as_integer(max_documents, "max_documents")
    check_method(equalize)
    lengths = as_lengths([sample.length for sample in samples], ids=ids)
    check_fit(lengths, capacity, ids)
    order = tuple(range(len(samples)))
    complete = len(order) - len(order) % step_samples
    blocks = [order[start : start + step_samples] for start in range(0, complete, step_samples)]
    # Each block is planned over its own lengths, so that the cost of a plan grows with its samples, not with
    # samples times steps.
    held = [[lengths[index] for index in block] for block in blocks]
    local = [
        schedule(
            tokens, range(step_samples), topology=topology, capacity=capacity, equalize=equalize, max_documents=cap
        )
        for tokens in held
    ]
    steps = tuple(_at(block, step) for block, step in zip(blocks, local, strict=True))
    return Plan(
        topology=topology,
        capacity=capacity,
        step_samples=step_samples,
        equalize=equalize,
        max_documents=cap,
        order=order,
        steps=steps,
        tail=order[complete:],
        work=tuple(work(step, tokens, capacity) for step, tokens in zip(local, held, strict=True)),
        bounds=tuple(bounds(tokens, topology.ranks, capacity) for tokens in held),
        digest=digest(order, steps),
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

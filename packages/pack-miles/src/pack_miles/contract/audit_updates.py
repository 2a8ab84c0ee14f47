"""The audit's rules about updates: what was packed, by which plan, and over which denominators."""

from collections.abc import Iterator, Sequence

from pack_core import Plan as CorePlan
from pack_core import Sample, verify

from pack_miles.contract.events import Optimizer, Packing
from pack_miles.contract.facts import Facts, counted, unequal
from pack_miles.contract.log import Update

#: Relative tolerance for ratios that are logged next to the counts they come from.
RATIO_TOLERANCE = 1e-9


def normalizations(facts: Facts) -> Iterator[str]:
    """Yield where the global denominators of an update differ between ranks or from the configuration."""
    for update in facts.updates:
        where = f"update {update.step}"
        yield from unequal(f"{where}: optimizer rollout_id", {r: e.rollout_id for r, e in update.optimizer.items()})
        yield from unequal(f"{where}: scoring_pass", {r: e.scoring_pass for r, e in update.optimizer.items()})
        yield from unequal(f"{where}: normalization", {r: e.normalization for r, e in update.optimizer.items()})
        normal = update.optimizer[facts.ranks[0]].normalization
        if normal.world_size != len(facts.ranks):
            yield f"{where}: normalization is over {counted(normal.world_size, 'rank')}, the run has {len(facts.ranks)}"
        if facts.step_samples is not None and normal.samples != facts.step_samples:
            samples = counted(normal.samples, "sample")
            yield f"{where}: {samples}, but the configuration has {facts.step_samples} an update"
        if normal.active_tokens > normal.model_tokens:
            yield f"{where}: {normal.active_tokens:,} active tokens of only {normal.model_tokens:,} model tokens"


def packings(facts: Facts) -> Iterator[str]:
    """Yield where packs do not add up: in one event, between passes, between ranks, with the optimizer's counts."""
    for update in facts.updates:
        where = f"update {update.step}"
        for rank in facts.ranks:
            yield from _rank_packings(facts, update, rank)
        training = {rank: events[0] for rank, events in update.training.items()}
        yield from unequal(f"{where}: packs", {rank: event.packs for rank, event in training.items()})
        yield from unequal(f"{where}: token_budget", {rank: event.token_budget for rank, event in training.items()})
        yield from unequal(f"{where}: plan_digest", {rank: event.plan_digest for rank, event in training.items()})
        total = sum(event.model_tokens for event in training.values())
        normal = update.optimizer[facts.ranks[0]].normalization.model_tokens
        if len(training) == len(facts.ranks) and total != normal:
            yield f"{where}: the ranks packed {total:,} model tokens, normalization counts {normal:,}"
    # With one sample a rank there is nothing to put together.
    several = [e for update in facts.updates for own in update.training.values() for e in own if e.samples > 1]
    if facts.packing and several and not any(event.packs < event.samples for event in several):
        yield "packing is on, but in no update did a rank run fewer packs than it had samples"


def _rank_packings(facts: Facts, update: Update, rank: int) -> Iterator[str]:
    where = f"update {update.step}, rank {rank}"
    optimizer, scored = update.optimizer[rank], update.optimizer[rank].scoring_pass != "skipped"
    training, scoring = update.training.get(rank, []), update.scoring.get(rank, [])
    for name, events, expected in (("training", training, True), ("scoring", scoring, scored)):
        needed = int(expected and facts.packing)
        if not needed <= len(events) <= int(expected):
            yield f"{where}: {counted(len(events), f'{name} packing event')} where {int(expected)} belongs"
        for event in events:
            yield from _packing(f"{where}, {name}", event, optimizer)
    if training and training[0].packs != optimizer.local_microbatches:
        packs, microbatches = counted(training[0].packs, "pack"), optimizer.local_microbatches
        yield f"{where}: {packs}, but the optimizer counts {counted(microbatches, 'microbatch', 'es')}"
    for what in ("plan_digest", "packs", "samples", "model_tokens", "max_pack_tokens"):
        if training and scoring and getattr(training[0], what) != getattr(scoring[0], what):
            yield (
                f"{where}: {what} is {getattr(scoring[0], what)} in scoring and {getattr(training[0], what)} "
                "in training; both must run the same packs"
            )


def _packing(where: str, event: Packing, optimizer: Optimizer) -> Iterator[str]:
    samples, world = optimizer.normalization.samples, optimizer.normalization.world_size
    if event.samples * world != samples:
        own, ranks = counted(event.samples, "sample"), counted(world, "rank")
        yield f"{where}: {own}, but {samples} over {ranks} are {samples / world:g} each"
    if event.rollout_id != optimizer.rollout_id:
        yield f"{where}: rollout_id {event.rollout_id}, but the optimizer event has {optimizer.rollout_id}"
    if not 1 <= event.packs <= event.samples:
        yield f"{where}: {counted(event.packs, 'pack')} of {counted(event.samples, 'sample')}"
        return
    if event.max_pack_tokens > event.token_budget:
        yield f"{where}: the largest pack has {event.max_pack_tokens:,} tokens, the budget is {event.token_budget:,}"
    if event.model_tokens > event.packs * event.max_pack_tokens:
        yield (
            f"{where}: {event.model_tokens:,} model tokens do not fit {counted(event.packs, 'pack')} of at most "
            f"{event.max_pack_tokens:,}"
        )
    for name, logged, computed in (
        ("fill_fraction", event.fill_fraction, event.model_tokens / (event.packs * event.token_budget)),
        ("samples_per_pack", event.samples_per_pack, event.samples / event.packs),
    ):
        if abs(logged - computed) > RATIO_TOLERANCE * max(1.0, computed):
            yield f"{where}: {name} is {logged:g}, its counts give {computed:g}"


def plans(facts: Facts) -> Iterator[str]:
    """Yield where a recorded plan cannot be rebuilt, breaks its invariants, or is not what the ranks ran."""
    for rollout_id, known in facts.rebuilt.items():
        where = f"plan of collection {rollout_id}"
        if known.plan is None:
            yield f"{where} cannot be rebuilt from its record: {known.error}"
            continue
        yield from (f"{where}: {violation}" for violation in verify(known.plan, known.samples))
    for update in facts.updates:
        for rank, own in update.training.items():
            for event in own:
                where = f"update {event.step}, rank {rank}"
                if event.rollout_id not in facts.rebuilt:
                    yield f"{where}: no plan is recorded for collection {event.rollout_id}"
                    continue
                known, first = facts.rebuilt[event.rollout_id], facts.plans[event.rollout_id].update
                if known.plan is not None:
                    place = event.step - first
                    yield from (
                        f"{where}: {what}" for what in _against_plan(event, rank, place, known.plan, known.samples)
                    )


def _against_plan(event: Packing, rank: int, place: int, plan: CorePlan, samples: Sequence[Sample]) -> Iterator[str]:
    if event.plan_digest != plan.digest:
        yield f"plan_digest {event.plan_digest}, but the recorded plan has {plan.digest}"
    if not 0 <= place < len(plan.steps) or rank >= plan.topology.ranks:
        yield (
            f"the plan of collection {event.rollout_id} has {counted(len(plan.steps), 'step')} on "
            f"{counted(plan.topology.ranks, 'rank')}, "
            "none of them for this update"
        )
        return
    sizes = [sum(samples[index].length for index in pack) for pack in plan.steps[place].packs[rank]]
    for what, planned in (
        ("packs", len(sizes)),
        ("model_tokens", sum(sizes)),
        ("max_pack_tokens", max(sizes)),
        ("token_budget", plan.capacity),
    ):
        if getattr(event, what) != planned:
            yield f"{what} is {getattr(event, what):,}, the plan says {planned:,}"

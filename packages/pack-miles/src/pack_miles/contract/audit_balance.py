"""The audit's rules about expert-balanced packing: what routers executed is what was planned, and no worse for it."""

from collections.abc import Iterator

from pack_core import Plan as CorePlan
from pack_core import WorkReport

from pack_miles.contract.audit_updates import RATIO_TOLERANCE
from pack_miles.contract.events import ExpertBalance, Plan
from pack_miles.contract.facts import Facts, counted

#: Figures of an update that must be the plan's, and works that no planned order may make worse.
FIGURES = (
    "packs_per_rank",
    "dispatches",
    "skew_mean",
    "skew_max",
    "max_slot_assignments",
    "critical_work_proxy",
)
WORKS = ("packs_per_rank", "critical_work_proxy", "attention_token_work", "attention_pair_work")


def balances(facts: Facts) -> Iterator[str]:
    """Yield where an update's routers did not execute what its plan counted, or nobody looked though they had to."""
    found: dict[int, list[ExpertBalance]] = {}
    for rank, events in facts.standing.items():
        for event in events:
            if not isinstance(event, ExpertBalance):
                continue
            found.setdefault(event.step, []).append(event)
            if rank:
                yield f"update {event.step}: expert_balance is rank 0's to write, but rank {rank} did"
            if not facts.expert_balanced:
                yield f"update {event.step}: expert_balance is recorded, but expert_balanced_packing is off"
    for update in facts.updates if facts.expert_balanced else ():
        own = found.get(update.step, [])
        if len(own) != 1:
            yield f"update {update.step}: {counted(len(own), 'expert_balance event')} where 1 belongs"
        for event in own:
            yield from (f"update {update.step}, expert_balance: {what}" for what in _against_plan(facts, event))


def orders(facts: Facts) -> Iterator[str]:
    """Yield where a plan makes a step worse than arrival order, or is not in the order the configuration asks for."""
    for rollout_id, known in facts.rebuilt.items():
        if known.plan is None:
            continue
        where = f"plan of collection {rollout_id}"
        if facts.pack_order not in (None, known.plan.pack_order):
            yield f"{where}: samples are in {known.plan.pack_order} order, but pack_order is {facts.pack_order}"
        if facts.expert_balanced and not known.plan.layers:
            yield f"{where}: expert_balanced_packing is on, but no routed layer was counted"
        for number in range(len(known.plan.steps)):
            report = known.plan.report(number)
            yield from (f"{where}, step {number}: {what}" for what in _worse(report))
        recorded = facts.plans[rollout_id]
        if facts.expert_balanced and recorded.loads_after is None:
            yield f"{where}: expert_balanced_packing is on, but no loads are recorded"
        yield from (f"{where}: {what}" for what in _loads(recorded, known.plan))


def _worse(report: WorkReport) -> Iterator[str]:
    for name in WORKS:
        before, after = getattr(report.before, name), getattr(report.after, name)
        if before is not None and after is not None and after > before:
            yield f"{name} is {after:,}, more than the {before:,} of arrival order"


def _against_plan(facts: Facts, event: ExpertBalance) -> Iterator[str]:
    if event.mismatched_layers:
        yield f"layers {event.mismatched_layers} did not execute the loads that were planned"
    known = facts.rebuilt.get(event.rollout_id)
    if known is None or known.plan is None:
        return  # told where plans are judged
    plan, place = known.plan, event.step - facts.plans[event.rollout_id].update
    if event.plan_digest != plan.digest:
        yield f"plan_digest {event.plan_digest}, but the recorded plan has {plan.digest}"
    if (tuple(event.layers), event.routed_layers) != (plan.layers, plan.routed_layers):
        yield (
            f"it is about layers {event.layers} of {event.routed_layers}, the plan about {list(plan.layers)} of "
            f"{plan.routed_layers}"
        )
    if not 0 <= place < len(plan.steps):
        yield f"the plan of collection {event.rollout_id} has no step for it"
        return
    for name in FIGURES:
        seen, said = getattr(event, name), getattr(plan.work[place], name)
        if said is None or abs(seen - said) > RATIO_TOLERANCE * max(1.0, abs(said)):
            yield f"{name} is {seen:,}, the plan says {said if said is None else f'{said:,}'}"


def _loads(recorded: Plan, plan: CorePlan) -> Iterator[str]:
    """Yield where the recorded loads before and after do not hold as many expert choices, or as many dispatches."""
    if recorded.loads_before is None and recorded.loads_after is None:
        return
    for name, loads, works in (
        ("loads_before", recorded.loads_before or [], plan.arrival),
        ("loads_after", recorded.loads_after or [], plan.work),
    ):
        held = [sum(map(len, step)) for step in loads]
        if held != [work.dispatches for work in works]:
            yield f"{name} tells of {held} dispatches, the plan has {[work.dispatches for work in works]}"
    totals = [
        [sum(sum(map(sum, packs)) for packs in step) for step in loads or []]
        for loads in (recorded.loads_before, recorded.loads_after)
    ]
    if totals[0] != totals[1]:
        yield f"loads_before add up to {totals[0]} expert choices, loads_after to {totals[1]}; reordering loses none"

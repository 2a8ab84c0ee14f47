"""The metrics of an update under the names of W&B, from the events that all ranks wrote of it."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec
from pack_core import Work

from pack_miles.contract.events import Event, ExpertBalance, Memory, Optimizer, Packing, Plan, Rollout, ScoreTiming

OneEvent = TypeVar("OneEvent", bound=Event)

#: What stands before every name, and the axis they are all drawn over: updates completed before this one.
PREFIX = "train/"
STEP = "train/step"


class Record(msgspec.Struct, frozen=True):
    """The part of a plan's record that metrics show."""

    work: tuple[Work, ...]


def collection_metrics(ranks: Sequence[Iterable[Event]]) -> list[dict[str, float]]:
    """Return the metrics of every update of one collection, in order, from the events of all ranks.

    Counts and tokens are of all ranks, seconds those of the slowest; what a collection does once, planning and scoring,
    is shared equally by its updates, so that sums over updates are right. The names depend on how the run is
    configured and on nothing else: expert metrics are there where expert load is planned.

    Args:
        ranks: by rank, its events of this collection.
    """
    events = [event for own in ranks for event in own]
    optimizers = _by_step(_of(events, Optimizer))
    once = _once(events, len(optimizers))
    plan = next(_of(events, Plan), None)
    work = msgspec.convert(plan.record, Record).work if plan else ()
    packings = _by_step(event for event in _of(events, Packing) if event.pass_ == "training")
    balances = _by_step(_of(events, ExpertBalance))
    found = []
    for place, (step, updates) in enumerate(sorted(optimizers.items())):
        values = _packs(packings[step]) | once | _update(updates)
        if place < len(work):
            values |= _work(work[place])
        for balance in balances.get(step, ())[:1]:
            values["packing/expert_dispatch_skew_mean"] = balance.skew_mean
            values["packing/expert_dispatch_skew_max"] = balance.skew_max
        found.append({STEP: float(step - 1)} | {PREFIX + name: float(value) for name, value in values.items()})
    return found


def _packs(packings: Sequence[Packing]) -> dict[str, float]:
    packs = sum(event.packs for event in packings)
    tokens = sum(event.model_tokens for event in packings)
    return {
        "packing/packs_per_rank": packs / len(packings),
        "packing/samples_per_pack": sum(event.samples for event in packings) / packs,
        "packing/tokens_per_pack": tokens / packs,
        "packing/fill_fraction": tokens / sum(event.packs * event.token_budget for event in packings),
        "packing/largest_pack": max(event.max_pack_tokens for event in packings),
    }


def _once(events: Sequence[Event], updates: int) -> dict[str, float]:
    """Return the metrics that all updates of a collection share."""
    scoring = max((event.seconds for event in _of(events, ScoreTiming)), default=0.0)
    planning = math.fsum(event.counting_seconds + event.planning_seconds for event in _of(events, Plan))
    rewards = [event.reward_mean for event in _of(events, Rollout)]
    first = [event.peak_allocated_bytes or 0 for event in _of(events, Memory) if event.rank == 0]
    return {
        "packing/rank0_peak_allocated_bytes": max(first, default=0),
        "packing/planning_seconds": planning / max(updates, 1),
        "packing/score_seconds": scoring / max(updates, 1),
        **({"reward_mean": rewards[0]} if rewards else {}),
    }


def _update(optimizers: Sequence[Optimizer]) -> dict[str, float]:
    first = optimizers[0]
    seconds = max(event.elapsed_seconds for event in optimizers)
    return {
        "packing/train_seconds": seconds,
        "step_seconds": seconds,
        "policy_objective": math.fsum(event.local_policy_objective for event in optimizers),
        "grad_norm": first.gradient_norm,
        "model_tokens": first.normalization.model_tokens,
        "active_response_tokens": first.normalization.active_tokens,
        "completed_steps": first.step,
        "rollout_id": first.rollout_id,
    }


def _work(work: Work) -> dict[str, float]:
    """Return what is planned; counts, no seconds."""
    values = {
        "packing/attention_token_work": work.attention_token_work,
        "packing/attention_pair_work": work.attention_pair_work,
    }
    if work.critical_work_proxy is not None:
        values["packing/critical_work_proxy"] = work.critical_work_proxy
    return {name: float(value) for name, value in values.items()}


def _of(events: Iterable[Event], kind: type[OneEvent]) -> Iterator[OneEvent]:
    return (event for event in events if isinstance(event, kind))


def _by_step(events: Iterable[OneEvent]) -> dict[int, list[OneEvent]]:
    found: dict[int, list[OneEvent]] = {}
    for event in events:
        found.setdefault(event.step, []).append(event)
    return found

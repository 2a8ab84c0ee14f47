"""The audit's rules about where samples come from: none too old at any step, no prompt group doubled, none lost."""

from collections import Counter
from collections.abc import Iterator

from pack_miles.contract.events import RunStarted
from pack_miles.contract.facts import Facts, counted
from pack_miles.contract.groups import RolloutGroups


def ages(facts: Facts) -> Iterator[str]:
    """Yield where an update learned from samples older than the configuration allows, or from weights yet to come."""
    lag = facts.option("core", "max_policy_lag")
    if not isinstance(lag, int):
        return
    for update in facts.updates:
        for rank, event in update.optimizer.items():
            for version in event.local_behavior_versions:
                age = event.step - 1 - int(version)
                if not 0 <= age <= lag:
                    yield (
                        f"update {event.step}, rank {rank}: samples of version {version} are {age} steps old, "
                        f"max_policy_lag is {lag}"
                    )


def groups(facts: Facts) -> Iterator[str]:
    """Yield where the prompt groups of a collection are not those that belong to it, each once and whole."""
    asynchronous = facts.option("miles", "fully_async") is True
    found: dict[int, list[RolloutGroups]] = {}
    for rank, events in facts.standing.items():
        for event in events:
            if isinstance(event, RolloutGroups):
                found.setdefault(event.rollout_id, []).append(event)
                if rank or not asynchronous:
                    why = f"rank 0's to write, but rank {rank} did" if rank else "recorded, but fully_async is off"
                    yield f"collection {event.rollout_id}: rollout_groups is {why}"
    if not asynchronous:
        return
    for rollout_id in facts.plans:
        own = found.get(rollout_id, [])
        if len(own) != 1:
            yield f"collection {rollout_id}: {counted(len(own), 'rollout_groups event')} where 1 belongs"
        for event in own:
            yield from (f"collection {rollout_id}, rollout_groups: {what}" for what in _collection(facts, event))
    yield from _totals(facts)


def _collection(facts: Facts, event: RolloutGroups) -> Iterator[str]:
    count, each = facts.option("miles", "rollout_batch_size"), facts.option("miles", "n_samples_per_prompt")
    named = [origin.group_index for origin in event.groups]
    if isinstance(count, int):
        wanted = range(event.rollout_id * count, (event.rollout_id + 1) * count)
        yield from _told("is named", Counter(named), dict.fromkeys(wanted, 1))
    known = facts.rebuilt[event.rollout_id]
    if known.plan is not None and isinstance(each, int):
        planned = Counter(sample.group for sample in known.samples if isinstance(sample.group, int))
        yield from _told("has samples planned:", planned, dict.fromkeys(named, each))
    said = {str(origin.version) for origin in event.groups}
    trained = {
        version
        for update in facts.updates
        for one in update.optimizer.values()
        if one.rollout_id == event.rollout_id
        for version in one.local_behavior_versions
    }
    if trained - said:
        yield f"updates learned from versions {sorted(trained, key=int)}, groups name {sorted(said, key=int)}"
    counts = event.counts
    ended = counts.completed + counts.lost + counts.discarded + counts.out
    if counts.issued != ended:
        yield f"{counts.issued} groups were handed out, but {ended} came back, were lost or are out"


def _told(verb: str, found: Counter[int], wanted: dict[int, int]) -> Iterator[str]:
    for group in sorted({*found, *wanted}):
        if found[group] != wanted.get(group, 0):
            yield f"group {group} {verb} {found[group]} where {wanted.get(group, 0)} belong"


def _totals(facts: Facts) -> Iterator[str]:
    """Yield where a process took another number of answers than it delivered groups, at the end of its run."""
    for log in facts.run.logs:
        taken, last = 0, None
        for event in log.events:
            if isinstance(event, RunStarted):
                taken, last = 0, None
            elif isinstance(event, RolloutGroups):
                taken, last = taken + len(event.groups), event
                if event.counts.completed < taken:
                    yield f"collection {event.rollout_id}: {taken} groups so far, but {event.counts.completed} answered"
        total = facts.option("miles", "num_rollout")
        if last is not None and last.rollout_id + 1 == total and last.counts.completed != taken:
            yield f"the run delivered {taken} groups in its last process, but {last.counts.completed} were answered"

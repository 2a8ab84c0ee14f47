"""Sampling while training, summed up: how old samples were, and who waited for whom."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import attrs

from pack_miles.contract.events import Event, Optimizer
from pack_miles.contract.facts import counted
from pack_miles.contract.groups import RolloutCounts, RolloutGroups


@attrs.frozen
class Waiting:
    """What an asynchronous run shows beside others. `groups_by_age` counts prompt groups by their age, in optimizer
    steps, at the first update of their collection; `oldest` is the greatest age of any sample at any update.
    """

    groups_by_age: dict[int, int]
    oldest: int
    trainer_seconds: float
    worker_seconds: float
    worker_waited_seconds: float
    counts: tuple[RolloutCounts, ...]

    @property
    def reissued(self) -> int:
        """How often a group was handed out again, in all processes of the run."""
        return sum(one.reissued for one in self.counts)


def waiting_of(events: Sequence[Event]) -> Waiting | None:
    """Return the ages and waits that standing events tell of; None where no rollout worker took part."""
    told = [event for event in events if isinstance(event, RolloutGroups)]
    if not told:
        return None
    origins = [(event, origin) for event in told for origin in event.groups]
    ages = Counter(event.step - origin.version for event, origin in origins)
    return Waiting(
        groups_by_age=dict(sorted(ages.items())),
        oldest=max([*_ages(events), *ages]),
        trainer_seconds=math.fsum(event.trainer_wait_seconds for event in told),
        worker_seconds=math.fsum(origin.seconds for _, origin in origins),
        worker_waited_seconds=math.fsum(origin.waited_seconds for _, origin in origins),
        counts=_last_of_processes(told),
    )


def waiting_told(waiting: Waiting) -> list[tuple[str, str]]:
    """Return ages and waits as labels and texts."""
    total = sum(waiting.groups_by_age.values())
    ages = ", ".join(f"{age}: {count / total:.0%}" for age, count in waiting.groups_by_age.items())
    busy = waiting.worker_seconds + waiting.worker_waited_seconds
    share = waiting.worker_waited_seconds / busy if busy else 0.0
    lost = sum(one.lost_workers for one in waiting.counts)
    discarded = sum(one.discarded for one in waiting.counts)
    return [
        ("age of prompt groups in optimizer steps", f"{ages}; oldest sample at any update {waiting.oldest}"),
        (
            "waiting",
            f"trainer for rollouts {waiting.trainer_seconds:,.1f} s, workers for work "
            f"{waiting.worker_waited_seconds:,.1f} s ({share:.0%} of their time)",
        ),
        (
            "prompt groups",
            f"{total:,} trained, each once; {counted(lost, 'worker')} lost, {waiting.reissued:,} handed out again, "
            f"{counted(discarded, 'late answer')} discarded",
        ),
    ]


def _ages(events: Iterable[Event]) -> Iterable[int]:
    return (
        event.step - 1 - int(version)
        for event in events
        if isinstance(event, Optimizer)
        for version in event.local_behavior_versions
    )


def _last_of_processes(told: Sequence[RolloutGroups]) -> tuple[RolloutCounts, ...]:
    """Return the counts at the end of each process: a later process counts from 0 again."""
    ends = [
        one.counts
        for one, following in zip(told, [*told[1:], None], strict=True)
        if following is None or following.counts.issued < one.counts.issued
    ]
    return tuple(ends)

"""Which prompt groups are out with workers, which are back, and which may go out next: plain values, pure functions.

A group is one prompt with all its samples, numbered through the run: collection c is the groups from `c * groups` on.
It goes out to one worker, comes back whole or is lost with its worker, and then goes out again. Whatever happens, each
group is in its collection exactly once: the first answer counts, and any later one is discarded and counted as such.

Weights are published once a collection. A group goes out only if its samples will be young enough at the last
optimizer step of its collection, whenever that is: workers wait, and no sample is ever too old.
"""

from collections.abc import Mapping
from types import MappingProxyType

import attrs


@attrs.frozen
class Terms:
    """What a run's collections are made of, and how old a sample may be.

    Args:
        groups: prompt groups of a collection.
        steps: optimizer steps of a collection.
        max_policy_lag: optimizer steps that a sample may be behind the weights it trains.
        collections: of the whole run.

    >>> terms = Terms(groups=4, steps=2, max_policy_lag=3, collections=10)
    >>> terms.ahead, terms.age(rollout_id=5, version=8)
    (1, 3)
    """

    groups: int
    steps: int
    max_policy_lag: int
    collections: int

    @property
    def ahead(self) -> int:
        """Collections by which a group may be ahead of the weights that sample it."""
        return (self.max_policy_lag - (self.steps - 1)) // self.steps

    def age(self, rollout_id: int, version: int) -> int:
        """Return how old a sample is at the last optimizer step of its collection, where it is oldest."""
        return (rollout_id + 1) * self.steps - 1 - version


@attrs.frozen
class Issue:
    """One group handed to one worker.

    Args:
        number: of this handing-out, no two in a run alike.
        group: what is to be sampled.
        worker: who samples it.
        version: the optimizer steps that the weights to sample with have seen.
        attempt: 1 for the first time the group is out.
    """

    number: int
    group: int
    worker: int
    version: int
    attempt: int


@attrs.frozen
class Counts:
    """How often groups went out, and what became of it: `issued = completed + lost + discarded +` those still out.

    `reissued` counts the handings-out that were not a group's first.
    """

    issued: int = 0
    completed: int = 0
    reissued: int = 0
    lost: int = 0
    discarded: int = 0


def _empty() -> Mapping[int, Issue]:
    return MappingProxyType({})


@attrs.frozen
class Ledger:
    """Where every group is.

    Args:
        terms: the run's.
        published: collections that the newest published weights were trained on.
        delivered: collections handed to the trainer.
        fresh: the first group that was never out.
        out: by number, what workers have.
        lost: by number, what was lost with its worker; an answer to it may still come.
        done: by group, the issue that was answered first, of groups not yet delivered.
        attempts: by group not yet delivered, how often it was out.
        counts: of everything so far.
    """

    terms: Terms
    published: int
    delivered: int
    fresh: int
    out: Mapping[int, Issue] = attrs.field(factory=_empty)
    lost: Mapping[int, Issue] = attrs.field(factory=_empty)
    done: Mapping[int, Issue] = attrs.field(factory=_empty)
    attempts: Mapping[int, int] = attrs.field(factory=_empty)
    counts: Counts = attrs.field(factory=Counts)

    @property
    def version(self) -> int:
        """The optimizer steps that the newest published weights have seen."""
        return self.published * self.terms.steps

    @property
    def again(self) -> list[int]:
        """Groups that were out, are not now, and have no answer: the next to go out."""
        held = {issue.group for issue in self.out.values()}
        return sorted(group for group in self.attempts if group not in held and group not in self.done)


def begin(terms: Terms, collections: int = 0) -> Ledger:
    """Return the ledger of a run whose first weights are published.

    Args:
        terms: the run's.
        collections: done before, by the run that is resumed.

    >>> ledger, first = issue(begin(Terms(groups=2, steps=1, max_policy_lag=1, collections=3)), worker=0)
    >>> ledger, other = issue(ledger, worker=1)
    >>> ledger = lose(ledger, worker=0)
    >>> ledger, again = issue(ledger, worker=2)
    >>> (first.group, other.group, again.group, again.attempt)
    (0, 1, 0, 2)
    >>> for number in (other.number, again.number, first.number):
    ...     ledger, taken = answer(ledger, number)
    ...     print(taken)
    True
    True
    False
    >>> ledger, collection = deliver(ledger)
    >>> [one.worker for one in collection]
    [2, 1]
    >>> ledger.counts
    Counts(issued=3, completed=2, reissued=1, lost=0, discarded=1)
    """
    return Ledger(terms, published=collections, delivered=collections, fresh=collections * terms.groups)


def issue(ledger: Ledger, worker: int) -> tuple[Ledger, Issue | None]:
    """Return the ledger with one group more out with the worker, and which; None when none may go out now.

    Lost groups go first, then the lowest that was never out.

    Raises:
        ValueError: the worker has a group already.
    """
    held = [one for one in ledger.out.values() if one.worker == worker]
    if held:
        raise ValueError(
            f"worker {worker} still has group {held[0].group}; issue to it when it has answered or is lost"
        )
    terms, group = ledger.terms, next(iter(ledger.again), ledger.fresh)
    rollout_id = group // terms.groups
    if rollout_id >= terms.collections or rollout_id - ledger.published > terms.ahead:
        return ledger, None
    attempt = ledger.attempts.get(group, 0) + 1
    given = Issue(ledger.counts.issued, group, worker, ledger.version, attempt)
    counts = attrs.evolve(
        ledger.counts, issued=ledger.counts.issued + 1, reissued=ledger.counts.reissued + (attempt > 1)
    )
    changed = attrs.evolve(
        ledger,
        fresh=max(ledger.fresh, group + 1),
        out={**ledger.out, given.number: given},
        attempts={**ledger.attempts, group: attempt},
        counts=counts,
    )
    return changed, given


def answer(ledger: Ledger, number: int) -> tuple[Ledger, bool]:
    """Return the ledger after an answer, whole, and whether it counts: only a group's first does.

    An answer to a lost issue counts like any other.

    Raises:
        ValueError: nothing of this number waits for an answer.
    """
    late = number in ledger.lost
    given = ledger.lost.get(number) or ledger.out.get(number)
    if given is None:
        raise ValueError(f"issue {number} was never made, or is answered; each is answered once")
    taken = given.group not in ledger.done and given.group >= ledger.delivered * ledger.terms.groups
    counts = attrs.evolve(
        ledger.counts,
        completed=ledger.counts.completed + taken,
        discarded=ledger.counts.discarded + (not taken),
        lost=ledger.counts.lost - late,
    )
    changed = attrs.evolve(
        ledger,
        out=_without(ledger.out, number),
        lost=_without(ledger.lost, number),
        done={**ledger.done, given.group: given} if taken else ledger.done,
        counts=counts,
    )
    return changed, taken


def lose(ledger: Ledger, worker: int) -> Ledger:
    """Return the ledger without a worker; what it had goes out again, if no other has answered it."""
    held = {number: one for number, one in ledger.out.items() if one.worker == worker}
    return attrs.evolve(
        ledger,
        out=_without(ledger.out, *held),
        lost={**ledger.lost, **held},
        counts=attrs.evolve(ledger.counts, lost=ledger.counts.lost + len(held)),
    )


def publish(ledger: Ledger, collections: int) -> Ledger:
    """Return the ledger with newer weights published.

    Args:
        ledger: as it was.
        collections: that the weights were trained on, one more than those before.

    Raises:
        ValueError: they skip a collection, or were trained on one that was never delivered.
    """
    if collections != ledger.published + 1 or collections > ledger.delivered:
        raise ValueError(
            f"weights of {collections} collections after those of {ledger.published}, with {ledger.delivered} "
            "delivered; publish after each collection, once"
        )
    return attrs.evolve(ledger, published=collections)


def deliver(ledger: Ledger) -> tuple[Ledger, tuple[Issue, ...] | None]:
    """Return the ledger with the next collection delivered, and its answered issues by group; None until it is whole.

    Raises:
        ValueError: a group would be too old at a step of its collection, which `issue` never lets happen.
    """
    terms, rollout_id = ledger.terms, ledger.delivered
    groups = range(rollout_id * terms.groups, (rollout_id + 1) * terms.groups)
    if rollout_id >= terms.collections or not all(group in ledger.done for group in groups):
        return ledger, None
    found = tuple(ledger.done[group] for group in groups)
    for one in found:
        if not 0 <= terms.age(rollout_id, one.version) <= terms.max_policy_lag:
            raise ValueError(
                f"group {one.group} was sampled at version {one.version} and would be "
                f"{terms.age(rollout_id, one.version)} steps old, but max_policy_lag is {terms.max_policy_lag}"
            )
    changed = attrs.evolve(
        ledger,
        delivered=rollout_id + 1,
        done=_without(ledger.done, *groups),
        attempts={group: often for group, often in ledger.attempts.items() if group not in groups},
    )
    return changed, found


def _without(issues: Mapping[int, Issue], *keys: int) -> Mapping[int, Issue]:
    return {key: one for key, one in issues.items() if key not in keys}

"""Deals prompt groups out to rollout workers, new weights with them, and brings whole collections to the trainer.

One thread, one loop: whoever runs it waits for `refs` beside whatever else it waits for, and calls `heard`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import attrs

from pack_miles.asynchronous import ledger as books
from pack_miles.asynchronous.ledger import Issue, Ledger
from pack_miles.asynchronous.post import Delivery
from pack_miles.asynchronous.terms import terms_of
from pack_miles.contract.groups import GroupOrigin, RolloutCounts
from pack_miles.errors import counted
from pack_miles.samples import RolloutRow
from pack_miles.settings.config import Config

#: Workers that may be lost in a row, with no answer between, before the work itself is taken for the cause.
MOST_LOST = 3


@attrs.define(eq=False)
class Seat:
    """One worker: its actor, the slot it has room in, the version of its weights, and where its process is."""

    slot: int
    actor: Any
    version: int | None = None
    place: Any = None


class Dealer:
    """Holds the books of a run's prompt groups, and the actors that work on them.

    Args:
        ray: the module, connected.
        config: the run's.
        seat: starts the actor of a worker in a slot, and returns it.
        ranks: the trainer's actors, the first rank first.
    """

    def __init__(self, ray: ModuleType, config: Config, seat: Callable[[int], Any], ranks: Sequence[Any]) -> None:
        """Start the workers, and wait for the first weights."""
        self._ray, self._config, self._seat, self._ranks = ray, config, seat, ranks
        self._seats: dict[int, Seat] = {}
        self._free: set[int] = set()
        self._waiting: dict[Any, Callable[[Any], None]] = {}
        self._ledger: Ledger | None = None
        self._weights: Any = None
        self._answers: dict[int, tuple[list[RolloutRow], GroupOrigin]] = {}
        self._started, self._lost, self._lost_in_a_row = 0, 0, 0
        for slot in range(config.run.rollout_workers):
            self._start(slot)
        self._fetch()

    @property
    def refs(self) -> list[Any]:
        """What Ray owes: answers, places, weights."""
        return list(self._waiting)

    @property
    def actors(self) -> list[Any]:
        """The actors of all workers that are not known to be lost."""
        return [seat.actor for seat in self._seats.values()]

    @property
    def places(self) -> list[Any]:
        """Where their processes are, of those that have said so."""
        return [seat.place for seat in self._seats.values() if seat.place is not None]

    @property
    def about(self) -> str:
        """What became of the run's groups, in words."""
        if self._ledger is None:
            return ""
        counts = self._ledger.counts
        return (
            f"rollout workers: {counted(counts.issued, 'prompt group')} handed out, {counts.completed:,} answered "
            f"(each once), {counts.reissued:,} of them handed out again after {counted(self._lost, 'lost worker')}, "
            f"{counted(counts.discarded, 'late answer')} discarded"
        )

    def heard(self, ref: Any) -> None:
        """Act on one of `refs` that is there."""
        self._waiting.pop(ref)(ref)
        self._deal()

    def _start(self, slot: int) -> None:
        number, self._started = self._started, self._started + 1
        seat = self._seats[number] = Seat(slot, self._seat(slot))
        self._waiting[seat.actor.place.remote()] = partial(self._placed, number)

    def _placed(self, number: int, ref: Any) -> None:
        try:
            self._seats[number].place = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            self._lose(number, error)
        else:
            self._free.add(number)

    def _fetch(self) -> None:
        about, weights = self._ranks[0].published.options(num_returns=2).remote()
        self._waiting[about] = partial(self._published, weights)

    def _published(self, weights: Any, ref: Any) -> None:
        try:
            collections, version = self._ray.get(ref)
        except self._ray.exceptions.RayError:
            return  # the rank is gone, and whoever waits for its end tells of it
        known = self._ledger
        self._ledger = books.publish(known, collections) if known else books.begin(terms_of(self._config), collections)
        if version != self._ledger.version:
            raise ValueError(
                f"weights of {collections} collections have seen {version} steps, not {self._ledger.version}"
            )
        self._weights = weights
        self._fetch()

    def _deal(self) -> None:
        """Deliver the collections that are whole, then give every free worker a group, as far as there are any."""
        if self._ledger is None:
            return
        while True:
            rollout_id = self._ledger.delivered
            self._ledger, found = books.deliver(self._ledger)
            if found is None:
                break
            self._deliver(rollout_id, found)
        for number in sorted(self._free):
            self._ledger, issue = books.issue(self._ledger, number)
            if issue is None:
                break
            self._send(self._seats[number], issue)

    def _send(self, seat: Seat, issue: Issue) -> None:
        self._free.remove(issue.worker)
        if seat.version != issue.version:
            self._waiting[seat.actor.load.remote(issue.version, self._weights)] = self._loaded
            seat.version = issue.version
        self._waiting[seat.actor.sample.remote(issue.group, issue.version)] = partial(self._answered, issue)

    def _loaded(self, ref: Any) -> None:
        try:
            self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            self._fail(f"a rollout worker cannot take new weights: {_words(error)}")
        except self._ray.exceptions.RayError:
            return  # the group that is sent after the weights is lost with the worker

    def _answered(self, issue: Issue, ref: Any) -> None:
        assert self._ledger is not None  # something was issued
        try:
            answer = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            self._fail(f"a rollout worker failed at prompt group {issue.group}: {_words(error)}")
            return
        except self._ray.exceptions.RayError as error:
            self._lose(issue.worker, error)
            return
        self._ledger, taken = books.answer(self._ledger, issue.number)
        self._lost_in_a_row = 0
        self._free.add(issue.worker)
        if taken:
            origin = GroupOrigin(
                group_index=issue.group,
                worker=issue.worker,
                version=issue.version,
                attempts=issue.attempt,
                seconds=answer.seconds,
                waited_seconds=answer.waited_seconds,
            )
            self._answers[issue.group] = (answer.rows, origin)

    def _lose(self, number: int, error: Exception) -> None:
        """Let another worker take a lost one's place, and its group."""
        seat = self._seats.pop(number)
        self._ray.kill(seat.actor, no_restart=True)  # it may only be out of reach
        if self._ledger is not None:
            self._ledger = books.lose(self._ledger, number)
        self._lost, self._lost_in_a_row = self._lost + 1, self._lost_in_a_row + 1
        if self._lost_in_a_row == MOST_LOST:
            self._fail(f"{MOST_LOST} rollout workers were lost in a row, with no answer between: {_words(error)}")
        else:
            self._start(seat.slot)

    def _deliver(self, rollout_id: int, found: Sequence[Issue]) -> None:
        assert self._ledger is not None
        answers = [self._answers.pop(issue.group) for issue in found]
        counts = self._ledger.counts
        delivery = Delivery(
            rollout_id=rollout_id,
            rows=[row for rows, _ in answers for row in rows],
            groups=[origin for _, origin in answers],
            counts=RolloutCounts(
                **attrs.asdict(counts), out=len(self._ledger.out), workers=self._started, lost_workers=self._lost
            ),
        )
        sent = self._ray.put(delivery)
        for rank in self._ranks:
            rank.deliver.remote(sent)

    def _fail(self, reason: str) -> None:
        """End the run: no rank gets another collection, and each says why."""
        self._waiting.clear()
        self._free.clear()
        for rank in self._ranks:
            rank.fail.remote(reason)


def _words(error: Exception) -> str:
    """Return the last line of what Ray says of an error, where the error itself stands."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[-1][:300]

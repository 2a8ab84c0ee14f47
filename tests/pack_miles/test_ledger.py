"""The books of prompt groups that are out with rollout workers: by hand, and under every order of events."""

from collections import Counter

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pack_miles.asynchronous.ledger import Counts, Issue, Ledger, Terms, answer, begin, deliver, issue, lose, publish

TWO = Terms(groups=2, steps=1, max_policy_lag=1, collections=3)


def out(ledger: Ledger, worker: int) -> tuple[Ledger, Issue]:
    """Issue to a worker that must get a group."""
    ledger, given = issue(ledger, worker)
    assert given is not None
    return ledger, given


def test_a_small_run_by_hand() -> None:
    """Three collections of two groups, one collection ahead at most; worker 0 dies with group 1 and comes back late."""
    ledger = begin(TWO)
    ledger, zero = out(ledger, 1)
    ledger, one = out(ledger, 0)
    assert (zero.group, one.group, one.version, one.attempt) == (0, 1, 0, 1)
    ledger = lose(ledger, 0)
    ledger, taken = answer(ledger, zero.number)
    assert taken
    assert deliver(ledger)[1] is None, "group 1 has no answer yet"
    ledger, again = out(ledger, 1)
    assert (again.group, again.attempt, again.number) == (1, 2, 2)
    ledger, two = out(ledger, 2)
    ledger, three = out(ledger, 3)
    assert (two.group, three.group) == (2, 3), "collection 1 may be sampled with the first weights"
    assert issue(ledger, 4) == (ledger, None), "collection 2 would be two steps behind"
    ledger, taken = answer(ledger, again.number)
    assert taken
    ledger, first = deliver(ledger)
    assert first == (zero, again)
    ledger, taken = answer(ledger, one.number)
    assert not taken, "the lost worker's answer comes too late, its collection is with the trainer"
    ledger = publish(ledger, 1)
    assert ledger.version == 1
    ledger, four = out(ledger, 4)
    assert (four.group, four.version) == (4, 1)
    assert ledger.counts == Counts(issued=6, completed=2, reissued=1, lost=0, discarded=1)
    assert [held.group for held in ledger.out.values()] == [2, 3, 4]


def test_an_answer_of_a_lost_worker_wins_where_it_is_the_first() -> None:
    ledger, early = out(begin(TWO), 0)
    ledger, again = out(lose(ledger, 0), 1)
    assert early.group == again.group == 0
    ledger, taken = answer(ledger, early.number)
    assert taken
    ledger, taken = answer(ledger, again.number)
    assert not taken
    assert ledger.counts == Counts(issued=2, completed=1, reissued=1, lost=0, discarded=1)


@pytest.mark.parametrize(
    ("steps", "lag", "ahead"), [(1, 0, 0), (1, 1, 1), (1, 2, 2), (2, 1, 0), (2, 2, 0), (2, 3, 1), (4, 11, 2)]
)
def test_how_far_workers_may_run_ahead(steps: int, lag: int, ahead: int) -> None:
    """Of collection c the last of its steps is taken after c * steps + steps - 1 others."""
    assert Terms(2, steps, lag, 5).ahead == ahead
    oldest = (ahead + 1) * steps - 1
    assert Terms(2, steps, lag, 5).age(rollout_id=ahead, version=0) == oldest
    assert oldest <= lag < oldest + steps


def test_a_resumed_run_begins_with_the_first_group_that_is_not_trained() -> None:
    terms = Terms(groups=4, steps=2, max_policy_lag=1, collections=3)
    ledger, first = out(begin(terms, collections=2), 0)
    assert (first.group, first.version) == (8, 4)
    for worker, group in ((1, 9), (2, 10), (3, 11)):
        ledger, given = out(ledger, worker)
        assert given.group == group
    assert issue(ledger, 4)[1] is None, "the run has no more groups"


def test_mistakes_are_refused() -> None:
    ledger, first = out(begin(TWO), 0)
    with pytest.raises(ValueError, match="worker 0 still has group 0"):
        issue(ledger, 0)
    with pytest.raises(ValueError, match="issue 7 was never made"):
        answer(ledger, 7)
    answered, _ = answer(ledger, first.number)
    with pytest.raises(ValueError, match="issue 0 was never made, or is answered"):
        answer(answered, first.number)
    with pytest.raises(ValueError, match="weights of 1 collections after those of 0, with 0 delivered"):
        publish(ledger, 1)


def test_a_sample_that_is_too_old_is_never_delivered() -> None:
    """Nothing but a wrong book can hold one: here the version is changed by hand."""
    ledger = begin(Terms(groups=1, steps=1, max_policy_lag=0, collections=9), collections=5)
    ledger, given = out(ledger, 0)
    ledger, _ = answer(ledger, given.number)
    old = attrs.evolve(ledger, done={5: attrs.evolve(given, version=3)})
    with pytest.raises(ValueError, match="group 5 was sampled at version 3 and would be 2 steps old"):
        deliver(old)


@st.composite
def terms(draw: st.DrawFn) -> Terms:
    steps = draw(st.integers(1, 3))
    return Terms(draw(st.integers(1, 4)), steps, steps - 1 + draw(st.integers(0, 4)), draw(st.integers(1, 4)))


class World:
    """A trainer and workers that do as they like; what they see is judged without the ledger's own figures."""

    def __init__(self, terms: Terms) -> None:
        self.terms, self.ledger = terms, begin(terms)
        self.held: dict[int, Issue] = {}
        self.gone: list[Issue] = []
        self.trained = 0
        self.collections: list[tuple[Issue, ...]] = []
        self.ended: Counter[str] = Counter()
        self.workers = 0

    def hand_out(self) -> bool:
        self.workers += 1
        self.ledger, given = issue(self.ledger, self.workers)
        if given is None:
            return False
        self.held[self.workers] = given
        self.ended["issued"] += 1
        return True

    def come_back(self, worker: int) -> None:
        self.ledger, taken = answer(self.ledger, self.held.pop(worker).number)
        self.ended["taken" if taken else "discarded"] += 1

    def die(self, worker: int) -> None:
        self.gone.append(self.held.pop(worker))
        self.ledger = lose(self.ledger, worker)

    def come_back_late(self) -> None:
        self.ledger, taken = answer(self.ledger, self.gone.pop().number)
        self.ended["taken" if taken else "discarded"] += 1

    def collect(self) -> bool:
        self.ledger, found = deliver(self.ledger)
        if found is not None:
            self.collections.append(found)
        return found is not None

    def train(self) -> bool:
        """Train the next collection, if it is there: every step looks at the age of every sample."""
        if self.trained == len(self.collections):
            return False
        for step in range(self.trained * self.terms.steps, (self.trained + 1) * self.terms.steps):
            for one in self.collections[self.trained]:
                assert 0 <= step - one.version <= self.terms.max_policy_lag
        self.trained += 1
        self.ledger = publish(self.ledger, self.trained)
        return True

    def check(self) -> None:
        counts = self.ledger.counts
        assert counts.issued == self.ended["issued"]
        assert (counts.completed, counts.discarded) == (self.ended["taken"], self.ended["discarded"])
        assert counts.lost == len(self.gone)
        assert counts.issued == counts.completed + counts.lost + counts.discarded + len(self.held)
        assert {one.number for one in self.held.values()} == set(self.ledger.out)


@given(terms(), st.lists(st.tuples(st.sampled_from("iiiadlct"), st.integers(0, 9)), max_size=60))
def test_each_group_is_trained_once_and_young_whatever_happens(terms: Terms, happening: list[tuple[str, int]]) -> None:
    world = World(terms)
    for what, which in happening:
        held = sorted(world.held)
        if what == "i":
            world.hand_out()
        elif what == "a" and held:
            world.come_back(held[which % len(held)])
        elif what == "d" and held:
            world.die(held[which % len(held)])
        elif what == "l" and world.gone:
            world.come_back_late()
        elif what == "c":
            world.collect()
        elif what == "t":
            world.train()
        world.check()
    # From anywhere one worker that does its work brings the run to its end: nothing waits for ever.
    for worker in sorted(world.held):
        world.die(worker)
    while world.trained < terms.collections:
        moved = world.hand_out()
        if moved:
            world.come_back(world.workers)
        moved = world.collect() or moved
        assert world.train() or moved, "nothing can go on"
    world.check()
    assert not world.hand_out()
    delivered = [one.group for found in world.collections for one in found]
    assert delivered == list(range(terms.groups * terms.collections))

"""What a trainer rank and the process that deals out its rollouts hand each other, across two threads."""

import queue
from threading import Condition
from typing import Any

import attrs

from pack_miles.contract.groups import GroupOrigin, RolloutCounts
from pack_miles.samples import RolloutRow


@attrs.frozen(eq=False)
class Publication:
    """New weights: the collections and optimizer steps they have seen, and every parameter with all experts."""

    collections: int
    version: int
    weights: dict[str, Any]


@attrs.frozen
class Delivery:
    """A collection in arrival order, and where it came from."""

    rollout_id: int
    rows: list[RolloutRow]
    groups: list[GroupOrigin]
    counts: RolloutCounts


class Post:
    """One rank's: its training thread publishes and waits, another thread of its process fetches and delivers.

    >>> post = Post()
    >>> post.publish(Publication(0, 0, {}))
    >>> post.published().version
    0
    >>> post.fail("all workers are lost")
    >>> post.wait(0, seconds=1.0)
    Traceback (most recent call last):
    ...
    ValueError: all workers are lost
    """

    def __init__(self) -> None:
        """Begin with nothing published and nothing delivered."""
        self._publications: queue.SimpleQueue[Publication] = queue.SimpleQueue()
        self._deliveries: dict[int, Delivery] = {}
        self._failure = ""
        self._changed = Condition()

    def publish(self, publication: Publication) -> None:
        """Hand out new weights."""
        self._publications.put(publication)

    def published(self) -> Publication:
        """Return the next weights, once they are there."""
        return self._publications.get()

    def deliver(self, delivery: Delivery) -> None:
        """Bring a collection; they may come in any order."""
        with self._changed:
            self._deliveries[delivery.rollout_id] = delivery
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Say that no further collection will come, and why."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def wait(self, rollout_id: int, seconds: float) -> Delivery:
        """Return a collection once it is there, and forget it.

        Raises:
            ValueError: it will not come, or did not come within so many seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: rollout_id in self._deliveries or bool(self._failure), timeout=seconds)
            if rollout_id in self._deliveries:
                return self._deliveries.pop(rollout_id)
            raise ValueError(
                self._failure
                or f"the rollout workers did not bring collection {rollout_id} within run.timeout_seconds = "
                f"{seconds:g}; raise it, or take more of them (run.rollout_workers)"
            )

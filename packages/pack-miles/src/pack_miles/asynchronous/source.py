"""The trainer's side: publish the weights as they are, wait for the collection, write down where it came from."""

from collections.abc import Callable

from pack_miles.asynchronous.post import Delivery, Post, Publication
from pack_miles.contract.groups import RolloutGroups
from pack_miles.samples import RolloutRow
from pack_miles.settings.config import Config
from pack_miles.training.actor import Actor


def from_workers(
    config: Config, rollout_id: int, actor: Actor, post: Post, tick: Callable[[], float]
) -> list[RolloutRow]:
    """Return a collection that rollout workers have sampled, in arrival order, the same on every rank.

    Every rank waits for itself, outside all collectives, for `run.timeout_seconds` at most.

    Raises:
        RankError: on every rank, when it does not come, or is not what was asked for.
    """
    weights = actor.model.full_state()
    if actor.world.rank == 0:
        post.publish(Publication(rollout_id, actor.completed_steps, weights))
    begin = tick()

    def wait() -> Delivery:
        delivery = post.wait(rollout_id, config.run.timeout_seconds)
        _check(config, delivery)
        return delivery

    delivery = actor.world.agreed(wait)
    if actor.world.rank == 0:
        actor.sink.write(
            RolloutGroups(
                rank=0,
                step=actor.completed_steps,
                rollout_id=rollout_id,
                groups=delivery.groups,
                counts=delivery.counts,
                trainer_wait_seconds=tick() - begin,
            )
        )
    return delivery.rows


def _check(config: Config, delivery: Delivery) -> None:
    """Raise unless every sample of the collection is there once, and as old as its group's origin says."""
    count, each = config.collection_samples, config.miles.n_samples_per_prompt
    first = delivery.rollout_id * count
    found = [row.index for row in delivery.rows]
    if found != list(range(first, first + count)):
        raise ValueError(
            f"collection {delivery.rollout_id} has the samples {found}, but {first} to {first + count - 1} belong to it"
        )
    for place, row in enumerate(delivery.rows):
        origin = delivery.groups[place // each]
        if row.group_index != origin.group_index or row.weight_versions != [str(origin.version)]:
            raise ValueError(
                f"sample {row.index} of group {row.group_index} names the versions {row.weight_versions}, but group "
                f"{origin.group_index} was to be sampled at version {origin.version}"
            )

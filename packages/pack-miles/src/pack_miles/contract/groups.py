"""The event that says where the prompt groups of an asynchronous collection came from."""

import msgspec

from pack_miles.contract.line import Amount, Count, Line, Positive


class GroupOrigin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one prompt group came from: the worker, and the optimizer steps that the weights it was sampled from saw.

    `attempts` counts how often it had been out with a worker; above 1 it was lost with one before. `seconds` it took to
    sample, after its worker had waited `waited_seconds` for it.
    """

    group_index: Count
    worker: Count
    version: Count
    attempts: Positive
    seconds: Amount
    waited_seconds: Amount


class RolloutCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of every prompt group that this process handed to a worker so far.

    `issued` is every handing-out, `reissued` those that were not their group's first. Each of them ended as the answer
    that counts (`completed`, once a group), `lost` with its worker or `discarded` because the group had an answer, or
    is still `out`: `issued = completed + lost + discarded + out`. `workers` are those that were started.
    """

    issued: Count
    completed: Count
    reissued: Count
    lost: Count
    discarded: Count
    out: Count
    workers: Positive
    lost_workers: Count


class RolloutGroups(Line, frozen=True, kw_only=True):
    """Rollout workers brought a collection; `groups` in arrival order, `step` as in `Rollout`.

    The trainer waited `trainer_wait_seconds` for it. A group's samples are `step - version` steps old at the first
    update of the collection, and one more at each further one.
    """

    rollout_id: Count
    groups: list[GroupOrigin]
    counts: RolloutCounts
    trainer_wait_seconds: Amount

    @property
    def update(self) -> int:
        """The first update that learns from this collection."""
        return self.step + 1

"""Whose documents these are: of which rank, and of which worker of its loader."""

from __future__ import annotations

import attrs
import torch.distributed
from pack_core.errors import PackError
from torch.utils.data import get_worker_info


@attrs.frozen
class Shard:
    """One reader of several that together read everything once.

    >>> shard = Shard(rank=1, world=2, worker=0, workers=3)
    >>> shard.index, shard.count
    (3, 6)
    """

    rank: int = 0
    world: int = 1
    worker: int = 0
    workers: int = 1

    def __attrs_post_init__(self) -> None:
        """Refuse a rank that is not there."""
        if not 0 <= self.rank < self.world:
            raise PackError(f"rank is {self.rank} of world {self.world}; it must be from 0 to {self.world - 1}")

    @property
    def index(self) -> int:
        """Its number among all readers."""
        return self.rank * self.workers + self.worker

    @property
    def count(self) -> int:
        """How many readers there are."""
        return self.world * self.workers

    def __str__(self) -> str:
        """Say it in words."""
        return f"rank {self.rank} of {self.world}, worker {self.worker} of {self.workers}"


def find_shard(rank: int, world: int, distributed: bool) -> Shard:
    """Return the shard of this process: the worker's number is the loader's, the rank's is given or asked for.

    Raises:
        PackError: the rank was to be asked of torch.distributed, which has no process group here.
    """
    if distributed:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise PackError(
                "distributed=True asks torch.distributed for the rank, but this process has no process group; workers "
                "that are spawned never have one. Give rank= and world= where the dataset is made"
            )
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    worker = get_worker_info()
    return Shard(rank, world) if worker is None else Shard(rank, world, worker.id, worker.num_workers)

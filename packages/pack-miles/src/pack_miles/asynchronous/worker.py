"""A rollout worker: samples whole prompt groups from the newest weights it was given, and times its waiting."""

import time

import attrs
import torch
from torch import Tensor

from pack_miles.samples import RolloutRow
from pack_miles.settings.config import Config
from pack_miles.tasks import TASKS
from pack_miles.training.collection import sample_groups
from pack_miles.training.policy import build_sampler
from pack_miles.training.ray_ranks import Place, place_here


@attrs.frozen
class Answer:
    """One group's rows, the seconds it took to sample them, and those the worker had waited for the group."""

    rows: list[RolloutRow]
    seconds: float
    waited_seconds: float


class RolloutWorker:
    """Holds the policy with all its experts; a group depends on its number, the seeds and the weights alone."""

    def __init__(self, config: Config) -> None:
        """Build the policy of a configuration on this process's CPU."""
        torch.set_num_threads(config.run.threads_per_rank)
        self._config = config
        self._task = TASKS[str(config.data.task)]
        self._policy = build_sampler(config, self._task.vocabulary, torch.device("cpu"))
        self._version: int | None = None
        self._since = time.perf_counter()

    def place(self) -> Place:
        """Return where this process is."""
        return place_here()

    def load(self, version: int, weights: dict[str, Tensor]) -> None:
        """Take newer weights, which have seen `version` optimizer steps."""
        self._policy.load_full_state(weights)
        self._version = version

    def sample(self, group: int, version: int) -> Answer:
        """Return a group sampled from the weights of a version.

        Raises:
            ValueError: these are not the weights at hand.
        """
        if version != self._version:
            raise ValueError(
                f"group {group} is to be sampled at version {version}, but this worker has {self._version}"
            )
        begin = time.perf_counter()
        rows = sample_groups(self._config, self._task, [group], self._policy, version)
        end = time.perf_counter()
        waited, self._since = begin - self._since, end
        return Answer(rows, end - begin, waited)

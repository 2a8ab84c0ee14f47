"""A run of Weights & Biases; the only module that imports wandb."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pack_miles.settings.config import Config
from pack_miles.training.metrics import PREFIX, STEP

#: Where runs go unless WANDB_PROJECT says otherwise.
PROJECT = "pack-miles"


class WandbRun:
    """An open run of W&B, with `train/step` declared as the axis of every metric."""

    def __init__(self, config: Config) -> None:
        """Open a run; entity, mode, key and the like come from W&B's own environment variables.

        Runs of one name, a run and what resumed it, are one group.
        """
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", config.name),
            group=os.environ.get("WANDB_RUN_GROUP", config.name),
            dir=config.output.root,
            config=config.resolved() | {"configuration_digest": config.digest},
            settings=wandb.Settings(console="off", disable_git=True, save_code=False, silent=True),
        )
        self._run.define_metric(STEP)
        self._run.define_metric(f"{PREFIX}*", step_metric=STEP)

    def log(self, values: Mapping[str, float]) -> None:
        """Write the metrics of one update."""
        self._run.log(dict(values))

    def finish(self, failed: bool) -> None:
        """End the run and wait until what was logged is stored or sent."""
        self._run.finish(exit_code=int(failed))

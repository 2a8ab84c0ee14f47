"""One real run that several tests look at."""

from pathlib import Path

import pytest
from support.miles_config import write_toml
from support.miles_runs import LIMIT, TINY, command, started


@pytest.fixture(scope="session")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of four ranks that planned expert load, followed by W&B offline."""
    folder = tmp_path_factory.mktemp("run")
    changes = {"run.ranks": 4, "core.expert_balanced_packing": True, "tracking.use_wandb": True, "miles.num_rollout": 2}
    file = str(write_toml(folder, TINY | changes))
    own = {"WANDB_MODE": "offline", "WANDB_CONFIG_DIR": str(folder), "WANDB_CACHE_DIR": str(folder)}
    with started(command("train", file), **own) as process:
        _, told = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, told
    return folder / "out"

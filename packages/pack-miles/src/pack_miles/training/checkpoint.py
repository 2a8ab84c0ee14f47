"""A run's state on disk, complete or not there at all.

Every rank writes its own part into a folder that gets its name only when all parts are in it. Sampling and dropout
draw from seeds derived from the run's seed and the step, so no generator state is kept.
"""

import shutil
from pathlib import Path
from typing import Any

import torch

from pack_miles import standing
from pack_miles.standing import Standing
from pack_miles.training.collectives import World


def save(root: Path, where: Standing, state: dict[str, Any], keep: int, world: World) -> Path:
    """Write a checkpoint on all ranks and return its path; older ones beyond `keep` go.

    Args:
        root: the run's output folder.
        where: how far the run has come.
        state: this rank's model and optimizer state.
        keep: how many checkpoints stay.
        world: all ranks take part.
    """
    final = root / "checkpoints" / f"collection_{where.rollouts:06d}"
    partial = final.with_suffix(standing.PARTIAL)

    def begin() -> None:
        if world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def finish() -> None:
        if world.rank == 0:
            standing.write(partial, where)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            for old in standing.checkpoints(root)[:-keep]:
                shutil.rmtree(old)

    world.agreed(begin)
    world.agreed(lambda: torch.save(state, partial / f"rank{world.rank}.pt"))
    world.agreed(finish)
    return final


def load(path: Path, world: World) -> dict[str, Any]:
    """Return this rank's state of a checkpoint.

    Raises:
        RankError: on every rank, when any rank cannot read its part.
    """
    part = path / f"rank{world.rank}.pt"

    def read() -> dict[str, Any]:
        try:
            state: dict[str, Any] = torch.load(part, weights_only=True)
        except Exception as error:  # a torn file fails in as many ways as its format has parts
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"{part} cannot be read ({reason}); remove {path} and resume from the one before"
            ) from error
        return state

    return world.agreed(read)

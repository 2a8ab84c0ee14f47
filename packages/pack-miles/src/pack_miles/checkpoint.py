"""A run's state on disk, complete or not there at all.

Every rank writes its own part into a folder that gets its name only when all parts are in it. Sampling and dropout
draw from seeds derived from the run's seed and the step, so no generator state is kept.
"""

import shutil
from pathlib import Path
from typing import Any

import attrs
import torch

from pack_miles.collectives import World
from pack_miles.errors import InputError


@attrs.frozen
class Position:
    """Where a run stands: `rollouts` collections done, `completed_steps` optimizer updates taken."""

    rollouts: int
    completed_steps: int


def folder(root: Path) -> Path:
    """Return where a run keeps its checkpoints."""
    return root / "checkpoints"


def latest(root: Path) -> Path | None:
    """Return the newest complete checkpoint under a run's root, or None."""
    found = sorted(folder(root).glob("collection_" + "[0-9]" * 6))
    return found[-1] if found else None


def save(root: Path, position: Position, state: dict[str, Any], configuration: str, keep: int, world: World) -> Path:
    """Write a checkpoint on all ranks and return its path; older ones beyond `keep` go.

    Args:
        root: the run's output folder.
        position: where the run stands.
        state: this rank's model and optimizer state.
        configuration: the configuration's digest; a resume with another is refused.
        keep: how many checkpoints stay.
        world: all ranks take part.
    """
    final = folder(root) / f"collection_{position.rollouts:06d}"
    partial = final.with_suffix(".partial")
    if world.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    part = {
        "state": state,
        "position": attrs.asdict(position),
        "configuration": configuration,
        "world_size": world.size,
    }
    world.agreed(lambda: torch.save(part, partial / f"rank{world.rank}.pt"))
    if world.rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in sorted(folder(root).glob("collection_" + "[0-9]" * 6))[:-keep]:
            shutil.rmtree(old)
    world.barrier()
    return final


def load(path: Path, configuration: str, world: World) -> tuple[Position, dict[str, Any]]:
    """Return where the checkpointed run stood and this rank's state.

    Raises:
        InputError: when the checkpoint is of another number of ranks or another configuration.
    """
    part = torch.load(path / f"rank{world.rank}.pt", weights_only=True)
    if part["world_size"] != world.size:
        raise InputError(f"{path} was written by {part['world_size']} ranks, this run has {world.size}; use as many")
    if part["configuration"] != configuration:
        raise InputError(
            f"{path} was written under configuration {part['configuration']}, this is {configuration}; "
            "resume with the configuration the run was started with, or choose another output.root"
        )
    return Position(**part["position"]), part["state"]

"""Where a run's checkpoints lie and what each says of itself, readable before any process starts."""

from pathlib import Path

import msgspec

#: The file that rank 0 adds last; without it a folder is no checkpoint.
FILE = "standing.json"


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run has come: collections done, updates taken; and which run it is."""

    rollouts: int
    completed_steps: int
    world_size: int
    configuration: str


def checkpoints(root: Path) -> list[Path]:
    """Return a run's complete checkpoints, oldest first."""
    return sorted(path.parent for path in (root / "checkpoints").glob(f"collection_{'[0-9]' * 6}/{FILE}"))


def latest(root: Path) -> Path | None:
    """Return the newest complete checkpoint under a run's root, or None.

    >>> latest(Path("no-such-run")) is None
    True
    """
    found = checkpoints(root)
    return found[-1] if found else None


def read(checkpoint: Path) -> Standing:
    """Return what a checkpoint says of itself."""
    return msgspec.json.decode((checkpoint / FILE).read_bytes(), type=Standing)


def write(checkpoint: Path, standing: Standing) -> None:
    """Write a checkpoint's own description into its folder."""
    (checkpoint / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(standing)))

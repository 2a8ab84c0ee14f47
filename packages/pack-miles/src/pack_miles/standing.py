"""Where a run's checkpoints lie and what each says of itself, readable before any process starts."""

from pathlib import Path

import msgspec

from pack_miles.errors import InputError

#: The file that rank 0 adds last; without it a folder is no checkpoint.
FILE = "standing.json"

#: The ending of a folder whose ranks are still writing.
PARTIAL = ".partial"


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run has come: collections done, updates taken; and which run it is."""

    rollouts: int
    completed_steps: int
    world_size: int
    configuration: str


def checkpoints(root: Path) -> list[Path]:
    """Return a run's complete checkpoints, oldest first."""
    found = [path.parent for path in (root / "checkpoints").glob(f"collection_*/{FILE}")]
    return sorted((path for path in found if path.suffix != PARTIAL), key=lambda path: int(path.name.split("_")[1]))


def latest(root: Path) -> Path | None:
    """Return the newest complete checkpoint under a run's root, or None.

    >>> latest(Path("no-such-run")) is None
    True
    """
    found = checkpoints(root)
    return found[-1] if found else None


def read(checkpoint: Path) -> Standing:
    """Return what a checkpoint says of itself.

    Raises:
        InputError: its description cannot be read; names the file and the remedy.
    """
    try:
        return msgspec.json.decode((checkpoint / FILE).read_bytes(), type=Standing)
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(
            f"{checkpoint / FILE} cannot be read ({error}); remove {checkpoint} and resume from the one before"
        ) from None


def write(checkpoint: Path, standing: Standing) -> None:
    """Write a checkpoint's own description into its folder."""
    (checkpoint / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(standing)))

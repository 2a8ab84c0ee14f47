"""What single ranks do in tests of the runtime."""

from pathlib import Path
from typing import Any

import torch
from pack_miles.training.collectives import RankError, World
from pack_miles.training.column import ColumnOptions, pack_column
from pack_miles.training.scoring import compare


def fail_on_one(rank: int, size: int) -> str:
    """Fail on rank 1 alone and return what this rank hears of it."""

    def action() -> int:
        if rank == 1:
            raise ValueError("sample 'q17/3' is broken")
        return rank

    try:
        World(rank, size).agreed(action)
    except RankError as error:
        return str(error)
    return "nothing"


def differ(rank: int, size: int) -> str:
    """Bring another step on the last rank and return what this rank hears of it."""
    world = World(rank, size)
    world.same({"samples": 4, "step": 1})
    try:
        world.same({"samples": 4, "step": 1 + (rank == size - 1)})
    except RankError as error:
        return str(error)
    return "nothing"


def columns(rank: int, size: int, lengths: list[int], capacity: int, step_samples: int) -> Any:
    """Pack this rank's stride column; return its packs as places in the collection, or the error."""
    own = lengths[rank::size]
    options = ColumnOptions(step_samples, capacity, "samples", None)
    try:
        steps = pack_column(list(range(rank, len(lengths), size)), own, options, World(rank, size))
    except RankError as error:
        return str(error)
    return [[[place * size + rank for place in pack] for pack in packs] for packs in steps]


def compare_apart(rank: int, size: int, broken: bool) -> Any:
    """Compare log-probabilities that differ by 0.1 per rank number, the last rank's of another shape if `broken`."""
    tokens = 3 + (broken and rank == size - 1)
    first, second = torch.zeros(tokens), torch.full((3,), 0.1 * rank)
    try:
        check = compare([first], [second], [torch.ones(3)], World(rank, size))
    except RankError as error:
        return str(error)
    return check.active_tokens, round(check.mean_abs, 6), round(check.max_abs, 6)


def children(pid: int) -> list[int]:
    """Return the live descendants of a process."""
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def alive(pid: int) -> bool:
    """Return whether a process is there and not a zombie."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"

"""How many different row shapes a run's packs have: a compiled model may compile each of them anew."""

from collections.abc import Mapping, Sequence

import attrs

from pack_miles.contract.events import Plan
from pack_miles.reporting.balance import Grid, PlannedUpdate, token_grids

#: Rows are told apart in steps of so many tokens. The trainer this contract comes from saw about 30 s of compilation
#: for each new one.
STEP_TOKENS = 1024


@attrs.frozen
class Shapes:
    """Distinct `ceil(tokens / 1024)` of the rows of one rank, the largest number over ranks.

    `planned` is of the packs as they ran, `arrival` of the same samples in arrival order, `possible` what the budget
    allows at most.
    """

    planned: int
    arrival: int
    possible: int

    def told(self) -> str:
        """Return the count in words, and what would avoid some.

        >>> Shapes(planned=4, arrival=6, possible=6).told()
        '4 of 6 possible (arrival order: 6)'
        >>> Shapes(planned=1, arrival=1, possible=1).told()
        '1, the only one: no row is longer than 1,024 tokens'
        """
        if self.possible == 1:
            return f"1, the only one: no row is longer than {STEP_TOKENS:,} tokens"
        other = "" if self.planned == self.arrival else f" (arrival order: {self.arrival:,})"
        return f"{self.planned:,} of {self.possible:,} possible{other}"


def shapes_of(
    plans: Mapping[int, Plan], planned: Sequence[PlannedUpdate], rollouts: Mapping[int, int], capacity: int | None
) -> Shapes | None:
    """Return the row shapes of all planned updates, or None where none can be laid out again.

    Args:
        plans: by rollout id.
        planned: the updates.
        rollouts: the rollout id of each update, by update.
        capacity: tokens of one row at most.
    """
    before: list[Grid] = []
    after: list[Grid] = []
    for update in planned:
        event = plans[rollouts[update.step]]
        grids = token_grids(event, update.step - event.update, update.trace)
        if grids is not None:
            before.append(grids[0])
            after.append(grids[1])
    if not after or capacity is None:
        return None
    return Shapes(most_shapes(after), most_shapes(before), _steps(capacity))


def most_shapes(grids: Sequence[Grid]) -> int:
    """Return the distinct shapes that one rank sees over all updates, of the rank that sees most.

    >>> most_shapes([((1000, 1025), (900, 1000)), ((2048, 3000), (1024, 1024))])
    3
    """
    seen: dict[int, set[int]] = {}
    for grid in grids:
        for rank, packs in enumerate(grid):
            seen.setdefault(rank, set()).update(map(_steps, packs))
    return max(map(len, seen.values()), default=0)


def _steps(tokens: int) -> int:
    return -(-tokens // STEP_TOKENS)

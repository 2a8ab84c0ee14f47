"""What is planned: samples, and the ranks they go to."""

import attrs

from pack_core.errors import LengthError, PackError, TopologyError
from pack_core.lengths import LARGEST, as_identity, as_integer


@attrs.frozen
class Sample:
    """One rollout or document, as the planner sees it.

    Attributes:
        id: its name, a `str` or `int`, unique in what is planned together.
        length: tokens, prompt and response together, at least 1.
        group: what it is compared with (the prompt it answers), or None.

    Raises:
        PackError: the id or group is neither `str` nor `int`.
        LengthError: the length is no whole number of at least 1.

    >>> Sample("q17/3", 812, group="q17")
    Sample(id='q17/3', length=812, group='q17')
    """

    id: str | int
    length: int
    group: str | int | None = None

    def __attrs_post_init__(self) -> None:
        """Turn NumPy and torch scalars into plain values, and refuse what is no id, length or group."""
        object.__setattr__(self, "id", as_identity(self.id, "the id of a sample"))
        try:
            length = as_integer(self.length, f"the length of sample {self.id!r}")
        except PackError as error:
            raise LengthError(str(error)) from None
        if length > LARGEST:
            raise LengthError(f"the length of sample {self.id!r} is {length:,}; it must be at most {LARGEST:,}")
        object.__setattr__(self, "length", length)
        if self.group is not None:
            object.__setattr__(self, "group", as_identity(self.group, f"the group of sample {self.id!r}"))


@attrs.frozen
class Topology:
    """How the ranks are arranged: replicas of one complete expert set, each spread over `expert_parallel` ranks.

    Raises:
        TopologyError: `ranks` is not a multiple of `expert_parallel`, or either is below 1.

    >>> topology = Topology(ranks=4, expert_parallel=2)
    >>> topology.replicas, topology.replica(3), topology.destination(3)
    (2, 1, 1)
    """

    ranks: int
    expert_parallel: int = 1

    def __attrs_post_init__(self) -> None:
        """Refuse ranks that the expert parallel degree does not divide."""
        try:
            object.__setattr__(self, "ranks", as_integer(self.ranks, "ranks"))
            object.__setattr__(self, "expert_parallel", as_integer(self.expert_parallel, "expert_parallel"))
        except PackError as error:
            raise TopologyError(str(error)) from None
        if self.ranks % self.expert_parallel:
            fitting = [degree for degree in range(1, self.ranks + 1) if self.ranks % degree == 0]
            raise TopologyError(
                f"{self.ranks} ranks cannot hold whole replicas of expert_parallel {self.expert_parallel}; "
                f"use a multiple of {self.expert_parallel} ranks or an expert_parallel of {_either(fitting)}"
            )

    @property
    def replicas(self) -> int:
        """Number of complete expert sets."""
        return self.ranks // self.expert_parallel

    def replica(self, rank: int) -> int:
        """Return the replica a rank belongs to, `rank // expert_parallel`."""
        return self._known(rank) // self.expert_parallel

    def destination(self, rank: int) -> int:
        """Return which share of the experts a rank owns, `rank % expert_parallel`."""
        return self._known(rank) % self.expert_parallel

    def _known(self, rank: int) -> int:
        if not 0 <= rank < self.ranks:
            raise TopologyError(f"rank {rank} does not exist; there are {self.ranks} ranks, 0 to {self.ranks - 1}")
        return rank


def _either(numbers: list[int]) -> str:
    head, last = numbers[:-1], str(numbers[-1])
    return f"{', '.join(map(str, head))} or {last}" if head else last

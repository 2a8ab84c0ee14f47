"""The values of this package. Each is frozen, compares by content and holds metadata only, never a tensor."""

from array import array
from collections.abc import Iterator
from itertools import pairwise

import attrs

from pack_core.errors import LengthError, PackError, TopologyError
from pack_core.lengths import LARGEST, as_identity, as_integer

_SHOWN_SAMPLES = 24


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


@attrs.frozen(repr=False)
class Packing:
    """Packs over n samples, compressed as `cu_seqlens` is: two flat rows of integers, whatever the number of packs.

    Pack p holds the samples `order[offsets[p]:offsets[p + 1]]`. `len()` is the number of packs; `packing[p]` and
    iteration give lists of sample indices.

    Attributes:
        order: indices of samples, `[n]`, int64.
        offsets: where each pack starts, `[packs + 1]`, int64; starts at 0, strictly increases, ends at n.

    Raises:
        PackError: the offsets do not cut `order` into packs that hold something.

    >>> packing = Packing(array("q", [0, 1, 2, 3]), array("q", [0, 3, 4]))
    >>> len(packing), packing[0], list(packing)
    (2, [0, 1, 2], [[0, 1, 2], [3]])
    >>> packing
    Packing([[0, 1, 2], [3]])
    """

    order: "array[int]"
    offsets: "array[int]"

    def __attrs_post_init__(self) -> None:
        """Refuse offsets that leave a sample out or a pack empty."""
        offsets = self.offsets
        if not offsets or offsets[0] != 0 or offsets[-1] != len(self.order):
            ends = f"{offsets[0]} to {offsets[-1]}" if offsets else "nothing"
            raise PackError(f"offsets span {ends}; they must span 0 to {len(self.order)}, the number of samples")
        for p, (start, stop) in enumerate(pairwise(offsets)):
            if start >= stop:
                raise PackError(f"pack {p} spans {start} to {stop}; every pack must hold at least one sample")

    def __len__(self) -> int:
        """Return the number of packs."""
        return len(self.offsets) - 1

    def __getitem__(self, p: int) -> list[int]:
        """Return the sample indices of pack p; negative p counts from the end, as in a list."""
        place = p + len(self) if p < 0 else p
        if not 0 <= place < len(self):
            raise IndexError(f"pack {p} does not exist; there are {len(self)} packs")
        return self.order[self.offsets[place] : self.offsets[place + 1]].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the sample indices of each pack."""
        for start, stop in pairwise(self.offsets):
            yield self.order[start:stop].tolist()

    def __repr__(self) -> str:
        """Show the packs, or only their number when they are many."""
        if len(self.order) > _SHOWN_SAMPLES:
            return f"<Packing of {len(self.order):,} samples in {len(self):,} packs>"
        return f"Packing({list(self)})"


@attrs.frozen
class Schedule:
    """The packs of one optimizer step: `packs[rank][p]` is a tuple of indices into the planned samples.

    >>> step = Schedule((((0, 2), (4,)), ((1,), (3, 5))))
    >>> step.packs_per_rank, step.packs[1][0]
    (2, (1,))
    """

    packs: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def packs_per_rank(self) -> int:
        """Number of forwards of this step on every rank."""
        return max(map(len, self.packs), default=0)


@attrs.frozen
class Work:
    """What one optimizer step costs, in counts. A count is a proxy: it orders schedules, it is not a wall time.

    Attributes:
        packs_per_rank: forwards on every rank.
        attention_token_work: tokens; over packs, the sum of the largest rank's.
        attention_pair_work: tokens squared; over packs, the sum of the largest rank's sum of squared sample lengths.
        model_tokens: tokens of all ranks and packs.
        max_pack_tokens: tokens of the largest pack.
        fill_fraction: `model_tokens / (ranks * packs_per_rank * capacity)`, in (0, 1].
    """

    packs_per_rank: int
    attention_token_work: int
    attention_pair_work: int
    model_tokens: int
    max_pack_tokens: int
    fill_fraction: float


@attrs.frozen
class Bounds:
    """What no packing of the same samples over the same ranks can go below; units as in `Work`."""

    packs_per_rank: int
    attention_token_work: int
    attention_pair_work: int


@attrs.frozen(repr=False)
class Plan:
    """Who forwards what, when: the schedules of all complete optimizer steps, and the samples that wait.

    Attributes:
        topology: the ranks.
        capacity: most tokens a pack may hold.
        step_samples: samples of one optimizer step, over all ranks.
        equalize: how ranks with fewer packs were split up to the largest count.
        max_documents: most samples a pack may hold, or None.
        order: every sample index once, in the order planned; the tail last.
        steps: one `Schedule` per complete block of `step_samples`.
        tail: indices of the incomplete trailing block, untouched, in arrival order.
        work: one `Work` per step.
        bounds: one `Bounds` per step.
        digest: of `order` and `steps`, see `pack_core.digest`.
    """

    topology: Topology
    capacity: int
    step_samples: int
    equalize: str
    max_documents: int | None
    order: tuple[int, ...]
    steps: tuple[Schedule, ...]
    tail: tuple[int, ...]
    work: tuple[Work, ...]
    bounds: tuple[Bounds, ...]
    digest: str

    def __repr__(self) -> str:
        """Show the shape of the plan, not its thousands of indices."""
        counts = ", ".join(str(step.packs_per_rank) for step in self.steps[:8]) + (", ..." if self.steps[8:] else "")
        return (
            f"<Plan of {len(self.order):,} samples: {len(self.steps)} steps of {self.step_samples} on "
            f"{self.topology.ranks} ranks, packs per rank [{counts}], {len(self.tail)} samples in the tail, "
            f"capacity {self.capacity:,}, digest {self.digest[:12]}>"
        )


def _either(numbers: list[int]) -> str:
    head, last = numbers[:-1], str(numbers[-1])
    return f"{', '.join(map(str, head))} or {last}" if head else last

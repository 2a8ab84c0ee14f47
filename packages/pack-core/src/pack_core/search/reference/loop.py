"""The reference's swap search: the schedule that other planners here are compared with. Needs NumPy.

It starts from arrival order, swaps two positions at a time, and returns the best order that is in none of seven
values worse than the better of arrival order and two greedy orders.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from pack_core.errors import CountError, PackError
from pack_core.lengths import LARGEST, as_integer, as_lengths, check_fit
from pack_core.packing import check_method
from pack_core.search.reference.greedy import anchor, worse
from pack_core.search.reference.proposals import propose
from pack_core.search.reference.state import Block, Counts, State, build, exact, smooth, swapped
from pack_core.types import GUARDED, Topology

_STALE_LIMIT = 256


@attrs.frozen
class ReferenceResult:
    """What the search chose, and how it got there.

    Attributes:
        order: the sample at each position, `[samples]`.
        iterations: pairs taken from the proposals, those seen before included.
        proposals: pairs evaluated.
        accepted: pairs that moved the search.
        fixed: evaluations in which the packs were cut at the same places.
        columns: evaluations that counted the touched ranks anew.
        global_repack: evaluations that changed the pack count of all ranks.
        guard_rejections: evaluated orders that were worse than the anchor in some guarded value.
        guard_rejections_by_metric: how many of them, by value; one order may be worse in several.
        stop: `"deadline"`, `"lower_bound"`, `"stagnation"`, `"no_candidates"` or `"proposal_budget"`.
        search_objective: objective of the order where the search stood at its end, which need not be admissible.
        search_work: expert, token and pair work of that order.
        before: the eight measured values of arrival order.
        after: those of `order`.
    """

    order: tuple[int, ...]
    iterations: int
    proposals: int
    accepted: int
    fixed: int
    columns: int
    global_repack: int
    guard_rejections: int
    guard_rejections_by_metric: dict[str, int]
    stop: str
    search_objective: float
    search_work: tuple[int, int, int]
    before: dict[str, float]
    after: dict[str, float]


def reference_search(
    lengths: Sequence[int],
    counts: Counts,
    *,
    topology: Topology,
    capacity: int,
    equalize: str,
    proposals: int,
    expired: Callable[[], bool],
    seed: int,
    max_documents: int | None = None,
    attempts: int | None = None,
) -> ReferenceResult:
    """Return the order that the reference's search finds for the samples of one optimizer step.

    The same inputs, seed and number of iterations give the same order; a limit on time gives it only by way of
    `attempts`.

    Args:
        lengths: tokens of each sample, `[samples]`, in arrival order.
        counts: dispatches of each sample, `[samples, layers, destinations]`, any integer dtype.
        topology: the ranks; `expert_parallel` is the number of destinations.
        capacity: most tokens a pack may hold.
        equalize: how ranks with fewer packs are split, see `pack_core.equalize`; the reference does `"samples"`.
        proposals: most iterations; 0 leaves the better of arrival order and the greedy orders.
        expired: whether the time allowance is over; asked before every iteration.
        seed: of NumPy's default generator, at least 0.
        max_documents: most samples a pack may hold, or None.
        attempts: iterations after which a search that the time cut short stopped, to repeat it; `expired` is not
            asked then.

    Raises:
        CountError: the ranks would not hold the same number of samples.
        LengthError: a length is no whole number of at least 1, or over `capacity`.
        PackError: the counts do not belong to the lengths and the topology, or an option cannot be used.

    >>> counts = np.array([[[9, 1]], [[1, 9]], [[9, 1]], [[1, 9]]])
    >>> topology = Topology(ranks=4, expert_parallel=2)
    >>> reference_search([5] * 4, counts, topology=topology, capacity=8, equalize="samples", proposals=64,
    ...                  expired=lambda: False, seed=0).stop
    'lower_bound'
    """
    block = _block(lengths, counts, topology, capacity, equalize, max_documents)
    budget, seed = as_integer(proposals, "proposals", least=0), as_integer(seed, "seed", least=0)
    limit = None if attempts is None else as_integer(attempts, "attempts", least=0)
    arrival = build(block, range(len(block.lengths)))
    search = _Search(block, arrival, anchor(block, arrival))
    stop = search.run(budget, expired if limit is None else lambda: search.tally["iterations"] >= limit, seed)
    tally = search.tally
    return ReferenceResult(
        order=search.best.order,
        iterations=tally["iterations"],
        proposals=tally["proposals"],
        accepted=tally["accepted"],
        fixed=tally["fixed"],
        columns=tally["columns"],
        global_repack=tally["global_repack"],
        guard_rejections=tally["guard_rejections"],
        guard_rejections_by_metric={name: search.rejected[name] for name in GUARDED},
        stop=stop,
        search_objective=exact(search.current, search.scale),
        search_work=search.current.work,
        before=dict(arrival.metrics),
        after=dict(search.best.metrics),
    )


def counts_table(counts: "array[int]", samples: int, destinations: int) -> Counts:
    """Return flat counts as `[samples, layers, destinations]`, int64."""
    return np.asarray(counts).reshape(samples, -1, destinations).astype(np.int64)


def measure(
    lengths: Sequence[int],
    counts: Counts,
    order: Sequence[int],
    *,
    topology: Topology,
    capacity: int,
    equalize: str,
    max_documents: int | None = None,
) -> dict[str, float]:
    """Return the eight values the reference reports for an order of one step's samples, under its names.

    Args:
        lengths: tokens of each sample, `[samples]`.
        counts: dispatches of each sample, `[samples, layers, destinations]`, any integer dtype.
        order: the sample at each position, `[samples]`.
        topology: the ranks; `expert_parallel` is the number of destinations.
        capacity: most tokens a pack may hold.
        equalize: how ranks with fewer packs are split, see `pack_core.equalize`.
        max_documents: most samples a pack may hold, or None.

    Raises:
        CountError: the ranks would not hold the same number of samples.
        LengthError: a length is no whole number of at least 1, or over `capacity`.
        PackError: the order does not hold every sample once, the counts do not belong to the lengths and the topology,
            or an option cannot be used.

    >>> counts = np.ones((8, 1, 2), dtype=np.int64)
    >>> measured = measure(range(2, 10), counts, range(8), topology=Topology(4, 2), capacity=20, equalize="samples")
    >>> measured["attention_token_work"], measured["attention_pair_work"]
    (14, 106)
    """
    block = _block(lengths, counts, topology, capacity, equalize, max_documents)
    given = [as_integer(sample, "a sample in order", least=0) for sample in order]
    if sorted(given) != list(range(len(block.lengths))):
        raise PackError(f"order must hold each of the {len(block.lengths)} samples once; it holds {len(given)} indices")
    return dict(build(block, given).metrics)


class _Search:
    """One run: where the search stands, the best admissible order so far, and what was counted on the way."""

    def __init__(self, block: Block, arrival: State, limit: State) -> None:
        self.block, self.current, self.anchor, self.best = block, arrival, limit, limit
        self.scale = arrival.work
        self.tally: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()

    def run(self, budget: int, expired: Callable[[], bool], seed: int) -> str:
        """Search until something stops it, and return what did."""
        generator = np.random.default_rng(seed)
        bounds = _lower_bounds(self.block)
        seen: set[tuple[int, int]] = set()
        pending: list[tuple[int, int]] = []
        stale = 0
        for _ in range(budget):
            if expired():
                return "deadline"
            if all(work <= bound for work, bound in zip(self.current.work, bounds, strict=True)):
                return "lower_bound"
            if stale >= _STALE_LIMIT:
                return "stagnation"
            pending = pending or propose(self.block, self.current, generator)
            if not pending:
                return "no_candidates"
            pair = pending.pop()
            self.tally["iterations"] += 1
            stale += 1
            if pair in seen:
                continue
            seen.add(pair)
            if self._try(pair):
                seen, pending, stale = set(), [], 0
        return "proposal_budget"

    def _try(self, pair: tuple[int, int]) -> bool:
        """Evaluate one swap, offer it to the guard, and return whether the search moved there."""
        state, mode = swapped(self.block, self.current, *pair)
        self.tally["proposals"] += 1
        self.tally[mode] += 1
        larger = worse(state, self.anchor)
        if larger:
            self.tally["guard_rejections"] += 1
            self.rejected.update(larger)
        elif self._rank(state) < self._rank(self.best):
            self.best = state
        if not self._improves(state):
            return False
        self.tally["accepted"] += 1
        self.current = state
        return True

    def _rank(self, state: State) -> tuple[float, float, float]:
        return exact(state, self.scale), state.metrics["critical_work_proxy"], state.metrics["skew_mean"]

    def _improves(self, state: State) -> bool:
        if state.packs_per_rank > self.current.packs_per_rank:
            return False
        reached, held = exact(state, self.scale), exact(self.current, self.scale)
        if reached != held:
            return reached < held
        return smooth(state, self.scale) < smooth(self.current, self.scale)


def _lower_bounds(block: Block) -> tuple[int, int, int]:
    """Expert, token and pair work that no order can go below, as the reference states them."""
    ranks, replicas = block.topology.ranks, block.topology.replicas
    demand = block.counts.sum(axis=0).max(axis=1).tolist()
    pairs = sum(length**2 for length in block.lengths)
    return sum(-(-largest // replicas) for largest in demand), -(-sum(block.lengths) // ranks), -(-pairs // ranks)


def _block(
    lengths: Sequence[int],
    counts: Counts,
    topology: Topology,
    capacity: int,
    equalize: str,
    max_documents: int | None,
) -> Block:
    tokens = tuple(as_lengths(lengths))
    capacity = as_integer(capacity, "capacity")
    check_method(equalize)
    check_fit(tokens, capacity)
    if not tokens or len(tokens) % topology.ranks:
        raise CountError(
            f"{len(tokens)} samples do not give {topology.ranks} ranks the same number each; "
            f"use a positive multiple of {topology.ranks}"
        )
    if sum(length**2 for length in tokens) > LARGEST:
        raise PackError(f"the squared lengths sum to more than {LARGEST:,}; check how the lengths were computed")
    cap = None if max_documents is None else as_integer(max_documents, "max_documents")
    return Block(tokens, _checked(counts, len(tokens), topology), topology, capacity, equalize, cap)


def _checked(counts: Counts, samples: int, topology: Topology) -> Counts:
    given = np.asarray(counts)
    if given.dtype.kind not in "iu":
        raise PackError(f"counts are {given.dtype}; give an integer array [samples, layers, destinations]")
    if given.ndim != 3 or given.shape[0] != samples or 0 in given.shape or given.shape[2] != topology.expert_parallel:
        raise PackError(
            f"counts have shape {list(given.shape)}; they must be [{samples}, layers, {topology.expert_parallel}]: "
            "one row a sample, at least one layer, one destination for each rank of a replica"
        )
    lowest = int(given.min())
    if lowest < 0:
        sample, layer, destination = np.unravel_index(int(given.argmin()), given.shape)
        raise PackError(
            f"the sample at position {sample} has {lowest} dispatches in layer {layer} to destination {destination}; "
            "a count is at least 0"
        )
    # Loads are compared with their means as whole numbers, that is times the number of loads of one layer.
    if sum(map(int, given.max(axis=(1, 2)))) * given[0].size * topology.ranks > LARGEST:
        raise PackError("the counts are too large for sums in 64 bits; check how they were computed")
    return given.astype(np.int64)

"""One optimizer step: the constructed orders, the best of them as a baseline, and the search from there."""

from array import array
from collections.abc import Callable, Sequence
from itertools import count

import attrs

from pack_core.errors import PackError
from pack_core.filling import dealt
from pack_core.kernels import choose_kernels
from pack_core.kernels.loads import Kernel, kernel_of
from pack_core.search.construct import by_experts, full, level
from pack_core.search.guard import Standing, standing, worse
from pack_core.search.layout import Layout, Rules
from pack_core.search.objective import Objective
from pack_core.search.priced import Limits, PricedSearch
from pack_core.types import Search, SearchTrace, Topology

#: Squared lengths of a step that sums of 64 bits hold with room to spare.
_WIDEST = 2**61

#: Starts the clock of one search and returns what says, given the attempts so far, whether it is over.
Watch = Callable[[], Callable[[int], bool]]


@attrs.frozen
class Block:
    """The samples of one optimizer step, in arrival order.

    `counts` are `[samples, layers, destinations]`, flat; `destinations` is 1 and `counts` empty without routes.
    `bounds` are those of expert, token and pair work.
    """

    lengths: Sequence[int]
    counts: "array[int]"
    destinations: int
    rules: Rules
    bounds: tuple[int, int, int]


@attrs.frozen
class _Candidate:
    name: str
    order: tuple[int, ...]
    standing: Standing
    value: int


def improve(
    block: Block,
    search: Search,
    *,
    seed: int,
    watch: Watch,
) -> SearchTrace:
    """Return the best order found for a step and how it was found.

    Args:
        block: the step.
        search: what to do.
        seed: of the random numbers.
        watch: starts the clock, once the search begins, and returns whether the allowance is over; it is asked between
            batches, with the attempts so far.
    """
    if search.method == "reference":
        return _as_reference(block, search, seed, watch())
    wide = sum(length * length for length in block.lengths) >= _WIDEST
    kernels = "python" if wide else search.kernels  # both give the same plan, but NumPy's integers end at 64 bits
    kernel = kernel_of(block.counts, len(block.lengths), block.destinations, kernels)
    candidates, objective = _candidates(block, kernel)
    baseline = _baseline(candidates, search)
    priced = PricedSearch(
        block.lengths,
        block.rules,
        kernel.loads,
        objective,
        (baseline.order, baseline.standing),
        Limits(search.proposals, block.bounds, watch()),
        seed,
        search.max_slot_assignments,
    )
    for start in _starts(candidates, baseline):
        priced.run(start.order)
        if priced.stop != "stagnation":
            break
    return SearchTrace(
        method=search.method,
        seed=seed,
        baseline=baseline.name,
        attempts=priced.attempts,
        proposals=priced.proposals,
        screened=dict(priced.screened),
        estimated=priced.estimated,
        accepted=dict(priced.accepted),
        rejections=dict(priced.rejections),
        paths=dict(priced.paths),
        stop=priced.stop,
        order=priced.best[0],
    )


def _as_reference(block: Block, search: Search, seed: int, expired: Callable[[int], bool]) -> SearchTrace:
    if not block.counts:
        raise PackError("search method 'reference' needs counts of routed experts; give counts or use 'priced'")
    choose_kernels("numpy")  # says what to install where it is missing
    from pack_core.search.reference.loop import counts_table, reference_search

    asked = count()
    found = reference_search(
        block.lengths,
        counts_table(block.counts, len(block.lengths), block.destinations),
        topology=Topology(block.rules.ranks, block.destinations),
        capacity=block.rules.capacity,
        equalize=block.rules.equalize,
        proposals=search.proposals,
        expired=lambda: expired(next(asked)),
        seed=seed,
        max_documents=block.rules.max_documents,
    )
    return SearchTrace(
        method="reference",
        seed=seed,
        baseline="reference",
        attempts=found.iterations,
        proposals=found.proposals,
        screened={"seen": found.iterations - found.proposals},
        estimated=0,
        accepted={"reference": found.accepted},
        rejections=found.guard_rejections_by_metric,
        paths={"fixed": found.fixed, "columns": found.columns, "global": found.global_repack},
        stop=found.stop,
        order=found.order,
    )


def _candidates(block: Block, kernel: Kernel) -> tuple[list[_Candidate], Objective]:
    """Arrival order first, then the constructed ones."""
    ranks = block.rules.ranks
    columns = {"length": dealt(block.lengths, ranks)}
    if block.counts:
        growth = kernel.growth(ranks // block.destinations)
        columns["expert"] = by_experts(block.lengths, growth, block.destinations, ranks)
    orders = {"arrival": list(range(len(block.lengths)))}
    for name, of_ranks in columns.items():
        orders[name] = full(of_ranks, block.lengths, block.rules)
        orders[f"{name}, level"] = level(of_ranks, block.lengths, block.rules)
    found = []
    for name, order in orders.items():
        layout = Layout(order, block.lengths, block.rules)
        found.append((name, layout.order(), standing(layout, kernel.loads(layout))))
    _, _, (_, expert, _, _, _, token, pair) = found[0]
    objective = Objective(expert, token, pair)
    return [_Candidate(*one, objective.value(one[2][1], one[2][5], one[2][6])) for one in found], objective


def _baseline(candidates: Sequence[_Candidate], search: Search) -> _Candidate:
    """The order that the chosen one must keep to: the fewest packs, then the lowest objective.

    None that makes the pack count or a work of arrival order worse; under the guard `"reference"`, none that makes any
    guarded figure worse. A plan with fewer, fuller packs always has a larger load in each dispatch: holding that to
    arrival order would refuse every one.
    """
    arrival, limit = candidates[0], search.max_slot_assignments
    works = {"packs_per_rank", "critical_work_proxy", "attention_token_work", "attention_pair_work"}
    fit = [arrival]
    for candidate in candidates[1:]:
        refused = set(worse(candidate.standing, arrival.standing))
        over = limit is not None and candidate.standing[4] > limit
        if not over and not (refused if search.guard == "reference" else refused & works):
            fit.append(candidate)
    if limit is not None and arrival.standing[4] > limit and len(fit) > 1:
        fit.remove(arrival)
    return min(fit, key=lambda candidate: (candidate.standing[0], candidate.value))


def _starts(candidates: Sequence[_Candidate], baseline: _Candidate) -> list[_Candidate]:
    """Where to search from: the best order constructed, the baseline, arrival; none that needs more packs.

    Level packs leave a search less to do than full ones: they are the best to start from only where they are better by
    more than a hundredth.
    """
    best = min(candidates, key=lambda one: (one.standing[0], one.value * (101 if one.name.endswith("level") else 100)))
    starts = {one.order: one for one in (best, baseline, candidates[0]) if one.standing[0] <= baseline.standing[0]}
    return list(starts.values())

"""The reference's greedy orders, and the guard that decides whether one may replace another. Needs NumPy."""

from collections.abc import Sequence

import numpy as np

from pack_core.search.reference.state import Block, Counts, State, build, next_fit
from pack_core.types import GUARDED


def anchor(block: Block, arrival: State) -> State:
    """Return the best of arrival order and the two greedy orders: the one no result may be worse than.

    A greedy order replaces the best so far only if none of the seven guarded values is larger and one is smaller.
    """
    best = arrival
    samples = range(len(block.lengths))
    for sequence in (samples, sorted(samples, key=lambda sample: (-block.lengths[sample], sample))):
        state = build(block, greedy(block, sequence))
        if not worse(state, best) and worse(best, state):
            best = state
    return best


def worse(state: State, than: State) -> list[str]:
    """Return the guarded values that are larger in `state` than in the other; none when it is admissible."""
    measured, limits = state.metrics, than.metrics
    return [name for name in GUARDED if measured[name] > limits[name]]


def greedy(block: Block, sequence: Sequence[int]) -> tuple[int, ...]:
    """Return the order of the samples when each row of one sample a rank is dealt to even out the expert loads.

    Samples are taken `ranks` at a time, in the sequence given. Those of a row whose dispatches are most concentrated
    choose first: the replica whose largest loads grow least, as far as it has room. Inside a replica the longest sample
    goes to the rank with the fewest tokens. Loads are forgotten where packs of the longest sample of every row would
    end; tokens are not.
    """
    topology = block.topology
    rows = [sequence[start : start + topology.ranks] for start in range(0, len(sequence), topology.ranks)]
    longest = [max(block.lengths[sample] for sample in row) for row in rows]
    band_starts = set(next_fit(longest, block.capacity, block.max_documents)[:-1])
    destinations = block.counts.shape[2]
    concentration = (destinations * block.counts.max(axis=2) - block.counts.sum(axis=2)).sum(axis=1).tolist()
    loads = np.zeros((topology.replicas, *block.counts.shape[1:]), np.int64)
    tokens = [0] * topology.ranks
    order: list[int] = []
    for number, row in enumerate(rows):
        if number in band_starts:
            loads[:] = 0
        visit = sorted(row, key=lambda sample: (-concentration[sample], sample))
        members = _dealt(block, visit, loads)
        order += [sample for replica, held in enumerate(members) for sample in _seated(block, replica, held, tokens)]
    return tuple(order)


def _dealt(block: Block, visit: Sequence[int], loads: Counts) -> list[list[int]]:
    """Return the samples each replica gets, and add their dispatches to `loads`."""
    members: list[list[int]] = [[] for _ in range(block.topology.replicas)]
    for sample in visit:
        grown = (loads + block.counts[sample]).max(axis=2).sum(axis=1) - loads.max(axis=2).sum(axis=1)
        free = [replica for replica, held in enumerate(members) if len(held) < block.topology.expert_parallel]
        chosen = min(free, key=grown.tolist().__getitem__)
        members[chosen].append(sample)
        loads[chosen] += block.counts[sample]
    return members


def _seated(block: Block, replica: int, members: Sequence[int], tokens: list[int]) -> list[int]:
    """Return one sample for each rank of a replica, and add their lengths to `tokens`."""
    degree = block.topology.expert_parallel
    seats: dict[int, int] = {}
    for sample in sorted(members, key=lambda sample: (-block.lengths[sample], sample)):
        free = [rank for rank in range(replica * degree, (replica + 1) * degree) if rank not in seats]
        rank = min(free, key=tokens.__getitem__)
        seats[rank] = sample
        tokens[rank] += block.lengths[sample]
    return [seats[rank] for rank in sorted(seats)]

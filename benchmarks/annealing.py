"""A judge for plans: simulated annealing over packs, compiled, given more freedom than a planner has.

It moves samples between packs of fixed number, under the capacity and with the same number of samples on every rank,
and need not be the next-fit cut of any order. What it reaches is therefore out of reach for some plans.
"""

import math

import numba
import numpy as np
from pack_core import Schedule
from workloads import Workload


def anneal(
    workload: Workload, start: Schedule, arrival: tuple[int, int, int], proposals: int, seed: int = 0
) -> tuple[int, int, int]:
    """Return the expert, token and pair work that annealing reaches from a schedule.

    Args:
        workload: the samples.
        start: where to begin; its pack count is kept.
        arrival: the three works of arrival order, which weigh the objective.
        proposals: swaps that keep to the capacity; others are free.
        seed: of the random numbers.
    """
    ranks, packs = len(start.packs), start.packs_per_rank
    place = np.zeros(len(workload.lengths), np.int64)
    for rank, of_rank in enumerate(start.packs):
        for pack, members in enumerate(of_rank):
            place[list(members)] = rank * packs + pack
    best = (math.inf, 0, 0, 0)
    for warmth in (1e-3, 3e-3):
        found = _annealed(
            workload.lengths,
            workload.table,
            place.copy(),
            ranks,
            packs,
            workload.capacity,
            proposals // 2,
            warmth,
            np.asarray(arrival, np.float64),
            seed,
        )
        best = min(best, found)
    return int(best[1]), int(best[2]), int(best[3])


@numba.njit(cache=True)
def _annealed(lengths, counts, place, ranks, packs, capacity, proposals, warmth, arrival, seed):  # type: ignore[no-untyped-def]
    np.random.seed(seed)
    samples, layers, places = counts.shape
    groups = ranks // places
    tokens, squares = np.zeros((packs, ranks), np.int64), np.zeros((packs, ranks), np.int64)
    loads = np.zeros((packs, layers, groups, places), np.int64)
    for i in range(samples):
        rank, p = place[i] // packs, place[i] % packs
        tokens[p, rank] += lengths[i]
        squares[p, rank] += lengths[i] ** 2
        loads[p, :, rank // places] += counts[i]
    work = np.zeros((packs, 3), np.int64)
    for p in range(packs):
        _measure(loads, tokens, squares, work, p)
    total = work.sum(0)
    value = (total / arrival).sum()
    best, found = value, total.copy()
    done = 0
    while done < proposals:
        i, j = np.random.randint(samples), np.random.randint(samples)
        a, b = place[i], place[j]
        more = lengths[j] - lengths[i]
        ra, pa, rb, pb = a // packs, a % packs, b // packs, b % packs
        if a == b or tokens[pa, ra] + more > capacity or tokens[pb, rb] - more > capacity:
            continue
        done += 1
        before = work.copy()
        _swap(loads, tokens, squares, counts, lengths, i, j, ra, pa, rb, pb, places)
        _measure(loads, tokens, squares, work, pa)
        _measure(loads, tokens, squares, work, pb)
        total = work.sum(0)
        now = (total / arrival).sum()
        heat = warmth * (1e-5 / warmth) ** (done / proposals)
        if now <= value or np.random.random() < math.exp((value - now) / heat):
            value, place[i], place[j] = now, b, a
            if now < best:
                best, found = now, total.copy()
        else:
            _swap(loads, tokens, squares, counts, lengths, j, i, ra, pa, rb, pb, places)
            work[:] = before
    return best, found[0], found[1], found[2]


@numba.njit(cache=True)
def _swap(loads, tokens, squares, counts, lengths, i, j, ra, pa, rb, pb, places):  # type: ignore[no-untyped-def]
    more, squared = lengths[j] - lengths[i], lengths[j] ** 2 - lengths[i] ** 2
    tokens[pa, ra] += more
    tokens[pb, rb] -= more
    squares[pa, ra] += squared
    squares[pb, rb] -= squared
    loads[pa, :, ra // places] += counts[j] - counts[i]
    loads[pb, :, rb // places] -= counts[j] - counts[i]


@numba.njit(cache=True)
def _measure(loads, tokens, squares, work, p):  # type: ignore[no-untyped-def]
    expert = 0
    for layer in range(loads.shape[1]):
        expert += loads[p, layer].max()
    work[p, 0], work[p, 1], work[p, 2] = expert, tokens[p].max(), squares[p].max()

"""Slow, obvious versions of what the search of orders computes, written without it."""

import random
from array import array
from collections.abc import Iterator, Sequence
from itertools import permutations

from pack_core import DispatchCounts, Sample, schedule
from support.core_oracles import Packs, next_fit, split_by_samples, split_by_tokens

Laid = list[Packs]


def lay(
    order: Sequence[int], lengths: Sequence[int], ranks: int, capacity: int, method: str, cap: int | None = None
) -> Laid:
    """The packs of every rank: next-fit of its column, split up to the largest count."""
    if method == "balanced":  # its own tests compare it with brute force
        laid = schedule(lengths, ranks, capacity, order=order, equalize=method, max_documents=cap)
        return [[list(one) for one in packs] for packs in laid.packs]
    columns = [list(order[rank::ranks]) for rank in range(ranks)]
    held = [[lengths[i] for i in column] for column in columns]
    packed = [next_fit(one, capacity, cap) for one in held]
    count = max(map(len, packed))
    cut = [
        split_by_tokens(one, tokens, count) if method == "tokens" else split_by_samples(one, count)
        for one, tokens in zip(packed, held, strict=True)
    ]
    return [[[column[place] for place in one] for one in packs] for packs, column in zip(cut, columns, strict=True)]


def loads_of(laid: Laid, counts: Sequence[Sequence[Sequence[int]]], places: int) -> list[list[list[list[int]]]]:
    """`[replicas][packs][layers][places]` of counts `[samples][layers][places]`, one addition after the other."""
    layers = range(len(counts[0]))
    loads = [[[[0] * places for _ in layers] for _ in laid[0]] for _ in range(len(laid) // places)]
    for rank, packs in enumerate(laid):
        for p, one in enumerate(packs):
            for index in one:
                for layer in layers:
                    for place in range(places):
                        loads[rank // places][p][layer][place] += counts[index][layer][place]
    return loads


def expert_work(loads: list[list[list[list[int]]]]) -> int:
    work = 0
    for p in range(len(loads[0])):
        for layer in range(len(loads[0][0])):
            work += max(load for replica in loads for load in replica[p][layer])
    return work


def seven(
    laid: Laid, lengths: Sequence[int], counts: Sequence[Sequence[Sequence[int]]], places: int
) -> tuple[int, int, float, float, int, int, int]:
    """The guarded figures: packs, expert work, mean and largest skew, largest load, token and pair work."""
    loads = loads_of(laid, counts, places)
    skews, largest = [], 0
    for replica in loads:
        for dispatch in replica:
            total = sum(sum(layer) for layer in dispatch)
            skews.append(sum(max(layer) for layer in dispatch) / (total / places) if total else 1.0)
            largest = max([largest, *(load for layer in dispatch for load in layer)])
    packs = range(len(laid[0]))
    token = sum(max(sum(lengths[i] for i in rank[p]) for rank in laid) for p in packs)
    pair = sum(max(sum(lengths[i] ** 2 for i in rank[p]) for rank in laid) for p in packs)
    return len(laid[0]), expert_work(loads), sum(skews) / len(skews), max(skews), largest, token, pair


def no_worse(figures: Sequence[float], limit: Sequence[float]) -> bool:
    """In none of the guarded figures; the means of skews were added up in another order, so nearly equal is equal."""
    return all(
        one <= other + (1e-9 if isinstance(one, float) else 0) for one, other in zip(figures, limit, strict=True)
    )


def every_order(samples: int, ranks: int, places: int) -> Iterator[tuple[int, ...]]:
    """Every order but those that only rename replicas or the ranks inside them: the first row tells them apart."""
    for order in permutations(range(samples)):
        row = order[:ranks]
        inside = all(row[r] < row[r + 1] for r in range(ranks - 1) if r // places == (r + 1) // places)
        between = all(row[r] < row[r + places] for r in range(0, ranks - places, places))
        if inside and between:
            yield order


def drawn_lengths(draw: random.Random, samples: int, most: int) -> list[int]:
    kind = draw.randrange(4)
    if kind == 0:
        return [draw.randint(1, most) for _ in range(samples)]
    if kind == 1:
        return [min(most, max(1, int(draw.lognormvariate(0, 0.9) * most / 4))) for _ in range(samples)]
    if kind == 2:
        return [draw.choice([1, most // 2, most]) for _ in range(samples)]
    return [draw.randint(1, most)] * samples


def drawn_counts(draw: random.Random, lengths: Sequence[int], layers: int, places: int) -> list[list[list[int]]]:
    """`[samples][layers][places]`: as many choices as tokens, spread by a random taste of each sample."""
    table = []
    for length in lengths:
        taste = [draw.random() ** 3 + 0.02 for _ in range(places)]
        rows = []
        for _ in range(layers):
            row = [0] * places
            for _ in range(min(length, 40)):
                row[draw.choices(range(places), taste)[0]] += 1
            rows.append(row)
        table.append(rows)
    return table


def dispatch(counts: Sequence[Sequence[Sequence[int]]]) -> DispatchCounts:
    """The same counts as the value that `plan` takes."""
    layers = len(counts[0])
    flat = array("i", [number for rows in counts for row in rows for number in row])
    return DispatchCounts(tuple(range(layers)), layers, len(counts[0][0]), flat)


def named(lengths: Sequence[int]) -> list[Sample]:
    return [Sample(f"q{i}", length, group=i // 4) for i, length in enumerate(lengths)]

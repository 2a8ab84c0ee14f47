"""What the reference search moves through: the packs of every rank, the loads they make, what one swap changes.

Needs NumPy. Nothing here changes what it is given: a swap returns a new state that shares what it did not touch.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import attrs
import numpy as np
import numpy.typing as npt

from pack_core import arriving
from pack_core.packing import equalize as equalize_packs
from pack_core.types import Packing, Topology

Counts = npt.NDArray[np.int64]


@attrs.frozen(eq=False)
class Block:
    """The samples of one optimizer step and how they are packed; the same for every state.

    Attributes:
        lengths: tokens of each sample, `[samples]`.
        counts: dispatches of each sample, `[samples, layers, destinations]`, int64.
        topology: the ranks.
        capacity: most tokens a pack may hold.
        equalize: how ranks with fewer packs are split up to the largest count.
        max_documents: most samples a pack may hold, or None.
    """

    lengths: tuple[int, ...]
    counts: Counts
    topology: Topology
    capacity: int
    equalize: str
    max_documents: int | None


@attrs.frozen(eq=False)
class Column:
    """The samples of one rank, cut into packs.

    Attributes:
        planned: offsets of its own next-fit packs.
        offsets: offsets after equalizing, `[packs + 1]`.
        loads: dispatches its packs send, `[packs, layers, destinations]`.
        attention: tokens and squared sample lengths of its packs, `[packs, 2]`.
    """

    planned: tuple[int, ...]
    offsets: tuple[int, ...]
    loads: Counts
    attention: Counts


@attrs.frozen(eq=False)
class State:
    """One order of the block's samples and everything that follows from it.

    Attributes:
        order: the sample at each position, `[samples]`.
        columns: one `Column` per rank.
        loads: dispatches, `[replicas, packs, layers, destinations]`.
        attention: tokens and squared sample lengths, `[ranks, packs, 2]`.
    """

    order: tuple[int, ...]
    columns: tuple[Column, ...]
    loads: Counts
    attention: Counts

    @property
    def packs_per_rank(self) -> int:
        """Number of forwards of every rank."""
        return int(self.loads.shape[1])

    @property
    def work(self) -> tuple[int, int, int]:
        """Expert work, token work and pair work."""
        measured = self.metrics
        return (
            int(measured["critical_work_proxy"]),
            int(measured["attention_token_work"]),
            int(measured["attention_pair_work"]),
        )

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The eight measured values, under the reference's names."""
        largest = self.loads.max(axis=3)
        replicas, packs, layers, destinations = self.loads.shape
        tops = largest.sum(axis=2).ravel().tolist()
        totals = self.loads.reshape(replicas * packs, layers * destinations).sum(axis=1).tolist()
        # One division of whole numbers, and a sum that no order changes: equal dispatches stay equal to the last bit.
        skews = [top * destinations / total if total else 1.0 for top, total in zip(tops, totals, strict=True)]
        token_work, pair_work = self.attention.max(axis=0).sum(axis=0).tolist()
        return {
            "packs_per_rank": packs,
            "dispatches": replicas * packs,
            "skew_mean": math.fsum(skews) / len(skews),
            "skew_max": max(skews),
            "max_slot_assignments": int(largest.max()),
            "critical_work_proxy": int(largest.max(axis=0).sum()),
            "attention_token_work": token_work,
            "attention_pair_work": pair_work,
        }


def next_fit(lengths: Sequence[int], capacity: int, max_documents: int | None) -> tuple[int, ...]:
    """Return the offsets of the packs that `pack_core.pack` makes, for lengths that are known to fit.

    >>> next_fit([300, 200, 400, 600], 1024, None)
    (0, 3, 4)
    """
    return tuple(arriving.next_fit(lengths, capacity, max_documents or len(lengths)))


def build(block: Block, order: Iterable[int]) -> State:
    """Return the state of an order, from nothing.

    >>> counts = np.ones((4, 1, 2), dtype=np.int64)
    >>> block = Block((3, 5, 4, 2), counts, Topology(2, 2), 8, "samples", None)
    >>> build(block, range(4)).metrics["attention_token_work"]
    7
    """
    order = tuple(order)
    ranks = block.topology.ranks
    planned = [_planned(block, order[rank::ranks]) for rank in range(ranks)]
    count = max(map(len, planned)) - 1
    return _joined(block, order, [_column(block, order[rank::ranks], planned[rank], count) for rank in range(ranks)])


def swapped(block: Block, state: State, first: int, second: int) -> tuple[State, str]:
    """Return the state after two positions are swapped, and how it was found.

    Only the columns of the two positions are packed anew. `"fixed"`: they are cut at the same places, so only the
    dispatches of the two samples move. `"columns"`: these columns are counted anew. `"global_repack"`: the largest pack
    count of the ranks changed, so all of them were equalized again.
    """
    ranks = block.topology.ranks
    exchanged = list(state.order)
    exchanged[first], exchanged[second] = exchanged[second], exchanged[first]
    order = tuple(exchanged)
    touched = sorted({first % ranks, second % ranks})
    planned = [column.planned for column in state.columns]
    for rank in touched:
        planned[rank] = _planned(block, order[rank::ranks])
    count = max(map(len, planned)) - 1
    if count != state.packs_per_rank:
        columns = [_column(block, order[rank::ranks], planned[rank], count) for rank in range(ranks)]
        return _joined(block, order, columns), "global_repack"

    columns = list(state.columns)
    offsets = {rank: _equalized(block, order[rank::ranks], planned[rank], count) for rank in touched}
    fixed = all(offsets[rank] == columns[rank].offsets for rank in touched)
    if fixed:
        change = block.counts[order[first]] - block.counts[order[second]]
        for position, moved in ((first, change), (second, -change)):
            rank = position % ranks
            loads = columns[rank].loads.copy()
            loads[pack_of(columns[rank], position // ranks)] += moved
            columns[rank] = attrs.evolve(columns[rank], loads=loads)
    loads, attention = state.loads.copy(), state.attention.copy()
    for rank in touched:
        samples = order[rank::ranks]
        held = columns[rank].loads if fixed else _loads(block, samples, offsets[rank])
        columns[rank] = Column(planned[rank], offsets[rank], held, _attention(block, samples, offsets[rank]))
        loads[block.topology.replica(rank)] += held - state.columns[rank].loads
        attention[rank] = columns[rank].attention
    return State(order, tuple(columns), loads, attention), "fixed" if fixed else "columns"


def pack_of(column: Column, place: int) -> int:
    """Return the pack of a column that holds a place."""
    return next(pack for pack, stop in enumerate(column.offsets[1:]) if place < stop)


def exact(state: State, scale: Sequence[int]) -> float:
    """Return the objective, `X/X0 + A/A0 + Q/Q0`: the three works over those of arrival order.

    >>> block = Block((3, 5), np.ones((2, 1, 2), dtype=np.int64), Topology(2, 2), 8, "samples", None)
    >>> exact(build(block, range(2)), (1, 5, 25))
    4.0
    """
    expert, token, pair = (work / max(1, unit) for work, unit in zip(state.work, scale, strict=True))
    return expert + token + pair


def smooth(state: State, scale: Sequence[int]) -> float:
    """Return the surrogate that tells states of one objective apart: every maximum becomes `t * log sum exp(x / t)`.

    `x` are the loads, tokens and squared lengths over the works of arrival order; `t = 0.1 / packs_per_rank`.
    """
    temperature = 0.1 / state.packs_per_rank
    replicas, packs, layers, destinations = state.loads.shape
    rows = state.loads.transpose(1, 2, 0, 3).reshape(packs * layers, replicas * destinations).tolist()
    terms = [_log_sum_exp(row, max(1, scale[0]), temperature) for row in rows]
    for which in (0, 1):
        rows = state.attention[:, :, which].T.tolist()
        terms += [_log_sum_exp(row, max(1, scale[1 + which]), temperature) for row in rows]
    return math.fsum(terms)


def _log_sum_exp(values: Sequence[int], unit: int, temperature: float) -> float:
    # Plain exponentials and a sum without rounding: the same on every machine, whatever vector units NumPy finds.
    top = max(values)
    total = math.fsum(math.exp((value - top) / unit / temperature) for value in values)
    return top / unit + temperature * math.log(total)


def _planned(block: Block, samples: Sequence[int]) -> tuple[int, ...]:
    return next_fit([block.lengths[sample] for sample in samples], block.capacity, block.max_documents)


def _equalized(block: Block, samples: Sequence[int], planned: tuple[int, ...], count: int) -> tuple[int, ...]:
    if len(planned) - 1 == count and block.equalize != "balanced":
        return planned
    packing = Packing(array("q", range(len(samples))), array("q", planned))
    lengths = [block.lengths[sample] for sample in samples]
    cut = equalize_packs(packing, lengths, count=count, method=block.equalize, max_documents=block.max_documents)
    return tuple(cut.offsets)


def _column(block: Block, samples: Sequence[int], planned: tuple[int, ...], count: int) -> Column:
    offsets = _equalized(block, samples, planned, count)
    return Column(planned, offsets, _loads(block, samples, offsets), _attention(block, samples, offsets))


def _loads(block: Block, samples: Sequence[int], offsets: Sequence[int]) -> Counts:
    return np.add.reduceat(block.counts[list(samples)], offsets[:-1], axis=0)


def _attention(block: Block, samples: Sequence[int], offsets: Sequence[int]) -> Counts:
    tokens = [0, *accumulate(block.lengths[sample] for sample in samples)]
    pairs = [0, *accumulate(block.lengths[sample] ** 2 for sample in samples)]
    spans = pairwise(offsets)
    return np.array([(tokens[stop] - tokens[start], pairs[stop] - pairs[start]) for start, stop in spans], np.int64)


def _joined(block: Block, order: tuple[int, ...], columns: Sequence[Column]) -> State:
    shape = (block.topology.replicas, block.topology.expert_parallel, *columns[0].loads.shape)
    loads = np.stack([column.loads for column in columns]).reshape(shape).sum(axis=1)
    return State(order, tuple(columns), loads, np.stack([column.attention for column in columns]))

"""Ten thousand random plans and equalizations, without one violation."""

import random

import pytest
from pack_core import Sample, Topology, bounds, equalize, pack, plan, verify
from support.core_oracles import complaints, work_of

METHODS = ["tokens", "samples", "balanced"]


def drawn_lengths(draw: random.Random) -> list[int]:
    """Short, long-tailed, constant or two-sized lengths."""
    count = draw.randint(1, 48)
    return draw.choice(
        [
            [draw.randint(1, 64) for _ in range(count)],
            [min(64, int(draw.paretovariate(1.1)) + draw.randint(0, 3)) for _ in range(count)],
            [draw.randint(1, 64)] * count,
            [draw.choice([1, 63]) for _ in range(count)],
        ]
    )


def check_plan(draw: random.Random, lengths: list[int]) -> None:
    samples = [Sample(i, length) for i, length in enumerate(lengths)]
    degree = draw.choice([1, 1, 2, 3])
    topology = Topology(degree * draw.randint(1, 3), degree)
    size = topology.ranks * draw.randint(1, 5)
    capacity = draw.randint(max(lengths), 2 * max(lengths) + 64)
    cap = draw.choice([None, None, 1, 2, 5])
    made = plan(
        samples,
        topology=topology,
        capacity=capacity,
        step_samples=size,
        equalize=draw.choice(METHODS),
        max_documents=cap,
    )
    assert verify(made, samples) == []
    # The same, read a second time and from other invariants than `verify` reads.
    for number, step in enumerate(made.steps):
        for rank, packs in enumerate(step.packs):
            column = list(range(number * size + rank, (number + 1) * size, topology.ranks))
            local = [[column.index(i) for i in one] for one in packs]
            held = [lengths[i] for i in column]
            assert complaints(local, held, step.packs_per_rank, capacity, cap) == []
        low = bounds(lengths[number * size : (number + 1) * size], topology.ranks, capacity)
        token, pair = work_of(step.packs, lengths)
        assert low.packs_per_rank <= step.packs_per_rank
        assert low.attention_token_work <= token == made.work[number].attention_token_work
        assert low.attention_pair_work <= pair == made.work[number].attention_pair_work


def check_equalize(draw: random.Random, lengths: list[int]) -> None:
    capacity = draw.randint(max(lengths), 2 * max(lengths) + 64)
    cap = draw.choice([None, None, 1, 2, 5])
    packing = pack(lengths, capacity=capacity, max_documents=cap)
    count = draw.randint(len(packing), len(lengths))
    largest = {}
    for method in METHODS:
        packs = list(equalize(packing, lengths, count=count, method=method, max_documents=cap))
        assert complaints(packs, lengths, count, capacity, cap) == []
        largest[method] = max(sum(lengths[i] for i in one) for one in packs)
    assert largest["balanced"] <= min(largest.values())


@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_random_cases_have_no_violation(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(2500):
        lengths = drawn_lengths(draw)
        check_plan(draw, lengths)
        check_equalize(draw, lengths)

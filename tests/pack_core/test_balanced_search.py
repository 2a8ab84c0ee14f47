"""The search of balanced orders: what it counts, where it stops, and that it is the same everywhere."""

import inspect
import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import pytest
from pack_core import DispatchCounts, PackError, Plan, Sample, Search, Topology, encode, plan, rebuild, record
from pack_core.kernels.loads import kernel_of
from pack_core.search.guard import standing
from pack_core.search.layout import Layout, Rules, Swap
from pack_core.search.objective import Objective
from pack_core.search.priced import Limits, PricedSearch
from pack_core.search.randomness import Randomness, seed_of
from support.search_oracles import dispatch, drawn_counts, drawn_lengths, lay, loads_of, named, seven

pytest.importorskip("numpy")


class Block:
    """Random samples of one step or more, with counts or without."""

    def __init__(self, seed: int, rows: int = 6, steps: int = 1) -> None:
        draw = random.Random(seed)
        ranks, degree = draw.choice([(2, 1), (3, 1), (4, 2), (6, 2), (8, 4)])
        self.size = ranks * rows
        self.topology = Topology(ranks, degree)
        self.lengths = drawn_lengths(draw, self.size * steps, draw.choice([6, 40]))
        layers = draw.randint(1, 3)
        self.table = drawn_counts(draw, self.lengths, layers, degree) if degree > 1 else None
        self.counts = dispatch(self.table) if self.table else None
        self.capacity = max(self.lengths) + draw.randint(0, 60)
        self.equalize = draw.choice(["tokens", "samples", "balanced"])

    def plan(self, clock: Callable[[], float] | None = None, **search: Any) -> Plan:
        return plan(
            named(self.lengths),
            topology=self.topology,
            capacity=self.capacity,
            step_samples=self.size,
            equalize=self.equalize,
            pack_order="balanced",
            counts=self.counts,
            search=Search(**search),
            clock=clock,
        )


class Ticks:
    """A clock that moves on by one each time it is read."""

    def __init__(self) -> None:
        self.read = 0

    def __call__(self) -> float:
        self.read += 1
        return self.read - 1


def test_random_numbers_are_the_published_ones() -> None:
    # SplitMix64 from seed 1234567, as its authors' test vectors give them.
    numbers = Randomness(1234567)
    assert [numbers.word() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_a_seed_is_the_digest_of_the_ids_as_json() -> None:
    text = json.dumps(["q0/0", 7], separators=(",", ":")).encode()
    assert seed_of(["q0/0", 7]) == int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
    block = Block(1, steps=2)
    traces = block.plan(proposals=0).traces
    assert [one.seed for one in traces] == [
        seed_of([f"q{i}" for i in range(start, start + block.size)]) for start in (0, block.size)
    ]


# Where it stops.


def search_by_hand(lengths: Sequence[int], bounds: tuple[int, int, int], proposals: int = 9) -> PricedSearch:
    from array import array

    rules = Rules(1 if len(lengths) == 1 else 2, 10, "tokens", None)
    make = kernel_of(array("i"), len(lengths), 1, "python").loads
    layout = Layout(range(len(lengths)), lengths, rules)
    objective = Objective(0, layout.token_work, layout.pair_work)
    baseline = (layout.order(), standing(layout, make(layout)))
    limits = Limits(proposals, bounds, lambda attempts: False)
    search = PricedSearch(lengths, rules, make, objective, baseline, limits, 0, None)
    search.run(layout.order())
    return search


def test_a_single_sample_leaves_nothing_to_swap() -> None:
    assert search_by_hand([5], (0, 5, 25)).stop == "lower_bound"
    assert search_by_hand([5], (0, 0, 0)).stop == "no_candidates"


def test_equal_samples_are_at_their_bounds_from_the_start() -> None:
    found = search_by_hand([5] * 6, (0, 15, 75))
    assert (found.stop, found.attempts, found.best[0]) == ("lower_bound", 0, tuple(range(6)))


def test_a_search_without_success_stops_when_nothing_new_came_for_long() -> None:
    # All swaps of equal samples keep the objective, and bounds of 0 are never reached.
    found = search_by_hand([5] * 6, (0, 0, 0), proposals=10**6)
    assert found.stop == "stagnation"
    assert found.best[0] == tuple(range(6))


@pytest.mark.parametrize("proposals", [0, 1, 31, 32, 33, 100])
def test_the_budget_counts_fully_scored_swaps(proposals: int) -> None:
    for seed in range(6):
        made = Block(seed).plan(proposals=proposals)
        (trace,) = made.traces
        assert trace.proposals <= proposals
        assert (trace.stop == "proposal_budget") <= (trace.proposals == proposals)
        assert trace.proposals == sum(trace.paths.values())
        assert trace.attempts == trace.proposals + sum(trace.screened.values())


def test_every_stop_and_every_way_to_move_is_met() -> None:
    stops: Counter[str] = Counter()
    baselines: set[str] = set()
    tallies: dict[str, Counter[str]] = {name: Counter() for name in ("accepted", "paths", "screened", "rejections")}
    for seed in range(60):
        made = Block(seed).plan(clock=Ticks(), proposals=(500, 60)[seed % 2], seconds=(1e9, 3.0)[seed % 3 == 0])
        (trace,) = made.traces
        stops[trace.stop] += 1
        baselines.add(trace.baseline)
        for name, tally in tallies.items():
            tally.update(getattr(trace, name))
    assert set(stops) == {"lower_bound", "stagnation", "proposal_budget", "deadline"}
    assert baselines == {"arrival", "length", "length, level", "expert", "expert, level"}
    assert set(tallies["accepted"]) == {"targeted", "near", "random", "plateau", "uphill", "shaken"}
    assert set(tallies["paths"]) == {"fixed", "columns"}
    assert set(tallies["screened"]) == {"same_pack", "packs_per_rank", "seen", "no_partner"}
    assert {"critical_work_proxy", "skew_mean", "skew_max", "max_slot_assignments"} <= set(tallies["rejections"])


def test_a_search_from_arrival_order_may_save_packs() -> None:
    # Under the guard of the reference constructed orders are mostly refused, and then the search starts from arrival.
    saved = 0
    for seed in range(300):
        block = Block(seed, rows=3)
        (trace,) = (made := block.plan(proposals=400, guard="reference", kernels="python")).traces
        fewer = made.work[0].packs_per_rank < made.arrival[0].packs_per_rank
        if trace.baseline == "arrival" and trace.paths.get("global", 0) and fewer:
            assert block.plan(proposals=400, guard="reference", kernels="numpy").traces == made.traces
            saved += 1
        if saved == 2:
            return
    pytest.fail(f"{saved} searches from arrival order saved packs")


# The clock.


def cut_after(checks: int) -> Callable[[], float]:
    """A clock that stands still while a search begins and for so many checks, and then is at the end of time."""
    left = iter([0.0] * (1 + checks))
    return lambda: next(left, math.inf)


@pytest.mark.parametrize("seed", [0, 4, 11, 12])
def test_a_search_cut_anywhere_is_rebuilt_exactly(seed: int) -> None:
    block = Block(seed)
    full = block.plan(proposals=150)
    attempts = [-1]
    for checks in range(10**6):
        made = block.plan(clock=cut_after(checks), proposals=150, seconds=1.0)
        (trace,) = made.traces
        if trace.stop != "deadline":
            break
        assert trace.attempts >= attempts[-1]
        attempts.append(trace.attempts)
        line = json.loads(json.dumps(record(made, named(block.lengths), block.counts)))
        assert rebuild(line, named(block.lengths), block.counts) == made
        if block.counts:
            assert rebuild(line, named(block.lengths)) == made
    assert made.traces == full.traces
    assert attempts[:2] == [-1, 0]
    assert len(set(attempts)) > 4


def test_the_allowance_is_shared_by_the_steps() -> None:
    block, size = Block(5, steps=3), Block(5, steps=3).size
    clock = Ticks()
    made = block.plan(clock=clock, proposals=10**6, seconds=12.0)
    # Each of three steps may use 4 ticks: its start is one, and the fourth check after it is at the end.
    assert clock.read == 3 * 5
    assert [trace.stop for trace in made.traces] == ["deadline"] * 3
    alone = [
        plan(
            named(block.lengths)[start : start + size],
            topology=block.topology,
            capacity=block.capacity,
            step_samples=size,
            equalize=block.equalize,
            pack_order="balanced",
            counts=block.counts.take(range(start, start + size)) if block.counts else None,
            search=Search(proposals=10**6, seconds=4.0),
            clock=Ticks(),
        )
        for start in range(0, 3 * size, size)
    ]
    assert [one.traces[0] for one in alone] == list(made.traces)


def test_no_time_keeps_the_best_constructed_order() -> None:
    block = Block(5)
    timed, greedy = block.plan(clock=Ticks(), seconds=0.0), block.plan(proposals=0)
    assert (timed.traces[0].stop, timed.traces[0].attempts) == ("deadline", 0)
    assert timed.order == greedy.order
    assert timed.traces[0].order == greedy.traces[0].order


def test_without_an_allowance_the_clock_is_not_read() -> None:
    clock = Ticks()
    assert Block(5).plan(clock=clock, seconds=None) == Block(5).plan(seconds=None)
    assert clock.read == 0


# The same everywhere.


@pytest.mark.parametrize("seeds", [range(100), range(100, 200), range(200, 300)], ids=str)
def test_both_kernels_give_the_same_plan(seeds: Sequence[int]) -> None:
    moved = 0
    for seed in seeds:
        block = Block(seed, rows=3 + seed % 4)
        made = [block.plan(kernels=kernels, proposals=90) for kernels in ("python", "numpy")]
        assert made[0].order == made[1].order
        assert made[0].traces == made[1].traces
        assert made[0].work == made[1].work
        moved += sum(made[0].traces[0].accepted.values()) > 0
    assert moved > 50


def wide_plan() -> Plan:
    """Two steps with counts, of plain arithmetic and no random numbers."""
    from array import array

    lengths = [1 + i * i * 37 % 101 for i in range(70)]
    flat = [(i + 3) * (at + 1) * 7919 % 53 for i in range(70) for at in range(6)]
    return plan(
        [Sample(f"q{i}", length) for i, length in enumerate(lengths)],
        topology=Topology(4, 2),
        capacity=160,
        step_samples=32,
        pack_order="balanced",
        counts=DispatchCounts((0, 1, 2), 3, 2, array("i", flat)),
        search=Search(proposals=300),
    )


def test_other_processes_and_hash_seeds_and_no_numpy_give_the_same_bytes() -> None:
    program = (
        "import sys\n"
        "if sys.argv[1] == 'without': sys.modules['numpy'] = None\n"
        "from pack_core import DispatchCounts, Plan, Sample, Search, Topology, encode, plan\n"
        f"{inspect.getsource(wide_plan)}\n"
        "print(encode(wide_plan()).hex())\n"
        "print('pack_core.kernels.loads_numpy' in sys.modules)\n"
    )

    def said(how: str, seed: str) -> list[str]:
        return subprocess.run(
            [sys.executable, "-c", program, how],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()

    made = wide_plan()
    assert made.traces[0].accepted
    assert said("with", "1") == [encode(made).hex(), "True"]
    assert said("with", "4242") == [encode(made).hex(), "True"]
    assert said("without", "7") == [encode(made).hex(), "False"]


# The state after every accepted swap.


def test_after_every_accepted_swap_all_totals_are_those_of_a_new_count(monkeypatch: pytest.MonkeyPatch) -> None:
    block, taken = Block(0), Counter[str]()
    apply, take = PricedSearch._apply, PricedSearch._take

    def check(search: PricedSearch) -> None:
        order, rules = search._layout.order(), search._rules
        laid = lay(order, block.lengths, rules.ranks, rules.capacity, rules.equalize)
        table = block.table or [[[0]]] * len(block.lengths)
        degree = block.topology.expert_parallel if block.table else 1
        figures = seven(laid, block.lengths, table, degree)
        assert (search._layout.packs, search._expert_work) == figures[:2]
        assert (search._layout.token_work, search._layout.pair_work) == figures[5:]
        found = standing(search._layout, search._loads)
        assert found[:2] + found[4:] == figures[:2] + figures[4:]
        assert found[2:4] == pytest.approx(figures[2:4], rel=1e-12)
        if block.table:
            slow = loads_of(laid, block.table, degree)
            for p in range(len(laid[0])):
                rows = [[n for replica in slow for n in replica[p][layer]] for layer in range(len(slow[0][0]))]
                assert search._loads.loads_of(p) == rows
        assert search._value == objective_of(search)
        taken["applied"] += 1

    def objective_of(search: PricedSearch) -> int:
        layout, of = search._layout, search._objective
        x, a, q = (max(one, 1) for one in (of.expert, of.token, of.pair))
        return search._expert_work * a * q + layout.token_work * x * q + layout.pair_work * x * a

    def checked_apply(search: PricedSearch, swap: Swap, expert_work: int) -> None:
        apply(search, swap, expert_work)
        check(search)

    def checked_take(search: PricedSearch, swaps: Any, works: Any, ranked: Any) -> None:
        before, applied = search._value, taken["applied"]
        take(search, swaps, works, ranked)
        check(search)
        taken["applied"] -= 1
        assert search._value < before
        taken["several"] += taken["applied"] - applied > 1
        taken["many"] = max(taken["many"], taken["applied"] - applied)

    monkeypatch.setattr(PricedSearch, "_apply", checked_apply)
    monkeypatch.setattr(PricedSearch, "_take", checked_take)
    for seed in range(40):
        block = Block(seed, rows=8)
        block.plan(proposals=200)
    for seed in (9, 27, 34, 38, 44):
        block = Block(seed, rows=4)
        block.plan(proposals=600, guard="reference")
    assert taken["applied"] > 300
    assert taken["several"] > 10
    assert taken["many"] > 2


def test_no_swap_is_scored_twice_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: set[frozenset[int]] = set()
    again: Counter[str] = Counter()
    weighed_batch, apply, enter = PricedSearch._weighed, PricedSearch._apply, PricedSearch._enter

    def checked(search: PricedSearch, pairs: Any) -> Any:
        found = weighed_batch(search, pairs)
        for swap, _ in found:
            pair = frozenset((swap.first, swap.second))
            assert pair not in scored
            scored.add(pair)
        again["both ways"] += len({(a, b) for a, b, _ in pairs} & {(b, a) for a, b, _ in pairs}) > 0
        return found

    def forgetting(method: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            scored.clear()
            method(*arguments)

        return call

    monkeypatch.setattr(PricedSearch, "_weighed", checked)
    monkeypatch.setattr(PricedSearch, "_apply", forgetting(apply))
    monkeypatch.setattr(PricedSearch, "_enter", forgetting(enter))
    for seed in range(8):
        Block(seed).plan(proposals=200)
    assert again["both ways"] > 10


# The surrogate on a plateau.


def surrogate(laid: list[list[list[int]]], lengths: Sequence[int], counts: Any, places: int, of: Objective) -> float:
    """Every maximum of the works as `t log sum exp(x / t)`, over all packs."""
    packs = len(laid[0])
    t = 0.1 / packs

    def smooth(values: Sequence[int], whole: int) -> float:
        return t * math.log(sum(math.exp(value / max(whole, 1) / t) for value in values))

    total = 0.0
    loads = loads_of(laid, counts, places)
    for p in range(packs):
        for layer in range(len(counts[0])):
            total += smooth([load for replica in loads for load in replica[p][layer]], of.expert)
        total += smooth([sum(lengths[i] for i in rank[p]) for rank in laid], of.token)
        total += smooth([sum(lengths[i] ** 2 for i in rank[p]) for rank in laid], of.pair)
    return total


def test_the_surrogate_of_a_swap_worked_by_the_reference() -> None:
    # Its published example: 3.290554 before and 3.279822 after samples 1 and 3 change places.
    counts = [[[10, 2]], [[0, 6]], [[5, 0]], [[0, 1]]]
    of, lengths = Objective(10, 4, 16), [4] * 4
    before, after = ([[[i]] for i in order] for order in ((0, 1, 2, 3), (0, 3, 2, 1)))
    assert surrogate(before, lengths, counts, 2, of) == pytest.approx(3.290554, abs=5e-7)
    assert surrogate(after, lengths, counts, 2, of) == pytest.approx(3.279822, abs=5e-7)
    assert falls(lengths, counts, 2, of, range(4), (1, 3)) is True
    assert falls(lengths, counts, 2, of, (0, 3, 2, 1), (1, 3)) is False


def falls(
    lengths: Sequence[int], counts: Any, places: int, of: Objective, order: Sequence[int], pair: tuple[int, int]
) -> bool:
    layout = Layout(order, lengths, Rules(len(lengths) if len(lengths) < 5 else 4, 60, "tokens", None))
    return of.falls(layout, loads_for(counts, places, layout), weighed(layout, pair))


def weighed(layout: Layout, pair: tuple[int, int]) -> Swap:
    swap = layout.weigh(*pair)
    assert isinstance(swap, Swap)
    return swap


def loads_for(counts: Any, places: int, layout: Layout) -> Any:
    flat = dispatch(counts).counts
    return kernel_of(flat, len(counts), places, "python").loads(layout)


def test_a_swap_lowers_the_surrogate_where_the_slow_one_falls() -> None:
    draw, answers = random.Random(3), Counter[bool]()
    while answers.total() < 150:
        lengths = drawn_lengths(draw, 16, 30)
        counts = drawn_counts(draw, lengths, 2, 2)
        order = draw.sample(range(16), 16)
        layout = Layout(order, lengths, Rules(4, 60, "tokens", None))
        swap = layout.weigh(*draw.sample(range(16), 2))
        if isinstance(swap, str) or swap.layout is not None:
            continue
        first = seven(lay(range(16), lengths, 4, 60, "tokens"), lengths, counts, 2)
        of = Objective(first[1], first[5], first[6])
        exchanged = {swap.first: swap.second, swap.second: swap.first}
        before, after = (
            surrogate(lay(one, lengths, 4, 60, "tokens"), lengths, counts, 2, of)
            for one in (order, [exchanged.get(i, i) for i in order])
        )
        if abs(after - before) > 1e-9:
            found = of.falls(layout, loads_for(counts, 2, layout), swap)
            assert found == (after < before)
            answers[found] += 1
    assert min(answers.values()) > 30


# A limit on the largest load.


def test_a_limit_on_the_largest_load_is_kept_and_its_refusals_counted() -> None:
    refused = kept = 0
    for seed in range(40):
        block = Block(seed, rows=5)
        if block.counts is None:
            continue
        free = block.plan(proposals=150)
        arrival, largest = (one[0].max_slot_assignments or 0 for one in (free.arrival, free.work))
        if arrival < largest:
            limited = block.plan(proposals=150, max_slot_assignments=arrival)
            assert (limited.work[0].max_slot_assignments or 0) <= arrival
            kept += 1
            refused += limited.traces[0].rejections.get("slot_limit", 0)
    assert kept >= 3
    assert refused > 0


def test_where_every_order_is_over_the_limit_that_of_arrival_is_kept() -> None:
    block = Block(0)
    assert block.counts is not None
    made = block.plan(max_slot_assignments=1)
    assert made.order == tuple(range(block.size))
    assert made.traces[0].baseline == "arrival"


# Options.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"proposals": -1}, "proposals is -1; it must be at least 0"),
        ({"proposals": 1.5}, "proposals is 1.5"),
        ({"proposals": True}, "proposals is True"),
        ({"seconds": -0.1}, "seconds is -0.1; it must be a finite number of at least 0, or None"),
        ({"seconds": math.inf}, "seconds is inf"),
        ({"seconds": math.nan}, "seconds is nan"),
        ({"seconds": "1"}, "seconds is '1'"),
        ({"seconds": True}, "seconds is True"),
        ({"method": "annealing"}, "search method is 'annealing'; it must be one of 'priced', 'reference'"),
        ({"guard": "none"}, "search guard is 'none'; it must be one of 'baseline', 'reference'"),
        ({"kernels": "numba"}, "search kernels is 'numba'; it must be one of 'python', 'numpy', None"),
        ({"max_slot_assignments": 0}, "max_slot_assignments is 0"),
    ],
)
def test_what_is_no_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PackError) as caught:
        Search(**options)
    assert message in str(caught.value)

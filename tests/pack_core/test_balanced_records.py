"""Balanced plans as bytes and log records, made again, and judged; and the reference's search through `plan`."""

import json
import sys
from array import array
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from pack_core import (
    Bounds,
    DispatchCounts,
    PackError,
    Plan,
    RecordError,
    Sample,
    Search,
    Topology,
    Work,
    decode,
    digest,
    encode,
    fold,
    owners,
    plan,
    rebuild,
    record,
    verify,
)

pytest.importorskip("numpy")

LENGTHS = [1 + i * i * 37 % 101 for i in range(38)]
SAMPLES = [Sample(f"q{i}", length, group=i // 4) for i, length in enumerate(LENGTHS)]

#: Of four experts in two layers of three, owned by two destinations.
PER_EXPERT = DispatchCounts(
    (0, 2), 3, 4, array("i", [(i + 3) * (at + 1) * 7919 % 53 for i in range(38) for at in range(8)])
)


def made(counts: DispatchCounts | None = PER_EXPERT, clock: Callable[[], float] | None = None, **search: Any) -> Plan:
    return plan(
        SAMPLES,
        topology=Topology(4, 2),
        capacity=160,
        step_samples=16,
        pack_order="balanced",
        counts=counts,
        search=Search(**{"proposals": 200} | search),
        clock=clock,
    )


def line_of(one: Plan, counts: DispatchCounts | None = PER_EXPERT) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(record(one, SAMPLES, counts), allow_nan=False))
    return read


def test_a_record_tells_the_search_and_both_works() -> None:
    one = made()
    line = line_of(one)
    assert (line["pack_order"], line["layers"], line["routed_layers"]) == ("balanced", [0, 2], 3)
    assert line["search"]["proposals"] == 200
    assert [sorted(trace["order"]) for trace in line["traces"]] == [list(range(16))] * 2
    assert line["traces"][0]["attempts"] == one.traces[0].attempts > 0
    assert line["arrival"][0]["critical_work_proxy"] > line["work"][0]["critical_work_proxy"]
    assert line["bounds"][0]["placed_critical_work"] > 0


@pytest.mark.parametrize(
    "counts", [PER_EXPERT, fold(PER_EXPERT, owners(4, 2)), None], ids=["experts", "folded", "none"]
)
@pytest.mark.parametrize("kernels", ["python", "numpy"])
def test_bytes_and_records_give_the_identical_plan(counts: DispatchCounts | None, kernels: str) -> None:
    one = made(counts, kernels=kernels)
    assert any(trace.accepted for trace in one.traces)
    assert decode(encode(one)) == one
    assert verify(one, SAMPLES, counts) == []
    assert rebuild(line_of(one, counts), SAMPLES, counts) == one
    # Without the counts the recorded order is laid out again.
    assert rebuild(line_of(one, counts), SAMPLES) == one


def test_arrival_order_with_counts_is_recorded_too() -> None:
    one = plan(SAMPLES, topology=Topology(4, 2), capacity=160, step_samples=16, counts=PER_EXPERT)
    assert one.order == tuple(range(38))
    assert one.search is None
    assert one.work == one.arrival == made().arrival
    assert verify(one, SAMPLES, PER_EXPERT) == []
    assert rebuild(line_of(one), SAMPLES, PER_EXPERT) == rebuild(line_of(one), SAMPLES) == one


def other(at: int) -> DispatchCounts:
    """The same counts but for one sample, which brings more."""
    changed = array("i", PER_EXPERT.counts)
    for place in range(8):
        changed[at * 8 + place] += 50
    return attrs.evolve(PER_EXPERT, counts=changed)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (other(0), "its counts are others|other work, bounds|another search"),
        (attrs.evolve(PER_EXPERT, layers=(0, 1)), r"the counts are of layers \[0, 1\] of 3 but the record of \[0, 2\]"),
        (attrs.evolve(PER_EXPERT, routed_layers=4), r"of layers \[0, 2\] of 4 but the record of \[0, 2\] of 3"),
        (PER_EXPERT.take(range(37)), "there are 38 samples but counts of 37"),
    ],
)
def test_other_counts_do_not_rebuild_the_plan(counts: DispatchCounts, message: str) -> None:
    with pytest.raises(PackError, match=message):
        rebuild(line_of(made()), SAMPLES, counts)


def test_counts_of_the_tail_do_not_matter() -> None:
    assert rebuild(line_of(made()), SAMPLES, other(37)) == made()


CHANGES: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("another search", lambda line: line["traces"][0].update(attempts=line["traces"][0]["attempts"] + 1)),
    ("another search", lambda line: line["traces"][1].update(stop="lower_bound")),
    ("another search", lambda line: line["traces"][0].update(seed=line["traces"][0]["seed"] ^ 1)),
    ("another search", lambda line: line["traces"][1]["accepted"].update(near=999)),
    ("has digest", lambda line: line["search"].update(proposals=0)),
    ("has digest", lambda line: line["traces"][0].update(stop="deadline", attempts=0)),
    ("not hold one order of a step", lambda line: line["traces"].pop()),
    ("not hold one order of a step", lambda line: line["traces"][0]["order"].__setitem__(0, 16)),
    ("not hold one order of a step", lambda line: line["traces"][0]["order"].pop()),
    ("no whole search", lambda line: line.update(pack_order="arrival")),
    ("no whole search", lambda line: line.update(search=None)),
    ("search method is 'best'", lambda line: line["search"].update(method="best")),
    ("other work", lambda line: line["work"][0].update(critical_work_proxy=1)),
    ("other work", lambda line: line["arrival"][1].update(skew_max=9.5)),
    ("other work", lambda line: line["bounds"][1].update(even_critical_work=1)),
    ("the counts are of layers", lambda line: line.update(layers=[0, 1])),
]


@pytest.mark.parametrize(("message", "change"), CHANGES, ids=[str(n) for n in range(len(CHANGES))])
def test_a_changed_record_does_not_pass(message: str, change: Callable[[dict[str, Any]], object]) -> None:
    line = line_of(made())
    change(line)
    with pytest.raises(RecordError, match=message):
        rebuild(line, SAMPLES, PER_EXPERT)


def test_a_changed_order_does_not_pass_even_where_it_is_only_laid_out_again() -> None:
    line = line_of(made())
    order = line["traces"][0]["order"]
    order[0], order[1] = order[1], order[0]
    with pytest.raises(RecordError, match="has digest"):
        rebuild(line, SAMPLES)


def test_a_capacity_that_no_longer_holds_the_samples_is_an_error_of_the_record() -> None:
    line = line_of(made())
    line["capacity"] = 50
    with pytest.raises(RecordError, match=r"cannot be made again: sample .* has 88 tokens but capacity"):
        rebuild(line, SAMPLES, PER_EXPERT)


# What verification finds.


def claims(one: Plan, where: str, **wrong: Any) -> Plan:
    """The plan with other figures claimed for step 1."""
    first, second = getattr(one, where)
    return attrs.evolve(one, **{where: (first, attrs.evolve(second, **wrong))})


EXPERT_WORK = [field.name for field in attrs.fields(Work) if field.default is not attrs.NOTHING]
EXPERT_BOUNDS = [field.name for field in attrs.fields(Bounds) if field.default is not attrs.NOTHING]


@pytest.mark.parametrize("field", EXPERT_WORK)
def test_wrong_expert_figures_are_found(field: str) -> None:
    one = made()
    true = getattr(one.work[1], field)
    wrong = claims(one, "work", **{field: true - 1})
    assert verify(wrong, SAMPLES, PER_EXPERT) == [f"step 1 claims {field} {true - 1} but its packs give {true}"]
    missing = claims(one, "work", **{field: None})
    assert verify(missing, SAMPLES, PER_EXPERT) == [f"step 1 claims {field} None but its packs give {true}"]


@pytest.mark.parametrize("field", EXPERT_BOUNDS)
def test_wrong_expert_bounds_are_found(field: str) -> None:
    one = made()
    true = getattr(one.bounds[1], field)
    (found,) = verify(claims(one, "bounds", **{field: true + 1}), SAMPLES, PER_EXPERT)
    assert found.endswith(f"{field} {true + 1} but its packs give {true}")


@pytest.mark.parametrize("field", [one.name for one in attrs.fields(Work)])
def test_wrong_figures_of_arrival_order_are_found(field: str) -> None:
    one = made()
    true = getattr(one.arrival[1], field)
    wrong = claims(one, "arrival", **{field: true + 1})
    (found,) = verify(wrong, SAMPLES, PER_EXPERT)
    assert found == f"step 1 claims {field} {true + 1} in arrival order but its packs give {true}"


def test_a_plan_that_made_something_worse_is_found() -> None:
    one = made()
    swapped = attrs.evolve(one, work=one.arrival, arrival=one.work)
    found = verify(swapped, SAMPLES, PER_EXPERT)
    assert any(sentence.startswith("step 0 has critical_work_proxy") for sentence in found)


def test_an_order_that_leaves_its_step_is_found() -> None:
    one = made()
    order = list(one.order)
    order[3], order[20] = order[20], order[3]
    wrong = attrs.evolve(one, order=tuple(order), digest=digest(order, one.steps))
    found = verify(wrong, SAMPLES, PER_EXPERT)
    assert f"the order has sample 'q{order[3]}' (index {order[3]}) at position 3, in step 0, not its own" in found
    assert f"the order has sample 'q{order[20]}' (index {order[20]}) at position 20, in step 1, not its own" in found


def test_a_tail_that_moved_is_found() -> None:
    one = made()
    order = (*one.order[:-2], one.order[-1], one.order[-2])
    wrong = attrs.evolve(one, order=order, digest=digest(order, one.steps))
    assert any("is not arrival order: position 36" in sentence for sentence in verify(wrong, SAMPLES, PER_EXPERT))


def test_two_samples_that_trade_places_inside_a_step_are_found() -> None:
    one = made()
    order = (one.order[1], one.order[0], *one.order[2:])
    wrong = attrs.evolve(one, order=order, digest=digest(order, one.steps))
    assert any("belongs on rank" in sentence for sentence in verify(wrong, SAMPLES, PER_EXPERT))


# The reference's search.


def reference(counts: list[list[int]], clock: Callable[[], float] | None = None, **search: Any) -> Plan:
    """Sixteen samples of 6 tokens on 4 ranks, 2 destinations, in packs of 12; one layer."""
    flat = array("i", [number for row in counts for number in row])
    return plan(
        [Sample(i, 6) for i in range(16)],
        topology=Topology(4, 2),
        capacity=12,
        step_samples=16,
        equalize="samples",
        pack_order="balanced",
        counts=DispatchCounts((0,), 1, 2, flat),
        search=Search(**{"method": "reference"} | search),
        clock=clock,
    )


DEALT = (0, 1, 2, 3, 6, 7, 4, 5, 8, 9, 10, 11, 14, 15, 12, 13)


def kinds(first: list[int], second: list[int]) -> list[list[int]]:
    return [first if i % 4 < 2 else second for i in range(16)]


@pytest.mark.parametrize("proposals", [0, 1024])
def test_two_kinds_of_samples_give_the_published_figures(proposals: int) -> None:
    one = reference(kinds([12, 0], [2, 10]), proposals=proposals)
    before, after = one.arrival[0], one.work[0]
    assert one.order == DEALT
    assert (before.skew_mean, after.skew_mean) == (pytest.approx(1.8333, abs=5e-5), pytest.approx(1.16667, abs=5e-6))
    assert (before.critical_work_proxy, after.critical_work_proxy) == (96, 56)
    assert (before.max_slot_assignments, after.max_slot_assignments) == (48, 28)
    for work in (before, after):
        assert (work.attention_token_work, work.attention_pair_work) == (24, 144)
    assert one.traces[0].stop == ("lower_bound" if proposals else "proposal_budget")
    assert (one.traces[0].method, one.traces[0].baseline) == ("reference", "reference")


def test_without_time_the_reference_keeps_its_greedy_order() -> None:
    one = reference(kinds([11, 1], [1, 11]), clock=lambda: 0.0, seconds=0)
    assert one.order == DEALT
    assert (one.work[0].critical_work_proxy, one.work[0].skew_mean) == (48, 1.0)
    assert (one.traces[0].stop, one.traces[0].proposals, one.traces[0].attempts) == ("deadline", 0, 0)


def test_identical_samples_stay_where_they_are() -> None:
    assert reference([[16, 2]] * 16).order == tuple(range(16))


@pytest.mark.parametrize("checks", [0, 1, 17, 40])
def test_a_reference_search_cut_by_the_clock_is_rebuilt(checks: int) -> None:
    left = iter([0.0] * (1 + checks))
    one = plan(
        SAMPLES,
        topology=Topology(4, 2),
        capacity=160,
        step_samples=32,
        pack_order="balanced",
        counts=PER_EXPERT,
        search=Search(method="reference", seconds=1.0),
        clock=lambda: next(left, 9.0),
    )
    (trace,) = one.traces
    assert (trace.stop, trace.attempts) == ("deadline", checks)
    assert trace.attempts == trace.proposals + trace.screened["seen"]
    assert trace.proposals == sum(trace.paths.values())
    assert verify(one, SAMPLES, PER_EXPERT) == []
    assert rebuild(line_of(one), SAMPLES, PER_EXPERT) == one
    assert rebuild(line_of(one), SAMPLES) == one


def test_the_reference_needs_counts_and_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PackError, match="search method 'reference' needs counts"):
        made(None, method="reference")
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(PackError, match="NumPy is not installed; install it"):
        reference(kinds([12, 0], [2, 10]))

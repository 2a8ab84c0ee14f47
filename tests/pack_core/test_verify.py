"""Verification: every way to break a good plan is found and said in words."""

from collections.abc import Callable

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pack_core import Bounds, Plan, Sample, Schedule, Topology, Work, digest, plan, verify

LENGTHS = [17, 87, 19, 13, 23, 89, 29, 11, *[60] * 8, 5, 6]
SAMPLES = [Sample(f"q{i}", length) for i, length in enumerate(LENGTHS)]

Packs = tuple[tuple[tuple[int, ...], ...], ...]


def good(max_documents: int | None = None) -> Plan:
    # Step 0 is ((0 2)(4 6)) ((1 3)(5 7)), step 1 ((8 10)(12 14)) ((9 11)(13 15)), the tail 16 17.
    return plan(SAMPLES, topology=Topology(2), capacity=128, step_samples=8, max_documents=max_documents)


def with_step(number: int, packs: Packs) -> Plan:
    """The good plan with other packs in one step, and a digest that fits them."""
    made = good()
    steps = tuple(Schedule(packs) if n == number else step for n, step in enumerate(made.steps))
    return attrs.evolve(made, steps=steps, digest=digest(made.order, steps))


def with_order(*order: int) -> Plan:
    made = good()
    return attrs.evolve(made, order=order, digest=digest(order, made.steps))


def test_a_good_plan_has_no_violation() -> None:
    assert verify(good(), SAMPLES) == []
    assert verify(good(max_documents=1), SAMPLES) == []


#: Other packs for step 0 or 1, and what is said about them.
BROKEN_STEPS: list[tuple[int, Packs, str]] = [
    (0, (((0, 2), (4,)), ((1, 3), (5, 7))), "sample 'q6' (index 6) is in no pack of step 0"),
    (0, (((0, 2), (4, 6, 6)), ((1, 3), (5, 7))), "sample 'q6' (index 6) is 2 times in step 0"),
    (0, (((0, 2), (4, 6)), ((1, 3), (5, 7, 6))), "sample 'q6' (index 6) is 2 times in step 0"),
    (0, (((0, 2), (4, 8)), ((1, 3), (5, 7))), "sample 'q8' (index 8) is in step 0 but belongs to step 1"),
    (1, (((8, 10), (12, 0)), ((9, 11), (13, 15))), "sample 'q0' (index 0) is in step 1 but belongs to step 0"),
    (1, (((8, 10), (12, 14)), ((9, 11), (13, 16))), "sample 'q16' (index 16) is in step 1 but belongs to the tail"),
    (0, (((0, 2), (4, 99)), ((1, 3), (5, 7))), "unknown index 99 is in step 0 but belongs to no step"),
    (0, (((0, 2), (4, -1)), ((1, 3), (5, 7))), "unknown index -1 is in step 0 but belongs to no step"),
    (1, (((8, 10, 12), (14,)), ((9, 11), (13, 15))), "step 1, rank 0, pack 0 has 180 tokens, over the capacity of 128"),
    (0, (((0, 2, 4, 6),), ((1, 3), (5, 7))), "step 0 has unequal pack counts [1, 2]; every rank must forward the same"),
    (0, (((0, 2, 4, 6), ()), ((1, 3), (5, 7))), "step 0, rank 0, pack 1 is empty"),
    (0, ((), ((1, 3), (5, 7))), "step 0, rank 0 has no pack"),
    (0, ((), ()), "step 0, rank 1 has no pack"),
    (
        0,
        (((1, 3), (5, 7)), ((0, 2), (4, 6))),
        "sample 'q1' (index 1) is position 1 of step 0 and belongs on rank 1, not",
    ),
    (
        0,
        (((0, 2), (4, 7)), ((1, 3), (5, 6))),
        "sample 'q7' (index 7) is position 7 of step 0 and belongs on rank 1, not",
    ),
    (0, (((4, 6), (0, 2)), ((1, 3), (5, 7))), "sample 'q0' (index 0) is out of order on rank 0 of step 0"),
    (0, (((2, 0), (4, 6)), ((1, 3), (5, 7))), "sample 'q0' (index 0) is out of order on rank 0 of step 0"),
    (0, (((0, 2), (4, 6)),), "step 0 has 1 ranks; the topology has 2"),
    (0, (((0, 2), (4, 6)), ((1, 3), (5, 7)), ((), ())), "step 0 has 3 ranks; the topology has 2"),
    (0, (), "step 0 has 0 ranks; the topology has 2"),
]


@pytest.mark.parametrize(("number", "packs", "sentence"), BROKEN_STEPS, ids=[row[2] for row in BROKEN_STEPS])
def test_broken_packs_are_found(number: int, packs: Packs, sentence: str) -> None:
    found = verify(with_step(number, packs), SAMPLES)
    assert any(one.startswith(sentence) for one in found), found


def test_samples_swapped_across_steps_are_both_found() -> None:
    made = good()
    (a, b), (c, d) = made.steps[0].packs, made.steps[1].packs
    steps = (Schedule(((a[0], (4, 14)), b)), Schedule(((c[0], (12, 6)), d)))
    found = verify(attrs.evolve(made, steps=steps, digest=digest(made.order, steps)), SAMPLES)
    assert "sample 'q14' (index 14) is in step 0 but belongs to step 1" in found
    assert "sample 'q6' (index 6) is in step 1 but belongs to step 0" in found


#: A change of one field of the good plan, and what is said about it.
BROKEN_FIELDS: list[tuple[Callable[[Plan], Plan], str]] = [
    (lambda p: with_order(*p.order[:-1]), "sample 'q17' (index 17) is not in the order"),
    (lambda p: with_order(*p.order[:-1]), "the plan orders 17 samples but 18 were given"),
    (lambda p: with_order(*p.order[:-1], 3), "sample 'q3' (index 3) is 2 times in the order"),
    (lambda p: with_order(*p.order[:-1], 40), "the order holds unknown index 40; there are 18 samples"),
    (
        lambda p: with_order(1, 0, *p.order[2:]),
        "the order is not arrival order: position 0 holds sample 'q1' (index 1), where sample 'q0' (index 0) arrived",
    ),
    (
        lambda p: attrs.evolve(p, tail=()),
        "the tail is [] but the incomplete trailing block of 18 samples in steps of 8",
    ),
    (lambda p: attrs.evolve(p, tail=(17, 16)), "the tail is [17, 16] but the incomplete trailing block"),
    (lambda p: attrs.evolve(p, steps=p.steps[:1]), "the plan has 1 steps but 18 samples make 2 blocks of 8"),
    (lambda p: attrs.evolve(p, steps=p.steps * 2), "the plan has 4 steps but 18 samples make 2 blocks of 8"),
    (lambda p: attrs.evolve(p, step_samples=9), "step_samples is 9, not a positive multiple of 2 ranks"),
    (lambda p: attrs.evolve(p, step_samples=0), "step_samples is 0, not a positive multiple of 2 ranks"),
    (lambda p: attrs.evolve(p, capacity=80), "sample 'q1' (index 1) has 87 tokens, over the capacity of 80"),
    (lambda p: attrs.evolve(p, capacity=99), "step 0, rank 1, pack 0 has 100 tokens, over the capacity of 99"),
    (lambda p: attrs.evolve(p, max_documents=1), "step 0, rank 0, pack 0 has 2 samples, over max_documents of 1"),
    (lambda p: attrs.evolve(p, topology=Topology(4)), "step 0 has 2 ranks; the topology has 4"),
    (lambda p: attrs.evolve(p, digest="0" * 32), f"the digest is {'0' * 32} but the order and packs give"),
    (lambda p: attrs.evolve(p, work=p.work[:1]), "there are 2 steps, 1 works, 2 works in arrival order and 2 bounds"),
    (lambda p: attrs.evolve(p, bounds=()), "there are 2 steps, 2 works, 2 works in arrival order and 0 bounds"),
]


@pytest.mark.parametrize(("change", "sentence"), BROKEN_FIELDS, ids=[row[1] for row in BROKEN_FIELDS])
def test_broken_fields_are_found(change: Callable[[Plan], Plan], sentence: str) -> None:
    found = verify(change(good()), SAMPLES)
    assert any(one.startswith(sentence) for one in found), found


#: The figures that need no routes.
PLAIN_WORK = [field.name for field in attrs.fields(Work) if field.default is attrs.NOTHING]
PLAIN_BOUNDS = [field.name for field in attrs.fields(Bounds) if field.default is attrs.NOTHING]


@pytest.mark.parametrize("field", PLAIN_WORK)
def test_wrong_work_is_found(field: str) -> None:
    made = good()
    true = getattr(made.work[1], field)
    claimed = (made.work[0], attrs.evolve(made.work[1], **{field: true + 1}))
    wrong = attrs.evolve(made, work=claimed, arrival=claimed)
    assert verify(wrong, SAMPLES) == [f"step 1 claims {field} {true + 1} but its packs give {true}"]


@pytest.mark.parametrize("field", PLAIN_BOUNDS)
def test_wrong_bounds_are_found(field: str) -> None:
    made = good()
    true = getattr(made.bounds[0], field)
    wrong = attrs.evolve(made, bounds=(attrs.evolve(made.bounds[0], **{field: true - 1}), made.bounds[1]))
    assert verify(wrong, SAMPLES) == [f"step 0 claims least {field} {true - 1} but its packs give {true}"]


def test_other_samples_are_found() -> None:
    assert verify(good(), SAMPLES[:-1])[0] == "the plan orders 18 samples but 17 were given"
    assert verify(good(), [])[0] == "the plan orders 18 samples but 0 were given"
    renamed = [Sample("q0", 17), Sample("q0", 87), *SAMPLES[2:]]
    assert verify(good(), renamed) == ["samples 0 and 1 share the id 'q0'"]
    longer = [Sample("q0", 18), *SAMPLES[1:]]
    assert "step 0 claims model_tokens 288 but its packs give 289" in verify(good(), longer)


@given(st.data())
def test_any_two_samples_that_trade_places_are_found(data: st.DataObject) -> None:
    made = good()
    one, other = data.draw(st.lists(st.integers(0, 15), min_size=2, max_size=2, unique=True))
    trade = {one: other, other: one}
    steps = tuple(
        Schedule(tuple(tuple(tuple(trade.get(i, i) for i in pack) for pack in rank) for rank in step.packs))
        for step in made.steps
    )
    assert verify(attrs.evolve(made, steps=steps, digest=digest(made.order, steps)), SAMPLES) != []


@given(
    st.lists(st.lists(st.lists(st.lists(st.integers(-2, 20), max_size=3), max_size=3), max_size=3), max_size=3),
    st.lists(st.integers(-2, 20), max_size=20),
    st.integers(-1, 20),
)
def test_no_plan_however_wrong_makes_it_raise(
    packs: list[list[list[list[int]]]], order: list[int], step_samples: int
) -> None:
    steps = tuple(Schedule(tuple(tuple(tuple(one) for one in rank) for rank in step)) for step in packs)
    wrong = attrs.evolve(good(), steps=steps, order=tuple(order), step_samples=step_samples)
    assert verify(wrong, SAMPLES) != []

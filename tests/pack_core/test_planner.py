"""A collection to its plan."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pack_core import Bounds, CountError, LengthError, PackError, Plan, Sample, Topology, Work, plan, verify
from support.core_oracles import step_of


def samples_of(lengths: list[int]) -> list[Sample]:
    return [Sample(f"q{i}", length, group=i // 2) for i, length in enumerate(lengths)]


def test_two_steps_and_a_tail() -> None:
    lengths = [17, 87, 19, 13, 23, 89, 29, 11, *[64] * 8, 5, 6, 7]
    made = plan(samples_of(lengths), topology=Topology(2), capacity=128, step_samples=8)
    assert made.steps[0].packs == (((0, 2), (4, 6)), ((1, 3), (5, 7)))
    assert made.steps[1].packs == (((8, 10), (12, 14)), ((9, 11), (13, 15)))
    assert made.tail == (16, 17, 18)
    assert made.order == tuple(range(19))
    # Pack 0: 36 against 100, 289+361 against 7569+169. Pack 1: 52 against 100, 529+841 against 7921+121.
    # All squares together are 650 + 7738 + 1370 + 8042 = 17800.
    assert made.work[0] == Work(2, 200, 7738 + 8042, 288, 100, 288 / 512)
    assert made.work[1] == Work(2, 256, 4 * 64 * 64, 512, 128, 1.0)
    assert made.bounds[0] == Bounds(2, 144, 17800 // 2)
    assert made.bounds[1] == Bounds(2, 256, 4 * 64 * 64)


def test_thirty_six_samples_in_blocks_of_sixteen_leave_four() -> None:
    made = plan(samples_of([6] * 36), topology=Topology(4, 2), capacity=12, step_samples=16)
    assert [step.packs_per_rank for step in made.steps] == [2, 2]
    assert made.tail == (32, 33, 34, 35)


def test_fewer_samples_than_a_block_are_all_tail() -> None:
    made = plan(samples_of([5, 6, 7]), topology=Topology(2), capacity=16, step_samples=4)
    assert (made.steps, made.work, made.bounds) == ((), (), ())
    assert made.tail == made.order == (0, 1, 2)
    assert verify(made, samples_of([5, 6, 7])) == []


def test_one_document_a_pack_is_the_one_sample_a_row_path() -> None:
    made = plan(samples_of([1] * 8), topology=Topology(2), capacity=100, step_samples=8, max_documents=1)
    assert made.steps[0].packs == (((0,), (2,), (4,), (6,)), ((1,), (3,), (5,), (7,)))
    assert made.max_documents == 1


def test_ids_that_repeat_are_named_with_both_positions() -> None:
    repeated = [Sample("a", 1), Sample("b", 1), Sample("a", 1)]
    with pytest.raises(PackError, match="two samples have the id 'a', at positions 0 and 2; ids must be unique"):
        plan(repeated, topology=Topology(1), capacity=4, step_samples=3)


def test_text_and_numbers_are_different_ids() -> None:
    assert plan([Sample("1", 1), Sample(1, 1)], topology=Topology(1), capacity=4, step_samples=2).tail == ()


@pytest.mark.parametrize("position", [1, 4])
def test_a_too_long_sample_is_named_even_in_the_tail(position: int) -> None:
    lengths = [5] * 5
    lengths[position] = 8112
    with pytest.raises(LengthError) as caught:
        plan(samples_of(lengths), topology=Topology(2), capacity=6144, step_samples=4)
    assert str(caught.value) == (
        f"sample 'q{position}' (position {position}) has 8,112 tokens but capacity (packing_max_tokens) is 6,144; "
        "raise packing_max_tokens to 8,112 or more, or drop the sample"
    )


def test_a_step_that_the_ranks_cannot_share_is_refused_with_ones_they_can() -> None:
    with pytest.raises(CountError, match=r"step_samples is 30, which 4 ranks cannot share .* such as 28 or 32"):
        plan(samples_of([1] * 60), topology=Topology(4), capacity=4, step_samples=30)
    with pytest.raises(CountError, match=r"step_samples is 3, .* such as 4"):
        plan(samples_of([1] * 60), topology=Topology(4), capacity=4, step_samples=3)


@pytest.mark.parametrize(
    ("option", "value"),
    [("step_samples", 0), ("step_samples", -4), ("step_samples", 4.0), ("capacity", 0), ("max_documents", 0)],
)
def test_impossible_numbers_are_refused(option: str, value: object) -> None:
    options = {"topology": Topology(2), "capacity": 8, "step_samples": 4, option: value}
    with pytest.raises(PackError, match=f"{option} is"):
        plan(samples_of([1] * 4), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [4, 2])
def test_an_unknown_method_is_refused_with_or_without_a_step(count: int) -> None:
    with pytest.raises(PackError, match="'even'; it must be one of 'tokens', 'samples', 'balanced'"):
        plan(samples_of([1] * count), topology=Topology(2), capacity=8, step_samples=4, equalize="even")


def test_no_samples_are_an_error() -> None:
    with pytest.raises(PackError, match="no samples to plan"):
        plan([], topology=Topology(2), capacity=8, step_samples=4)


def test_what_is_no_sample_is_named_by_its_position() -> None:
    with pytest.raises(PackError, match=r"samples\[1\] is a int; give pack_core.Sample"):
        plan([Sample("a", 1), 7], topology=Topology(1), capacity=8, step_samples=2)  # type: ignore[list-item]


def test_the_same_input_is_the_same_plan() -> None:
    def made() -> Plan:
        return plan(samples_of([3, 9, 4, 1] * 5), topology=Topology(2), capacity=10, step_samples=6)

    assert made() == made()
    assert attrs.asdict(made()) == attrs.asdict(made())


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.integers(1, 15), min_size=1, max_size=40),
    st.integers(15, 40),
    st.none() | st.integers(1, 3),
    st.sampled_from(["tokens", "samples"]),
)
def test_each_step_is_the_slow_version_of_its_block(
    ranks: int, rows: int, lengths: list[int], capacity: int, cap: int | None, equalize: str
) -> None:
    size = ranks * rows
    made = plan(
        samples_of(lengths),
        topology=Topology(ranks),
        capacity=capacity,
        step_samples=size,
        equalize=equalize,
        max_documents=cap,
    )
    assert len(made.steps) == len(lengths) // size
    for number, step in enumerate(made.steps):
        start = number * size
        slow = step_of(lengths[start : start + size], ranks, capacity, equalize, cap)
        assert [[[i - start for i in one] for one in packs] for packs in step.packs] == slow
    assert list(made.tail) == list(range(len(lengths)))[len(lengths) // size * size :]

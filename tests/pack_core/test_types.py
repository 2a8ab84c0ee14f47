"""The values."""

from array import array

import attrs
import pytest
from pack_core import (
    CountError,
    LengthError,
    PackError,
    Packing,
    RecordError,
    Sample,
    Schedule,
    Topology,
    TopologyError,
    pack,
    plan,
)


def test_every_error_is_a_value_error() -> None:
    for kind in (PackError, LengthError, CountError, TopologyError, RecordError):
        assert issubclass(kind, PackError)
        assert issubclass(kind, ValueError)


def test_ranks_of_a_replica_are_neighbours() -> None:
    topology = Topology(ranks=8, expert_parallel=4)
    assert topology.replicas == 2
    assert [topology.replica(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [topology.destination(rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_one_rank_of_every_expert_is_the_default() -> None:
    assert [Topology(3).replica(rank) for rank in range(3)] == [0, 1, 2]
    assert [Topology(3).destination(rank) for rank in range(3)] == [0, 0, 0]


def test_an_expert_parallel_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(TopologyError) as caught:
        Topology(ranks=6, expert_parallel=4)
    assert str(caught.value) == (
        "6 ranks cannot hold whole replicas of expert_parallel 4; "
        "use a multiple of 4 ranks or an expert_parallel of 1, 2, 3 or 6"
    )


@pytest.mark.parametrize(("ranks", "degree"), [(0, 1), (4, 0), (-4, 2), (4, -2), (4.0, 2), (True, 1), (1, 2)])
def test_impossible_topologies_are_refused(ranks: int, degree: int) -> None:
    with pytest.raises(TopologyError):
        Topology(ranks, degree)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    with pytest.raises(TopologyError, match="there are 4 ranks, 0 to 3"):
        Topology(4, 2).destination(rank)


@pytest.mark.parametrize("length", [0, -1, 1.0, True, None, "7", 2**63])
def test_the_length_of_a_sample_is_a_positive_whole_number(length: object) -> None:
    with pytest.raises(LengthError, match="the length of sample 'q1'"):
        Sample("q1", length)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [None, 1.5, True, b"q1", ("q", 1), 2**64])
def test_an_id_is_text_or_a_whole_number(name: object) -> None:
    with pytest.raises(PackError, match="the id of a sample is"):
        Sample(name, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("group", [1.5, False, b"q1", ["q"]])
def test_a_group_is_text_a_whole_number_or_none(group: object) -> None:
    with pytest.raises(PackError, match="the group of sample 'q1' is"):
        Sample("q1", 3, group)  # type: ignore[arg-type]


def test_values_are_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Sample("a", 1).length = 2  # type: ignore[misc]


def test_a_packing_is_a_row_of_lists() -> None:
    packing = Packing(array("q", [3, 0, 2, 1]), array("q", [0, 1, 4]))
    assert len(packing) == 2
    assert packing[0] == packing[-2] == [3]
    assert packing[1] == packing[-1] == [0, 2, 1]
    assert list(packing) == [[3], [0, 2, 1]]


@pytest.mark.parametrize("p", [2, -3])
def test_a_pack_that_does_not_exist_is_an_index_error(p: int) -> None:
    with pytest.raises(IndexError, match=f"pack {p} does not exist; there are 2 packs"):
        pack([9, 9], capacity=10)[p]


def test_packings_compare_by_content() -> None:
    assert pack([5, 5], capacity=10) == pack([1, 2], capacity=10)
    assert pack([5, 5], capacity=10) != pack([5, 5], capacity=9)


@pytest.mark.parametrize("offsets", [[], [0], [0, 1], [1, 2], [0, 3], [0, 0, 2], [0, 2, 1, 2]])
def test_offsets_that_lose_a_sample_or_leave_a_pack_empty_are_refused(offsets: list[int]) -> None:
    with pytest.raises(PackError, match=r"offsets span|every pack must hold"):
        Packing(array("q", [0, 1]), array("q", offsets))


def test_a_packing_shows_its_packs_while_they_are_few() -> None:
    assert repr(pack([5, 8, 6, 7], capacity=16)) == "Packing([[0, 1], [2, 3]])"
    assert repr(pack([1] * 4000, capacity=2)) == "<Packing of 4,000 samples in 2,000 packs>"


def test_a_plan_shows_its_shape() -> None:
    made = plan([Sample(i, 6) for i in range(18)], topology=Topology(4, 2), capacity=12, step_samples=8)
    assert repr(made) == (
        "<Plan of 18 samples: 2 steps of 8 on 4 ranks, packs per rank [1, 1], 2 samples in the tail, capacity 12, "
        f"digest {made.digest[:12]}>"
    )


def test_a_schedule_counts_the_packs_of_a_rank() -> None:
    assert Schedule((((0,), (2,)), ((1,), (3,)))).packs_per_rank == 2

"""Expert ids to counts: by hand, against nested loops for every width and kernel, and every record that is refused."""

from __future__ import annotations

from array import array
from importlib.util import find_spec
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pack_core.errors import PackError, RoutingError
from pack_core.kernels import choose_kernels, counting
from pack_core.recording import recording
from pack_core.routing import count_sample, dispatch_counts, fold, owners
from support.core_ducks import Row

#: The packages' own test environment has no NumPy; where it is installed both kernels are tested.
KERNELS = ["python", "numpy"] if find_spec("numpy") else ["python"]

Nested = list[list[list[int]]]


def naive(routes: Nested, selected: list[int], table: list[int], places: int, top_k: int) -> list[list[int]]:
    """Counts of one sample by loops over its ids, and over the final row that was never recorded."""
    counts = [[0] * places for _ in selected]
    for row in [*routes, [list(range(top_k))] * 99]:  # 99 layers are enough
        for column, layer in enumerate(selected):
            for expert in row[layer]:
                counts[column][table[expert]] += 1
    return counts


def drawn(rows: int, layers: int, top_k: int, experts: int, seed: int, dense: tuple[int, ...] = ()) -> Nested:
    """Routes with every column of a dense layer filled with 99, which no model here has as an expert."""
    random = Random(seed)
    return [
        [[99 if layer in dense else random.randrange(experts) for _ in range(top_k)] for layer in range(layers)]
        for _ in range(rows)
    ]


def joined(rows: list[list[int]]) -> list[int]:
    return [count for row in rows for count in row]


def flat(routes: Nested) -> list[int]:
    return [expert for row in routes for layer in row for expert in layer]


def counted(routes: Any, length: int, *, kernels: str | None = None, **options: Any) -> list[int]:
    return list(dispatch_counts([routes], [length], ids=["q1"], kernels=kernels, **options).counts)


@pytest.mark.parametrize("kernels", KERNELS)
def test_sixteen_samples_of_six_tokens_fold_to_the_two_known_histograms(kernels: str) -> None:
    """Five recorded rows of two ids go to one destination; the final row's two ids always go to the first."""
    routes = [bytes([0, 1] * 5 if sample % 4 < 2 else [2, 3] * 5) for sample in range(16)]

    counts = dispatch_counts(routes, [6] * 16, layers=1, experts=4, top_k=2, kernels=kernels)
    folded = fold(counts, owners(4, 2), kernels=kernels)

    assert [list(counts.of(sample)) for sample in (0, 2)] == [[6, 6, 0, 0], [1, 1, 5, 5]]
    assert [list(folded.of(sample)) for sample in range(4)] == [[12, 0], [12, 0], [2, 10], [2, 10]]
    assert (folded.samples, folded.layers, folded.routed_layers, folded.places, folded.subset) == (
        16,
        (0,),
        1,
        2,
        False,
    )


@given(
    rows=st.integers(0, 40),
    layers=st.integers(1, 5),
    top_k=st.integers(1, 4),
    experts=st.sampled_from([4, 5, 31, 64, 128, 129, 256, 257, 300, 600]),
    stride=st.integers(1, 3),
    dense=st.sets(st.integers(0, 4)),
    code=st.sampled_from("bBhHiIlLqQ"),
    folding=st.sampled_from(["no", "equal", "table"]),
    seed=st.integers(0, 1000),
)
def test_every_width_and_kernel_counts_what_nested_loops_count(
    rows: int, layers: int, top_k: int, experts: int, stride: int, dense: set[int], code: str, folding: str, seed: int
) -> None:
    dense = {layer for layer in dense if layer < layers - 1}
    experts = min(experts, {"b": 128, "B": 256}.get(code, experts))
    routes = drawn(rows, layers, top_k, experts, seed, tuple(dense))
    selected = [layer for layer in range(layers) if layer not in dense][::stride]
    random = Random(seed)
    table = {
        "no": list(range(experts)),
        "equal": [expert * 2 // experts for expert in range(experts)],
        "table": [random.randrange(3) for _ in range(experts)],
    }[folding]
    expected = naive(routes, selected, table, max(table) + 1, top_k)

    for kernels in KERNELS:
        for recorded in (array(code, flat(routes)), memoryview(array(code, flat(routes))), routes):
            counts = dispatch_counts(
                [recorded],
                [rows + 1],
                layers=layers,
                experts=experts,
                top_k=top_k,
                dense_layers=dense,
                layer_stride=stride,
                owners=None if folding == "no" else table,
                kernels=kernels,
            )

            assert list(counts.of(0)) == joined(expected)
            assert counts.layers == tuple(selected)
            assert counts.subset == (len(selected) < layers - len(dense))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("experts", [3, 16, 100, 128, 200, 256, 512])
def test_long_samples_count_alike_on_every_path(kernels: str, experts: int) -> None:
    routes = drawn(6001, 2, 3, experts, seed=experts)
    table = [expert % 3 for expert in range(experts)]
    ids = array("i", flat(routes))
    options: dict[str, Any] = {"layers": 2, "experts": experts, "top_k": 3, "kernels": kernels}

    plain = dispatch_counts([ids], [6002], **options)

    assert list(plain.of(0)) == joined(naive(routes, [0, 1], list(range(experts)), experts, 3))
    folded = joined(naive(routes, [0, 1], table, 3, 3))
    assert list(dispatch_counts([ids], [6002], owners=table, **options).of(0)) == folded
    assert list(fold(plain, table, kernels=kernels).of(0)) == folded


def test_samples_keep_their_order_and_stream_one_by_one() -> None:
    how = recording(layers=2, experts=4, top_k=2, dense_layers=[0])
    many = [drawn(rows, 2, 2, 4, seed=rows, dense=(0,)) for rows in (3, 0, 7)]

    counts = dispatch_counts(many, [4, 1, 8], layers=2, experts=4, top_k=2, dense_layers=[0])

    assert [counts.of(sample) for sample in range(3)] == [count_sample(routes, len(routes) + 1, how) for routes in many]
    assert list(counts.of(1)) == [1, 1, 0, 0]
    assert counts.counts.itemsize == 4
    assert counts.samples == 3


@pytest.mark.parametrize("kernels", KERNELS)
def test_ids_of_layers_that_do_not_count_are_not_looked_at(kernels: str) -> None:
    routes = array("i", [-1, -1, 0, 1, 900, 900, -5, -5])

    found = counted(routes, 2, kernels=kernels, layers=4, experts=2, top_k=2, dense_layers=[0], layer_stride=3)

    assert found == [2, 2]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("code", "wrong", "said"),
    [
        ("b", 4, "expert 4"),
        ("i", 4, "expert 4"),
        ("i", 256, "expert 256"),
        ("i", 65536, "expert 65536"),
        ("q", 2**40, "expert 1099511627776"),
        ("q", -7, "expert -7"),
        ("Q", 2**63, "expert 9223372036854775808"),
        ("B", 255, "1 of 4 ids of the counted layers are 255, never set, the first in layer 2"),
        ("i", -1, "1 of 4 ids of the counted layers are -1, never set, the first in layer 2"),
    ],
)
@pytest.mark.parametrize("fold_to", [None, [0, 0, 1, 1]])
def test_an_id_that_is_no_expert_is_found(
    kernels: str, code: str, wrong: int, said: str, fold_to: list[int] | None
) -> None:
    ids = [0, 1, 2, 3, 0, 1] * 3
    ids[6 * 1 + 2 * 2 + 1] = wrong

    with pytest.raises(RoutingError) as raised:
        counted(array(code, ids), 4, kernels=kernels, layers=3, experts=4, top_k=2, dense_layers=[0], owners=fold_to)

    message = str(raised.value)
    assert "sample 'q1' (position 0): row 1 " in message
    assert "layer 2" in message
    assert "experts are 0 to 3" in message or "partly missing" in message
    assert said in message


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("experts", [300, 512])
@pytest.mark.parametrize("wrong", [600, 768, 65536 + 1])
def test_an_id_above_more_than_256_experts_is_found_in_either_byte(kernels: str, experts: int, wrong: int) -> None:
    ids = [0, experts - 1, 299, wrong]

    for table in (None, [0] * experts):
        with pytest.raises(RoutingError, match=f"row 3 of layer 0 is routed to expert {wrong} but experts are 0 to"):
            counted(array("i", ids), 5, kernels=kernels, layers=1, experts=experts, top_k=1, owners=table)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("code", "bhi")
@pytest.mark.parametrize("experts", [200, 256, 300, 40000, 70000])
def test_a_negative_id_is_not_taken_for_a_high_expert(kernels: str, code: str, experts: int) -> None:
    for wrong in (-1, -100):
        with pytest.raises(RoutingError, match="row 1 "):
            counted(array(code, [5, wrong]), 3, kernels=kernels, layers=1, experts=experts, top_k=1)


@pytest.mark.parametrize("kernels", KERNELS)
def test_more_experts_than_two_bytes_hold_are_counted(kernels: str) -> None:
    found = counted(array("i", [69_999]), 2, kernels=kernels, layers=1, experts=70_000, top_k=1, owners=[0] * 70_000)

    assert found == [2]


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_without_any_id_is_said_to_be_missing(kernels: str) -> None:
    with pytest.raises(RoutingError, match="row 1 is missing: all 2 ids of the counted layers are -1, never set"):
        counted([[[0, 1]], [[-1, -1]]], 3, kernels=kernels, layers=1, experts=4, top_k=2)


LAYOUT: dict[str, Any] = {"layers": 2, "experts": 4, "top_k": 2}


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (None, "sample 'q1' .* has no routes; record them"),
        ("0123", "routes that are text"),
        (7, "routes that are a int"),
        (bytes(8), "has routes of 2 rows but needs 3: its 4 tokens but the last"),
        (bytes(11), r"has 11 ids but needs 12: 3 rows of 2 layers and top-2; check layers and top_k"),
        (bytes(48), r"has routes of 12 rows but needs 3: .* view 32-bit ids as such"),
        (array("i", bytes(4 * 24)), "has routes of 6 rows but needs 3: .* for every token that was run$"),
        (memoryview(bytes(12)).cast("B", [3, 4]), r"routes of shape \[3, 4\] but needs \[3, 2, 2\]"),
        (memoryview(bytes(12)).cast("B", [3, 1, 4]), r"routes of shape \[3, 1, 4\] but needs \[3, 2, 2\]"),
        (memoryview(bytes(8)).cast("B", [2, 2, 2]), "has routes of 2 rows but needs 3"),
        (array("f", [0.0] * 12), "routes that are floats"),
        (memoryview(bytes(12)).cast("?"), "routes that are booleans"),
        ([[[0, 1]] * 2] * 2, "has routes of 2 rows but needs 3"),
        ([[[0, 1]] * 2, [[0, 1]], [[0, 1]] * 2], "has 1 layers at row 1 but needs 2"),
        ([[[0, 1]] * 2, [[0, 1]] * 2, [[0, 1], [0]]], r"has 1 ids at row 2 of layer 1 but needs 2 .*partly missing"),
        ([[[0, 1]] * 2, [[0, 1]] * 2, [[0, 1], None]], r"has 0 ids at row 2 of layer 1 but needs 2"),
        ([[[0, 1]] * 2, [[0, 1], [0, 1.0]], [[0, 1]] * 2], r"has 1\.0 \(float\) at row 1 of layer 1"),
        ([[[0, 1]] * 2, [[0, 1], [True, 1]], [[0, 1]] * 2], r"has True \(bool\) at row 1 of layer 1"),
        ([[[0, 1]] * 2, [[0, 1], [2**70, 1]], [[0, 1]] * 2], r"at row 1 of layer 1"),
    ],
)
def test_routes_that_do_not_fit_name_their_sample_and_what_is_needed(routes: Any, message: str) -> None:
    with pytest.raises(RoutingError, match=message) as raised:
        counted(routes, 4, **LAYOUT)

    assert "sample 'q1' (position 0)" in str(raised.value)


def test_layouts_and_tables_that_cannot_be_are_refused() -> None:
    for options, message in [
        ({"top_k": 5}, "top_k is 5 but there are 4 experts"),
        ({"dense_layers": [2]}, "dense layer 2 does not exist; there are 2 layers, 0 to 1"),
        ({"dense_layers": [0, 1]}, "all 2 layers are dense"),
        ({"layer_stride": 0}, "layer_stride is 0; it must be at least 1"),
        ({"owners": [0, 1]}, "the table of owners has 2 entries; it needs one for each of 4 experts"),
        ({"owners": [0, 1, -1, 0]}, "the owner of expert 2 is -1"),
        ({"owners": [0, 1, 4, 0]}, "the owner of expert 2 is 4; 4 experts have at most that many owners"),
    ]:
        with pytest.raises(RoutingError, match=message):
            counted(bytes(12), 4, **{**LAYOUT, **options})
    with pytest.raises(RoutingError, match="2 routes but 1 lengths"):
        dispatch_counts([None, None], [4], **LAYOUT)
    with pytest.raises(RoutingError, match="6 experts cannot be shared out equally over 4 destinations"):
        owners(6, 4)
    with pytest.raises(RoutingError, match="the table of owners has 1 entries"):
        fold(dispatch_counts([bytes(12)], [4], **LAYOUT), [0])
    with pytest.raises(RoutingError, match="more than 32-bit counts"):
        count_sample(b"", 2**31, recording(**LAYOUT))


def test_kernels_are_chosen_by_name() -> None:
    assert choose_kernels(None) == KERNELS[-1]
    assert counting("python").__name__ == "pack_core.kernels.counting_python"
    with pytest.raises(PackError, match="kernels are 'cuda'; use 'python', 'numpy'"):
        choose_kernels("cuda")


def test_objects_that_only_list_themselves_are_read() -> None:
    assert counted(Row([[[0, 1], [2, 3]]]), 2, **LAYOUT) == [2, 2, 0, 0, 1, 1, 1, 1]

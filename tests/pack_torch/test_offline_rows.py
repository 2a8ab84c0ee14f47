"""Documents into packed rows: what lies where, that nothing is lost unsaid, and what is refused."""

import pickle
from datetime import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_torch.offline import DatasetError, Recipe, advise, lay_out, pack_dataset
from pack_torch.offline.columns import ADDED
from support.offline_cases import chunked, documents, joined, unpacked
from torch.utils.data import DataLoader

STRATEGIES = [
    "next_fit",
    "first_fit",
    "best_fit",
    "first_fit_decreasing",
    "best_fit_decreasing",
    "concat_split",
    "fewest",
]
BY_HAND = {
    "input_ids": [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]],
    "attention_mask": [[1, 1, 1, 0, 0], [1, 0], [1, 1, 0], [1]],
}


def test_four_documents_by_hand() -> None:
    packed = pack_dataset(pa.table(BY_HAND), 5)
    assert packed[:] == {
        "input_ids": [[1, 2, 3, 4, 5], [8, 9, 10, 6, 7], [11]],
        "attention_mask": [[1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1]],
        "seq_lengths": [[5], [3, 2], [1]],
        "documents": [[0], [2, 1], [3]],
        "starts": [[0], [0, 0], [0]],
    }


@pytest.mark.parametrize(
    ("spelling", "rows", "lengths", "lost"),
    [
        ("bfd", [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7]], [[4], [3, 1], [2]], 1),
        ("bfd_split", [[1, 2, 3, 4], [8, 9, 10, 5], [6, 7, 11]], [[4], [3, 1], [2, 1]], 0),
        ("wrapped", [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]], [[4], [1, 2, 1], [2, 1]], 0),
    ],
)
def test_the_spellings_of_trl_mean_what_its_documentation_shows(
    spelling: str, rows: list[list[int]], lengths: list[list[int]], lost: int
) -> None:
    packed = pack_dataset(pa.table(BY_HAND), 4, spelling)
    assert packed[:]["input_ids"] == rows
    assert packed[:]["seq_lengths"] == lengths
    assert packed.losses.tokens == lost


def test_what_is_lost_is_counted_by_reason_and_told(caplog: pytest.LogCaptureFixture) -> None:
    table = pa.table({"input_ids": [list(range(9)), [], [1], [2, 3]]})
    dropped = pack_dataset(table, 4, overlong="drop")
    assert (dropped.losses.dropped, dropped.losses.dropped_tokens, dropped.losses.empty) == (1, 9, 1)
    cut = pack_dataset(table, 4, overlong="truncate")
    assert (cut.losses.truncated, cut.losses.truncated_tokens) == (1, 5)
    assert "1 document over the capacity dropped: 9 tokens lost" in caplog.messages
    assert "1 document without tokens is in no row" in caplog.messages
    assert "1 document cut short at the capacity: 5 tokens lost" in caplog.messages


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any),
    capacity=st.integers(3, 20),
    strategy=st.sampled_from(STRATEGIES),
    overlong=st.sampled_from(["drop", "truncate", "split"]),
    align=st.integers(1, 3),
    most=st.none() | st.integers(1, 4),
    cuts=st.lists(st.integers(0, 40), max_size=5),
)
def test_every_document_unpacks_to_what_went_in_or_is_counted_as_lost(
    lengths: list[int],
    capacity: int,
    strategy: str,
    overlong: str,
    align: int,
    most: int | None,
    cuts: list[int],
) -> None:
    columns = documents(lengths)
    table = chunked(columns, cuts)
    packed = pack_dataset(
        table,
        capacity,
        strategy,
        overlong=overlong,
        align=align,
        max_documents=most,
        add=("seq_lengths", "documents", "starts"),
    )
    rows = list(packed)
    assert all(0 < len(row["input_ids"]) == len(row["labels"]) <= capacity for row in rows)
    assert most is None or all(len(row["documents"]) <= most for row in rows)
    lost = 0
    for name in columns:
        found = unpacked(rows, name)
        for d, whole in enumerate(columns[name]):
            held = joined(found.get(d, {}))
            assert held == whole[: len(held)]
            if len(held) < len(whole):
                assert len(whole) > capacity // align * align, "only overlong documents lose tokens"
                assert overlong == "truncate" or not held
                lost += len(whole) - len(held)
    assert lost == 2 * packed.losses.tokens
    assert overlong != "split" or not lost
    assert packed.losses.empty == lengths.count(0)


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.uint16(), pa.float32(), pa.bool_(), pa.list_(pa.int16())])
@pytest.mark.parametrize("wrapped", [pa.list_, pa.large_list])
def test_values_of_any_kind_stay_with_their_tokens(kind: Any, wrapped: Any) -> None:
    lengths = [3, 1, 4, 2]
    tokens = documents(lengths)["input_ids"]
    values: list[list[Any]] = [[d + place for place in range(length)] for d, length in enumerate(lengths)]
    if kind == pa.bool_():
        values = [[value % 2 == 0 for value in row] for row in values]
    elif kind == pa.list_(pa.int16()):
        values = [[[value, -value] for value in row] for row in values]
    schema = pa.schema({"input_ids": wrapped(pa.int32()), "values": wrapped(kind)})
    packed = pack_dataset(chunked({"input_ids": tokens, "values": values}, [1, 3], schema), 5)
    found = unpacked(packed, "values")
    assert [joined(found[d]) for d in range(4)] == values
    assert packed.table(0, 1).schema.field("values").type == pa.list_(kind)


def test_a_value_a_document_is_carried_and_positions_start_anew() -> None:
    table = pa.table(BY_HAND | {"weight": [0.5, 1.0, 2.0, 4.0], "name": ["a", "b", "c", "d"]})
    packed = pack_dataset(table, 5, per_document=["weight", "name"], add=("position_ids",))
    assert packed[1] == {
        "input_ids": [8, 9, 10, 6, 7],
        "attention_mask": [1, 1, 0, 1, 0],
        "weight": [2.0, 1.0],
        "name": ["c", "b"],
        "position_ids": [0, 1, 2, 0, 1],
    }


def test_a_loader_gets_tensors_and_a_copy_reads_the_same() -> None:
    packed = pack_dataset(pa.table(BY_HAND | {"name": ["a", "b", "c", "d"]}), 5, per_document=["name"]).with_format(
        "torch"
    )
    rows = [row for batch in DataLoader(packed, batch_size=2, collate_fn=list) for row in batch]
    assert [row["input_ids"].tolist() for row in rows] == [[1, 2, 3, 4, 5], [8, 9, 10, 6, 7], [11]]
    assert rows[0]["input_ids"].dtype == torch.int64
    assert rows[1]["name"] == ["c", "b"]
    again = pickle.loads(pickle.dumps(packed))
    assert torch.equal(again[-1]["input_ids"], packed[2]["input_ids"])
    assert isinstance(packed.with_format("numpy")[0]["attention_mask"], np.ndarray)
    with pytest.raises(IndexError, match="row 3 does not exist; there are 3 rows"):
        packed[3]


def test_a_row_names_its_documents_where_empty_ones_are_passed_over() -> None:
    packed = pack_dataset(pa.table({"input_ids": [[], [1], [], [2, 3]]}), 3)
    assert packed[0]["documents"] == [3, 1]


@pytest.mark.parametrize(
    ("columns", "arguments", "told"),
    [
        (BY_HAND, {"columns": ["input_idz"]}, "there is no column 'input_idz'; the columns are 'input_ids'"),
        (BY_HAND, {"columns": ["input_ids", "input_ids"]}, "'input_ids' is named twice"),
        (BY_HAND | {"weight": [1.0] * 4}, {}, "'weight' holds double, not a list of tokens"),
        (BY_HAND | {"text": ["x"] * 4}, {}, "'text' holds text, not tokens; tokenize it first"),
        ({"text": [["a", "b"]]}, {}, "'text' holds text, not tokens"),
        (
            {"input_ids": [[1], [2, 3]], "labels": [[1], [2]]},
            {},
            "document 1 has 2 values of 'input_ids' but 1 of 'labels'",
        ),
        ({"input_ids": [[1], None]}, {}, "document 1 has no 'input_ids', or a missing value"),
        ({"input_ids": [[1], [2, None]]}, {}, "document 1 has no 'input_ids', or a missing value"),
        ({"seq_lengths": [[1]]}, {}, "'seq_lengths' has the name of one that packing adds"),
        ({"input_ids": [[]]}, {"columns": ["input_ids"]}, "nothing to pack: 1 document, none with a token"),
        (BY_HAND, {"capacity": 4}, "1 document of 4 over the capacity of 4, the first being document 0 with 5 tokens"),
        (BY_HAND, {"strategy": "bfd", "overlong": "drop"}, "'bfd' means overlong 'truncate', but 'drop' was given"),
        (BY_HAND, {"add": ["cu_seqlens"]}, "add names 'cu_seqlens'; it may name 'seq_lengths'"),
        (BY_HAND, {"strategy": "best"}, "strategy is 'best'; it must be one of"),
        (BY_HAND, {"capacity": "5"}, r"capacity is '5' \(str\); it must be a whole number"),
        (BY_HAND, {"capacity": None}, "capacity is None"),
        (BY_HAND, {"columns": "input_ids"}, r"columns is the text 'input_ids'; it must be a list .* \['input_ids'\]"),
        (BY_HAND, {"per_document": "input_ids"}, "per_document is the text 'input_ids'; it must be a list of names"),
        (BY_HAND, {"add": "documents"}, "add is the text 'documents'; it must be a list of names"),
        (BY_HAND, {"add": ["starts", "starts"]}, "add names 'starts' twice"),
        # 6 of 10 tokens hold a document in steps of 6; the empty one before counts.
        (
            {"input_ids": [[], [1, 2, 3], [1] * 8]},
            {"capacity": 10, "align": 6},
            r"over the capacity of 10 \(in steps of 6: 6\), the first being document 2 with 8 tokens; .* to 12 or more",
        ),
    ],
)
def test_what_cannot_be_packed_is_said_with_the_remedy(columns: Any, arguments: dict[str, Any], told: str) -> None:
    given = {"capacity": 5} | arguments
    with pytest.raises(ValueError, match=told):
        pack_dataset(pa.table(columns), **given)


def test_where_all_is_dropped_the_columns_are_left() -> None:
    kinds = pa.schema(
        {
            "input_ids": pa.list_(pa.int32()),
            "boxes": pa.list_(pa.list_(pa.int8())),
            "name": pa.string(),
            "weight": pa.float32(),
        }
    )
    table = pa.table({"input_ids": [[7] * 9], "boxes": [[[1]] * 9], "name": ["a"], "weight": [0.5]}, kinds)
    packed = pack_dataset(table, 5, overlong="drop", per_document=["name", "weight"], add=ADDED)
    assert (len(packed), packed.losses.dropped) == (0, 1)
    none = packed.table(0, 0)
    assert none.schema == pack_dataset(table, 9, per_document=["name", "weight"], add=ADDED).table(0, 1).schema
    assert none.to_pydict() == packed[:] == {name: [] for name in packed.column_names}


def test_what_no_tensor_holds_is_given_out_as_lists() -> None:
    beside: dict[str, list[Any]] = {
        "struct": [{"a": 1}, {"a": 2}],
        "when": [datetime(2020, 1, 1), datetime(2021, 1, 1)],
        "ragged": [[1], [2, 3]],
        "holes": [[1], [None]],
        "flag": [True, None],
        "text": ["x", None],
        "money": [Decimal("1.5"), Decimal(2)],
    }
    even = {"pair": [[1, 2], [3, 4]], "good": [True, False]}
    table = pa.table({"input_ids": [[1, 2], [3]], "boxes": [[[1], [2, 3]], [[4]]]} | beside | even)
    packed = pack_dataset(table, 8, columns=["input_ids", "boxes"], per_document=[*beside, *even])
    row: dict[str, Any] = packed.with_format("torch")[0]
    assert {name: row[name] for name in beside} == beside
    assert row["boxes"] == [[1], [2, 3], [4]]
    assert {name: row[name].tolist() for name in even} == even
    assert row["input_ids"].tolist() == [1, 2, 3]


def test_a_stream_is_refused() -> None:
    with pytest.raises(DatasetError, match=r"generator; give a datasets\.Dataset"):
        pack_dataset((row for row in ()), 5)


def test_advice_takes_the_smallest_capacity_that_is_nearly_as_good_as_the_best() -> None:
    # 50: 60 and 60 are cut to 50, four rows hold 170 of 190 tokens, 85 % full. 100: 60 + 40 and 60 + 30 fill 190 of
    # 200.
    advice = advise(np.array([60, 60, 40, 30]), [50, 100, 200])
    assert [(t.rows, t.overlong, t.shapes, t.documents) for t in advice.trials] == [
        (4, 2, 3, 1),
        (2, 0, 2, 2),
        (1, 0, 1, 4),
    ]
    assert [t.gain for t in advice.trials] == pytest.approx([0.85 * 170 / 190, 0.95, 0.95])
    assert advice.knee.capacity == 100
    assert advice.sentence.startswith("Take a capacity of 100: 2 rows, 95.0 % full, and nothing is cut; 50 would waste")


def test_advice_takes_lists_and_needs_a_capacity_to_try() -> None:
    assert advise([60, 60, 40, 30], [50, 100, 200]).knee.capacity == 100  # type: ignore[arg-type]
    with pytest.raises(DatasetError, match="capacities is empty; name at least one, or leave it out"):
        advise(np.array([60, 60]), [])


def test_a_layout_has_a_certificate_and_a_digest_of_its_own() -> None:
    layout = lay_out(np.array([6, 6, 4, 3, 3]), Recipe(10, "next_fit"))
    found = layout.certificate()
    assert (found.packs, found.floors.packs) == (3, 3)
    assert layout.digest() == lay_out(np.array([6, 6, 4, 3, 3], np.uint8), Recipe(10, "next_fit")).digest()
    assert layout.digest() != lay_out(np.array([6, 6, 4, 3, 3]), Recipe(12, "next_fit")).digest()

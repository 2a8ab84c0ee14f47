"""Packs by hand: the example of the request for comments, shifts, padding, nested tensors, and what comes out again."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_torch import Field, PackCollator, Sft, SharedPrompt, build_pack, split_row, truncate_row
from support.format_cases import KINDS, as_kind, lists, rows_of, same

RFC = [{"tokens": [1, 2], "labels": [3, 4]}, {"tokens": [5, 6], "labels": [7, 8]}]


def test_the_example_of_the_request_for_comments_holds_literally() -> None:
    pack = build_pack(RFC, format=Sft(tokens="tokens", labels="labels"))

    assert pack["tokens"].tolist() == [1, 2, 5, 6]
    assert pack["labels"].tolist() == [3, 4, 7, 8]
    assert pack.document_ids.tolist() == [0, 0, 1, 1]
    assert pack.input_pos.tolist() == [0, 1, 0, 1]
    expected = [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 1, 1],
    ]
    assert pack.dense_mask().int().tolist() == expected
    function = pack.block_mask().mask_mod
    row, zero = torch.arange(4), torch.tensor(0)
    assert function(zero, zero, row[:, None], row[None, :]).int().tolist() == expected
    assert pack.documents() == RFC


def test_labels_are_shifted_inside_each_document_and_the_boundary_predicts_nothing() -> None:
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    assert build_pack(rows, format=Sft(label_mode="tokens"))["labels"].tolist() == [2, 3, -100, 5, -100]


@pytest.mark.parametrize(
    ("extra", "options", "expected"),
    [
        ({"prompt_length": 2}, {}, [-100, 3, 4, -100]),
        ({"prompt_length": 2}, {"train_on_prompt": True}, [2, 3, 4, -100]),
        ({"prompt_length": 0}, {}, [2, 3, 4, -100]),
        ({"prompt_length": 4}, {}, [-100] * 4),
        ({"completion_mask": [0, 0, 1, 1]}, {}, [-100, 3, 4, -100]),
        ({"assistant_masks": [0, 1, 0, 1]}, {}, [2, -100, 4, -100]),  # two turns
        ({"completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 1, 0, 1]}, {}, [2, -100, 4, -100]),
        ({"turns": [1, 1, 0, 1]}, {"masks": ("turns",)}, [2, -100, 4, -100]),
    ],
)
def test_prompts_and_turns_are_masked_by_flag_and_by_mask(extra: dict, options: dict, expected: list[int]) -> None:
    rows = [{"input_ids": [9, 9]}, {"input_ids": [1, 2, 3, 4]}]
    rows[0] |= {name: 1 if isinstance(value, int) else [1, 1] for name, value in extra.items()}
    rows[1] |= extra
    pack = build_pack(rows, format=Sft(label_mode="tokens", **options))
    assert pack["labels"].tolist() == [9, -100, *expected]
    assert pack.documents() == rows


@pytest.mark.parametrize("prompt", [-1, 4, None])
def test_a_prompt_longer_than_its_document_is_refused_and_masks_no_neighbour(prompt: int) -> None:
    rows = [{"input_ids": [1, 2, 3], "prompt_length": prompt}, {"input_ids": [4, 5], "prompt_length": 0}]
    with pytest.raises(
        ValueError, match=f"document 0 of the pack has 3 tokens and {prompt} of them as 'prompt_length'"
    ):
        build_pack(rows, format=Sft(label_mode="tokens"))


def test_labels_that_stand_at_their_own_token_are_shifted_and_come_out_as_they_were() -> None:
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4, 5], "labels": [4, -100]}]
    pack = build_pack(rows, format=Sft(label_mode="tokens"))
    assert pack["labels"].tolist() == [2, 3, -100, -100, -100]
    assert pack.documents() == rows


def test_every_column_comes_from_itself_and_an_exact_fit_is_kept() -> None:
    rows = [{"input_ids": [41, 42, 43], "labels": [-100, 43, 44]}, {"input_ids": [46, 47], "labels": [47, 48]}]
    pack = build_pack(rows, format=Sft(), capacity=5)
    assert pack["input_ids"].tolist() == [41, 42, 43, 46, 47]
    assert pack["labels"].tolist() == [-100, 43, 44, 47, 48]


def test_each_column_is_padded_with_its_own_value() -> None:
    format = Sft(token_fields={"weights": Field(pad=-1.0), "experts": 7})
    row = {"input_ids": [1, 2], "labels": [2, 3], "weights": [0.5, 0.25], "experts": np.ones((2, 3), np.int16)}
    padded = build_pack([row], format=format, capacity=4).to_padded()
    assert {name: column.tolist() for name, column in padded.items() if name != "experts"} == {
        "input_ids": [1, 2, 0, 0],
        "labels": [2, 3, -100, -100],
        "weights": [0.5, 0.25, -1.0, -1.0],
        "document_ids": [0, 0, -1, -1],
        "position_ids": [0, 1, 0, 1],
    }
    assert padded["experts"].dtype == torch.int16
    assert padded["experts"].tolist() == [[1] * 3, [1] * 3, [7] * 3, [7] * 3]


def test_nested_tensors_share_their_offsets_with_the_boundaries() -> None:
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    pack = build_pack(rows, format=Sft(label_mode="tokens"), capacity=8)
    nested = pack.to_nested()
    assert all(one.offsets() is pack.cu_seqlens for one in nested.values())
    assert (pack.cu_seqlens.dtype, pack.cu_seqlens.tolist()) == (torch.int32, [0, 3, 5])
    total = nested["input_ids"] + nested["position_ids"]
    assert [one.tolist() for one in total.unbind()] == [[1, 3, 5], [4, 6]]


def test_a_pack_draws_itself() -> None:
    rows = [{"input_ids": [1] * 6}, {"input_ids": [1] * 2}]
    drawn = build_pack(rows, format=Sft(label_mode="tokens"), capacity=10).describe(width=10)
    assert drawn == "Sft pack: 8 of 10 tokens (80.0 %), 2 documents of 2 to 6\n|00000011..|"


def test_extra_fields_travel_or_raise() -> None:
    row = {"input_ids": [1, 2], "labels": [2, 3], "weight": 2.0, "source": "books"}
    pack = build_pack([row, row], format=Sft())
    assert pack.values == {"weight": [2.0, 2.0], "source": ["books", "books"]}
    with pytest.raises(ValueError, match="'weight' that the format does not know; name it in token_fields or"):
        build_pack([row], format=Sft(extra="raise"))
    declared = Sft(extra="raise", document_fields=("weight", "source"))
    assert build_pack([row], format=declared).documents() == [row]


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(["sft", "multimodal", "preference", "shared"]))
def test_documents_come_out_exactly_as_they_went_in(data: st.DataObject, name: str) -> None:
    format, rows = data.draw(rows_of(name))
    pack = build_pack(rows, format=format, capacity=200)
    assert same([dict(row) for row in pack.documents()], rows)
    assert pack.tokens == sum(format.length(row) for row in rows)
    again = pickle.loads(pickle.dumps(pack))
    assert same([dict(row) for row in again.documents()], rows)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(lists(1, 5), st.sampled_from(KINDS)), min_size=1, max_size=4))
def test_documents_of_different_kinds_lie_in_one_pack(drawn: list[tuple[list[int], str]]) -> None:
    rows = [{"input_ids": as_kind(values, kind)} for values, kind in drawn]
    pack = build_pack(rows, format=Sft(label_mode="tokens"))
    assert same([dict(row) for row in pack.documents()], rows)
    assert pack["input_ids"].tolist() == [value for values, _ in drawn for value in values]
    assert pack.position_ids.tolist() == [place for values, _ in drawn for place in range(len(values))]
    assert pack.document_ids.tolist() == [i for i, (values, _) in enumerate(drawn) for _ in values]
    assert pack.cu_seqlens.dtype == torch.int32
    assert all(stop > start for start, stop in pairwise(pack.cu_seqlens.tolist()))


def test_cutting_keeps_fields_together() -> None:
    format = Sft(label_mode="tokens", token_fields={"weights": 0.0})
    row = {"input_ids": [1, 2, 3, 4, 5], "weights": [1, 2, 3, 4, 5], "prompt_length": 3, "source": "books"}
    assert format.cut(row, 2, 5) == {
        "input_ids": [3, 4, 5],
        "weights": [3, 4, 5],
        "prompt_length": 1,
        "source": "books",
    }
    assert [piece["input_ids"] for piece in split_row(format, row, 2)] == [[1, 2], [3, 4], [5]]
    assert truncate_row(format, row, 2)["input_ids"] == [1, 2]
    assert truncate_row(format, row, 2, side="left")["input_ids"] == [4, 5]
    assert truncate_row(format, row, 5) is row
    with pytest.raises(ValueError, match="'turns' has as many values as the document has tokens, 5, so how to cut it"):
        format.cut({**row, "turns": [0] * 5}, 0, 2)


@settings(deadline=None, max_examples=40)
@given(lists(1, 30), st.integers(1, 12))
def test_pieces_hold_every_token_once_and_none_is_too_long(tokens: list[int], capacity: int) -> None:
    pieces = split_row(Sft(), {"input_ids": tokens, "labels": tokens}, capacity)
    assert [token for piece in pieces for token in piece["labels"]] == tokens
    assert all(0 < len(piece["input_ids"]) <= capacity for piece in pieces)


def test_mistakes_are_named() -> None:
    def build(*rows: dict, **options: object) -> None:
        build_pack(list(rows), format=Sft(**options))

    with pytest.raises(ValueError, match="there are no documents"):
        build()
    with pytest.raises(ValueError, match="document 1 of the pack has no tokens; drop empty documents"):
        build({"input_ids": [1], "labels": [1]}, {"input_ids": [], "labels": []})
    with pytest.raises(ValueError, match=r"documents have no 'input_ids' but \['text'\]"):
        build({"text": "a"})
    with pytest.raises(ValueError, match=r"documents have no 'labels'; give labels .* or Sft\(label_mode='tokens'\)"):
        build({"input_ids": [1]})
    with pytest.raises(ValueError, match="document 1 of the pack and document 0 do not have the same fields: weight"):
        build({"input_ids": [1], "labels": [1]}, {"input_ids": [1], "labels": [1], "weight": 1})
    with pytest.raises(ValueError, match="document 0 of the pack has 1 values of 'labels' for 2 of 'input_ids'"):
        build({"input_ids": [1, 2], "labels": [1]})
    with pytest.raises(ValueError, match="field 'input_ids' cannot be stored as int64"):
        build({"input_ids": [0.5], "labels": [1]})
    with pytest.raises(ValueError, match=r"'turns' is one name where several are taken; write \('turns',\)"):
        build({"input_ids": [1], "labels": [1]}, masks="turns")
    with pytest.raises(KeyError, match="no column 'loss_mask' but input_ids, labels"):
        build_pack([{"input_ids": [1], "labels": [1]}], format=Sft())["loss_mask"]


def test_a_column_is_wide_enough_for_what_pads_it() -> None:
    format = Sft(label_mode="tokens", token_fields={"weight": 0.5, "kind": Field(-1)})
    rows = [{"input_ids": [1, 2], "weight": [1, 2], "kind": np.array([3, 200], np.uint8)}]
    padded = build_pack(rows, format=format, capacity=3).to_padded()
    assert padded["weight"].tolist() == [1, 2, 0.5]
    assert padded["kind"].tolist() == [3, 200, -1]
    flags = [{"input_ids": [1, 2], "kind": [True, False], "weight": [1, 1]}]
    assert build_pack(flags, format=format, capacity=3).to_padded()["kind"].tolist() == [1, 0, -1]


@pytest.mark.parametrize(
    ("pad", "dtype", "message"),
    [
        (0.5, "int64", r"pad is 0\.5, which int64 cannot hold"),
        (-100, "bool", "pad is -100, which bool cannot hold"),
        (float("inf"), "int64", "pad is inf, which int64 cannot hold"),
        (1e9, "float16", r"pad is 1000000000\.0, which float16 cannot hold"),
        (0, "foo", "dtype is 'foo'; give a name that NumPy knows"),
    ],
)
def test_a_field_s_dtype_holds_what_pads_it(pad: float, dtype: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Field(pad, dtype=dtype)


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        (Field(0, dtype="int8"), [300, 2], "field 'kind' cannot be stored as int8: 300 is not from -128 to 127"),
        (Field(0, dtype="int64"), np.array([2**63 + 5, 1], np.uint64), "as int64: 9223372036854775813 is not from"),
        (Field(-1), np.array([2**63 + 5, 1], np.uint64), "'kind' cannot be stored: no dtype holds uint64 and the pad"),
    ],
)
def test_no_value_comes_out_as_another(field: Field, values: object, message: str) -> None:
    format = Sft(label_mode="tokens", token_fields={"kind": field})
    with pytest.raises(ValueError, match=message):
        build_pack([{"input_ids": [1, 2], "kind": values}], format=format)


def test_a_tokenizer_s_mask_is_cut_with_its_tokens_and_padding_is_refused() -> None:
    format = Sft(label_mode="tokens")
    row = {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}
    pack = build_pack([row], format=format)
    assert (pack["labels"].tolist(), pack.documents()) == ([6, 7, -100], [row])
    assert truncate_row(format, row, 2) == {"input_ids": [5, 6], "attention_mask": [1, 1]}
    padded = {"input_ids": [8, 0], "attention_mask": [1, 0]}
    with pytest.raises(ValueError, match="document 1 of the pack has padding, 'attention_mask' is 0 there"):
        build_pack([row, padded], format=format)


def test_values_that_numpy_does_not_have_come_out_as_they_went_in() -> None:
    format = Sft(label_mode="tokens", token_fields={"weight": 0.0})
    weight = torch.tensor([0.5, 3.0], dtype=torch.bfloat16)
    (row,) = build_pack([{"input_ids": range(1, 3), "weight": weight}], format=format).documents()
    assert row["input_ids"] == [1, 2]
    assert row["weight"].dtype == torch.bfloat16
    assert torch.equal(row["weight"], weight)
    with pytest.raises(ValueError, match="field 'weight' does not hold numbers that NumPy takes"):
        build_pack([{"input_ids": [1, 2], "weight": [[1.0], [1.0, 2.0]]}], format=format)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_tokens_are_one_row(make: type) -> None:
    with pytest.raises(ValueError, match=r"field 'input_ids' has shape \[1, 3\], and tokens are one row"):
        build_pack([{"input_ids": make([[1, 2, 3]])}], format=Sft(label_mode="tokens"))
    with pytest.raises(ValueError, match=r"field 'input_ids' has shape \[1, 2\]"):
        build_pack([{"prompt_ids": make([[1, 2]]), "completion_ids": [[[3, 4]]]}], format=SharedPrompt())


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_completions_of_one_length_may_be_one_array(make: type) -> None:
    row = {"prompt_ids": [1], "completion_ids": make([[2, 3], [4, 5]]), "advantages": make([1.0, -1.0])}
    assert build_pack([row], format=SharedPrompt())["input_ids"].tolist() == [1, 2, 3, 4, 5]


def test_numbers_of_completions_are_given_in_one_way() -> None:
    each, all_tokens = [1.0, 2.0], [[1.0], [2.0, 3.0]]
    rows = [{"prompt_ids": [1], "completion_ids": [[2], [3, 4]], "advantages": one} for one in (each, all_tokens)]
    with pytest.raises(ValueError, match="'advantages' has one number for each completion in one document"):
        build_pack(rows, format=SharedPrompt())
    packs = [build_pack([row], format=SharedPrompt(), capacity=6) for row in rows]
    with pytest.raises(ValueError, match="do not have the same fields: advantages with a value per token in one"):
        PackCollator("dense")(packs)

"""What TRL's tests ask of its `pack_dataset` and collator, asked of ours; the inputs are made here.

TRL's tests are not in its wheel, so what they assert is derived anew, and its own function is the oracle. What does not
apply: documents without tokens vanish there and are an error here; `bfd` cuts what is too long without being asked,
here that is `overlong="truncate"`; columns that are no lists per token are refused there and travel here.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_core.errors import PackError
from pack_torch.trainer import TrainerCollator, pack_batches
from torch import nn
from trl.data_utils import pack_dataset as trl_pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

datasets.disable_progress_bars()

#: Ours for TRL's strategy of a name.
OURS = {
    "bfd": {"strategy": "best_fit_decreasing", "overlong": "truncate"},
    "bfd_split": {"strategy": "best_fit_decreasing", "overlong": "split"},
    "wrapped": {"strategy": "concat_split", "overlong": "split"},
}


def dataset_of(texts: list[list[int]], **columns: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"input_ids": texts, **columns})


def documents(row: dict[str, Any]) -> list[tuple[int, ...]]:
    """The documents of a packed row."""
    bounds = pairwise(accumulate(row["seq_lengths"], initial=0))
    return [tuple(row["input_ids"][start:stop]) for start, stop in bounds]


def test_best_fit_decreasing_by_hand() -> None:
    texts = [[1, 2], [3, 4, 5], [6], [7, 8, 9, 10]]
    packed = pack_batches(dataset_of(texts, mask=[[1] * len(one) for one in texts]), 4)
    assert packed[:] == {
        "input_ids": [[7, 8, 9, 10], [3, 4, 5, 6], [1, 2]],
        "mask": [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1]],
        "seq_lengths": [[4], [3, 1], [2]],
    }


def test_longer_documents_by_hand() -> None:
    texts = [[1, 2, 3, 4, 5], [6, 7]]
    with pytest.raises(PackError, match="has 5 tokens but capacity"):
        pack_batches(dataset_of(texts), 4)
    found = {over: pack_batches(dataset_of(texts), 4, overlong=over)[:] for over in ("drop", "truncate", "split")}
    assert found["drop"] == {"input_ids": [[6, 7]], "seq_lengths": [[2]]}
    assert found["truncate"] == {"input_ids": [[1, 2, 3, 4], [6, 7]], "seq_lengths": [[4], [2]]}
    assert found["split"] == {"input_ids": [[1, 2, 3, 4], [6, 7, 5]], "seq_lengths": [[4], [2, 1]]}


def test_wrapped_rows_by_hand() -> None:
    texts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    ours = pack_batches(dataset_of(texts), 4, **OURS["wrapped"])[:]
    assert ours["input_ids"] == [[1, 2, 3, 4], [5, 6, 7, 8], [9]]
    assert ours["seq_lengths"] == [[3, 1], [4], [1]]
    assert trl_pack_dataset(dataset_of(texts), 4, strategy="wrapped")[:] == {"input_ids": ours["input_ids"]}


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=14), capacity=st.integers(3, 12))
@pytest.mark.parametrize("name", ["bfd", "bfd_split"])
def test_rows_are_as_many_and_hold_what_trls_hold(name: str, lengths: list[int], capacity: int) -> None:
    ends = list(accumulate(lengths, initial=0))
    texts = [list(range(start, stop)) for start, stop in pairwise(ends)]
    ours = pack_batches(dataset_of(texts, copy=texts), capacity, **OURS[name])
    theirs = trl_pack_dataset(dataset_of(texts), capacity, strategy=name)
    assert len(ours) == len(theirs)
    assert max(map(len, ours["input_ids"])) <= capacity
    assert ours["copy"] == ours["input_ids"]
    held, expected = (Counter(one for row in each for one in documents(row)) for each in (ours, theirs))
    assert held == expected
    if name == "bfd_split":
        assert sorted(token for row in ours["input_ids"] for token in row) == list(range(ends[-1]))


def test_a_format_set_before_is_kept() -> None:
    data = dataset_of([[1, 2], [3]]).with_format("torch")
    row = pack_batches(data, 4)[0]
    assert row["input_ids"].tolist() == [1, 2, 3]
    assert row["seq_lengths"].tolist() == [2, 1]


def test_streaming_datasets_and_dictionaries_of_them_are_packed_too() -> None:
    data = dataset_of([[1, 2], [3], [4, 5, 6]])
    streamed = pack_batches(data.to_iterable_dataset(), 4, map_kwargs={"batch_size": 2})
    assert list(streamed) == [
        {"input_ids": [1, 2, 3], "seq_lengths": [2, 1]},
        {"input_ids": [4, 5, 6], "seq_lengths": [3]},
    ]
    both = pack_batches(datasets.DatasetDict(train=data, test=data), 4)
    assert both["test"]["input_ids"] == [[4, 5, 6, 3], [1, 2]]


def test_what_belongs_to_documents_travels_where_trl_refuses_it() -> None:
    columns = {"weight": [0.5, 2.0], "source": ["web", "book"], "tags": [[7], [8, 9]]}
    data = dataset_of([[1], [2, 3]], **columns)
    packed = pack_batches(data, 4, document_fields=["tags"])[:]
    assert packed == {
        "input_ids": [[2, 3, 1]],
        "weight": [[2.0, 0.5]],
        "source": [["book", "web"]],
        "tags": [[[8, 9], [7]]],
        "seq_lengths": [[2, 1]],
    }
    with pytest.raises(Exception, match="list"):
        trl_pack_dataset(data, 4)
    with pytest.raises(ValueError, match="document 0 of a batch has 2 tokens but 1 values of 'mask'"):
        pack_batches(dataset_of([[1, 2]], mask=[[1]]), 4)


def test_documents_without_tokens_are_an_error_where_trl_leaves_them_out() -> None:
    data = dataset_of([[1, 2], [], [3]])
    assert trl_pack_dataset(data, 4, strategy="bfd")[:]["seq_lengths"] == [[2, 1]]
    with pytest.raises(ValueError, match="document 1 of a batch has no tokens; filter empty documents out"):
        pack_batches(data, 4)


def test_the_collator_gives_what_trls_gives_without_padding() -> None:
    class Flash(nn.Module):
        config = type("Config", (), {"_attn_implementation": "flash_attention_2"})()

        def forward(self, input_ids: Any, position_ids: Any, labels: Any = None, **told: Any) -> None: ...

    rows = [
        {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, 3, -100, 5], "seq_lengths": [3, 2]},
        {"input_ids": [6, 7], "labels": [-100, 7], "seq_lengths": [2]},
    ]
    theirs = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows)
    ours = TrainerCollator(Flash())(rows)
    assert {*theirs} - {*ours} == {"seq_idx"}
    for name, value in ours.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[name])), name


def test_trls_rows_go_through_our_collator() -> None:
    class Masked(nn.Module):
        config = type("Config", (), {"_attn_implementation": "sdpa"})()

        def forward(self, input_ids: Any, position_ids: Any, attention_mask: Any, labels: Any = None) -> None: ...

    packed = trl_pack_dataset(dataset_of([[1, 2], [3, 4, 5], [6]]), 4, strategy="bfd")
    inputs = TrainerCollator(Masked(), capacity=4)([packed[0], packed[1]])
    assert inputs["input_ids"].tolist() == [[3, 4, 5, 6], [1, 2, 0, 0]]
    assert inputs["labels"].tolist() == [[-100, 4, 5, -100], [-100, 2, -100, -100]]
    assert inputs["position_ids"][0].tolist() == [0, 1, 2, 0]
    assert inputs["attention_mask"][0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]

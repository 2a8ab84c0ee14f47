"""The packed row: hand-worked layout, identity of samples, and every input that is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pack_torch import PackedBatch, Rollout, build_batch


def row(*lengths: int) -> PackedBatch:
    return PackedBatch(torch.arange(sum(lengths)), lengths)


def test_three_documents_laid_out_by_hand() -> None:
    batch = PackedBatch(torch.tensor([7, 8, 9, 7, 5, 6, 5, 6]), (3, 1, 4))

    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert batch.document_ids.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 8]
    assert batch.max_seqlen == 4
    assert (batch.tokens, batch.documents) == (8, 3)
    assert batch.position_ids.dtype == batch.document_ids.dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int32
    assert type(batch.max_seqlen) is int


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_everything_derived_follows_from_a_walk_over_the_documents(lengths: list[int]) -> None:
    batch = row(*lengths)
    walked = [(document, position) for document, length in enumerate(lengths) for position in range(length)]

    assert list(zip(batch.document_ids.tolist(), batch.position_ids.tolist(), strict=True)) == walked
    assert batch.cu_seqlens.diff().tolist() == lengths
    assert int(batch.cu_seqlens[0]) == 0
    assert batch.max_seqlen == max(lengths)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=10))
def test_documents_sorted_by_length_keep_their_rows_and_find_back(lengths: list[int]) -> None:
    batch = row(*lengths)
    order = batch.length_order
    rows = torch.arange(batch.tokens) if order.rows is None else order.rows
    inverse = torch.arange(batch.tokens) if order.inverse is None else order.inverse

    starts = [sum(lengths[:document]) for document in range(len(lengths))]
    documents = sorted(range(len(lengths)), key=lambda document: (lengths[document], document))
    assert rows.tolist() == [starts[d] + place for d in documents for place in range(lengths[d])]
    assert rows[inverse].tolist() == list(range(batch.tokens))
    assert [length for count, length in order.groups for _ in range(count)] == sorted(lengths)
    assert len({length for _, length in order.groups}) == len(order.groups)


@pytest.mark.parametrize(
    "lengths",
    [
        [200, 100],
        torch.tensor([200, 100], dtype=torch.uint8),
        torch.tensor([200, 100], dtype=torch.int64),
        np.array([200, 100], dtype=np.uint8),
        np.array([200, 100], dtype=np.int32),
    ],
)
def test_lengths_of_any_width_count_without_overflow(lengths: Any) -> None:
    batch = PackedBatch(torch.zeros(300, dtype=torch.int64), lengths)

    assert batch.doc_lens == (200, 100)
    assert batch.cu_seqlens.tolist() == [0, 200, 300]
    assert all(type(length) is int for length in batch.doc_lens)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((3, 0, 2), "document 1 has 0 tokens"),
        ((6, -1), "document 1 has -1 tokens"),
        ((3, 1), "sum to 4 but the row has 5 tokens.*padding is not allowed"),
        ((3, 3), "sum to 6 but the row has 5 tokens"),
        ((), "doc_lens is empty"),
    ],
)
def test_lengths_that_are_not_the_row_are_refused(lengths: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedBatch(torch.arange(5), lengths)


def test_fractional_lengths_and_narrow_ids_are_refused() -> None:
    with pytest.raises(TypeError):
        PackedBatch(torch.arange(5), (2.5, 2.5))
    with pytest.raises(ValueError, match=r"input_ids are torch\.int32"):
        PackedBatch(torch.arange(5, dtype=torch.int32), (5,))
    with pytest.raises(ValueError, match=r"shape \[1, 5\]"):
        PackedBatch(torch.arange(5).unsqueeze(0), (5,))


def test_routes_need_one_row_per_token() -> None:
    with pytest.raises(ValueError, match=r"routes have shape \[4, 2, 2\] but must be \[5, layers, top_k\]"):
        PackedBatch(torch.arange(5), (5,), routes=torch.zeros(4, 2, 2, dtype=torch.int32))


def make() -> list[Rollout]:
    return [
        Rollout("a", [1, 2, 3], 2, loss_mask=[1, 0], advantages=[0.5, 0.25], reward=1.0, weight_versions=["3"]),
        Rollout("b", [4, 5], 1, advantages=[-1.0], reward=0.0, weight_versions=["3", "4"]),
        Rollout("c", [6, 7, 8, 9], 0, advantages=[]),
    ]


def test_a_pack_carries_its_samples_by_identity_in_its_own_order() -> None:
    rollouts = make()

    batch = build_batch(rollouts, [2, 0, 1])

    assert batch.input_ids.tolist() == [6, 7, 8, 9, 1, 2, 3, 4, 5]
    assert batch.doc_lens == (4, 3, 2)
    assert all(found is wanted for found, wanted in zip(batch.rollouts, (rollouts[2], *rollouts[:2]), strict=True))
    assert batch.response_lens == (0, 2, 1)
    assert batch.concat("advantages").tolist() == [0.5, 0.25, -1.0]
    assert batch.concat("loss_mask").tolist() == [True, False, True]
    assert [rollout.weight_versions for rollout in batch.rollouts] == [(), ("3",), ("3", "4")]
    assert batch.routes is None


def test_what_runs_over_responses_comes_apart_by_sample() -> None:
    batch = build_batch(make(), [2, 0, 1])

    assert [part.tolist() for part in batch.split(torch.tensor([10.0, 11.0, 12.0]))] == [[], [10.0, 11.0], [12.0]]
    with pytest.raises(ValueError, match=r"shape \[4\] but the samples have 3 response tokens"):
        batch.split(torch.zeros(4))


def test_a_field_that_a_sample_lacks_is_named_with_it() -> None:
    rollouts = make()
    rollouts[0] = attrs.evolve(rollouts[0], ref_log_probs=[0.0, 0.0])
    batch = build_batch(rollouts, [0, 1])

    with pytest.raises(ValueError, match="sample 'b' has no ref_log_probs"):
        batch.concat("ref_log_probs")
    with pytest.raises(ValueError, match="'reward' is not a field with one value per response token"):
        batch.concat("reward")


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_batch_travels_without_what_it_derived(make: Callable[[PackedBatch], PackedBatch]) -> None:
    batch = build_batch([Rollout("a", [1, 2, 3], 2), Rollout("b", [4, 5], 1)], [1, 0])
    size = len(pickle.dumps(batch))
    mask, starts = batch.dense_mask(), batch.cu_seqlens
    batch.block_mask()
    again = make(batch)
    assert len(pickle.dumps(batch)) == size
    assert (again.input_ids.tolist(), again.doc_lens, [one.length for one in again.rollouts]) == (
        [4, 5, 1, 2, 3],
        (2, 3),
        [2, 3],
    )
    assert torch.equal(again.dense_mask(), mask)
    assert torch.equal(again.cu_seqlens, starts)


def test_a_row_of_bare_tokens_has_no_responses() -> None:
    with pytest.raises(ValueError, match="has no rollouts"):
        _ = row(2, 3).response_lens


@pytest.mark.parametrize(
    ("pack", "message"),
    [([], "empty"), ([0, 3], "names sample 3 of 3"), ([-1], "names sample -1"), ([1, 1], "names a sample twice")],
)
def test_a_pack_of_another_plan_is_refused(pack: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_batch(make(), pack)


def test_rollouts_that_are_not_the_documents_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rollouts have lengths \[3, 2, 4\] but doc_lens are \[3, 4, 2\]"):
        PackedBatch(torch.arange(9), (3, 4, 2), rollouts=make())


def test_a_rollout_fills_in_its_mask_and_counts_its_tokens() -> None:
    rollout = Rollout(7, np.array([1, 2, 3, 4], dtype=np.uint8), 3)

    assert rollout.tokens.dtype == torch.int64
    assert rollout.loss_mask.tolist() == [True] * 3
    assert (rollout.length, rollout.prompt_length, rollout.active_tokens) == (4, 1, 3)
    assert Rollout(8, [1, 2], 0).loss_mask.shape == (0,)


def test_a_rollout_is_made_again_of_its_fields() -> None:
    rollout = Rollout("a", [1, 2, 3], 2, advantages=[0.5, 0.25])
    for again in (Rollout(**attrs.asdict(rollout, recurse=False)), pickle.loads(pickle.dumps(rollout))):
        assert (again.length, again.prompt_length, again.tokens.tolist()) == (3, 1, [1, 2, 3])


def test_evolving_adds_fields_and_keeps_the_rest() -> None:
    rollout = make()[0]

    scored = attrs.evolve(rollout, old_log_probs=torch.tensor([-1.0, -2.0]))

    assert scored.old_log_probs.tolist() == [-1.0, -2.0]
    assert scored.tokens is rollout.tokens
    assert scored.loss_mask is rollout.loss_mask
    assert rollout.old_log_probs is None


def test_python_numbers_keep_all_their_digits() -> None:
    assert float(Rollout("a", [1, 2], 1, advantages=[0.1]).advantages[0]) == 0.1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_length": 4}, "'q1': response_length is 4 of 4 tokens but must be 0 to 3.*at least one token"),
        ({"response_length": -1}, "'q1': response_length is -1"),
        ({"tokens": []}, "'q1': tokens have shape .0."),
        ({"tokens": [[1, 2]]}, "'q1': tokens have shape .1, 2."),
        ({"tokens": [0.5, 1.0]}, "must be integers"),
        ({"loss_mask": [1, 1, 1]}, r"'q1': loss_mask has shape \[3\] but the response has 2"),
        ({"loss_mask": [1, 2]}, "'q1': loss_mask has values other than 0 and 1"),
        ({"advantages": [1.0]}, r"'q1': advantages has shape \[1\] but the response has 2"),
        ({"old_log_probs": [[1.0, 2.0]]}, "'q1': old_log_probs has shape"),
        ({"weight_versions": "12"}, "weight_versions is the text '12'"),
    ],
)
def test_a_rollout_that_contradicts_itself_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rollout(**{"id": "q1", "tokens": [1, 2, 3, 4], "response_length": 2} | fields)


def test_moving_to_the_device_it_is_on_changes_nothing_and_elsewhere_moves_all() -> None:
    batch = PackedBatch(torch.tensor([1, 2, 3]), (2, 1), routes=torch.zeros(3, 1, 1, dtype=torch.int64))
    assert batch.to("cpu") is batch
    moved = batch.to("meta")
    assert (moved.input_ids.device.type, moved.routes.device.type, moved.doc_lens) == ("meta", "meta", (2, 1))

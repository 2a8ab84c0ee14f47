"""MILES' rollout data of a rank as packed rows, by hand-worked rows."""

from typing import Any

import numpy
import pytest
import torch
from pack_miles.miles.steps import combine, packed_steps, replay_tables, sample_rows
from pack_miles.training.collectives import World
from pack_miles.training.column import ColumnOptions

ALONE = World(rank=0, size=1)


def rollout_data(lengths: list[int], responses: list[int], **more: Any) -> dict[str, Any]:
    """A rank's data, token ids 100 * sample + place, as an actor gets it."""
    return {
        "tokens": [100 * place + torch.arange(length) for place, length in enumerate(lengths)],
        "total_lengths": list(lengths),
        "response_lengths": list(responses),
        "loss_masks": [torch.ones(response, dtype=torch.int32) for response in responses],
        "rewards": [float(place) for place in range(len(lengths))],
        "sample_indices": list(range(len(lengths))),
        "weight_versions": [[str(place)] for place in range(len(lengths))],
        **more,
    }


def options(capacity: int, step: int, equalize: str = "samples") -> ColumnOptions:
    return ColumnOptions(step_samples=step, capacity=capacity, equalize=equalize, max_documents=None)


def test_two_samples_in_a_row_by_hand() -> None:
    ((row,),) = packed_steps(rollout_data([5, 8], [3, 5]), options(16, 2), ALONE, max_length=8)
    assert row["tokens"].tolist() == [[0, 1, 2, 3, 4, 100, 101, 102, 103, 104, 105, 106, 107]]
    assert row["doc_lens"].tolist() == [[5, 8]]
    assert row["doc_lens"].dtype == torch.int32
    assert row["max_doc_lens"] == [8]
    assert row["weight_versions"] == [["0"], ["1"]]
    assert row["rewards"] == [0.0, 1.0]
    assert row["total_lengths"] == [5, 8]
    assert row["response_lengths"] == [3, 5]
    assert [len(mask) for mask in row["loss_masks"]] == [3, 5]
    assert [tokens.tolist() for tokens in row["unconcat_tokens"]] == [list(range(5)), list(range(100, 108))]
    assert row["max_seq_lens"] is None


class Beside(World):
    """One of two ranks; the other packs its samples into two rows and fails at nothing."""

    def largest(self, values: Any) -> list[int]:
        return [int(one) if isinstance(one, bool) else max(int(one), 2) for one in values]


@pytest.mark.parametrize(("rank", "lengths"), [(0, [17, 19, 23, 29]), (1, [87, 13, 89, 11])])
def test_both_ranks_have_as_many_rows(rank: int, lengths: list[int]) -> None:
    # Rank 0 needs one row of 128 tokens, rank 1 two; both run [0, 1] and [2, 3].
    (rows,) = packed_steps(rollout_data(lengths, [2] * 4), options(128, 4), Beside(rank=rank, size=1), max_length=128)
    assert [row["sample_indices"] for row in rows] == [[0, 1], [2, 3]]
    assert [row["total_lengths"] for row in rows] == [lengths[:2], lengths[2:]]


def test_rows_never_cross_an_optimizer_step() -> None:
    steps = packed_steps(rollout_data([4, 4, 4, 4], [1] * 4), options(100, 2), ALONE, max_length=8)
    assert [[row["sample_indices"] for row in rows] for rows in steps] == [[[0, 1]], [[2, 3]]]


def test_lists_of_the_whole_rollout_are_left_out_however_long() -> None:
    data = rollout_data([5, 8], [3, 5], raw_reward=[7.0, 8.0], num_rollouts=[1, 1], prompt_group_sizes=[1, 1])
    ((row,),) = packed_steps(data, options(16, 2), ALONE, max_length=8)
    assert not row.keys() & {"raw_reward", "num_rollouts", "prompt_group_sizes"}


def test_what_belongs_to_the_step_and_what_miles_holds_in_a_tensor_come_along() -> None:
    data = rollout_data([5, 8], [3, 5], dynamic_global_batch_size=2, rollout_mask_sums=torch.tensor([3.0, 5.0]))
    ((row,),) = packed_steps(data, options(16, 2), ALONE, max_length=8)
    assert row["dynamic_global_batch_size"] == 2
    assert row["rollout_mask_sums"].tolist() == [3.0, 5.0]


def test_a_response_of_nothing_is_legal_and_a_prompt_of_nothing_is_not() -> None:
    (row,) = sample_rows(rollout_data([2], [0]), max_length=8)
    assert row["response_lengths"] == [0]
    with pytest.raises(ValueError, match="sample 0 has 2 response tokens of 2"):
        sample_rows(rollout_data([2], [2]), max_length=8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": []}, r"has \d of|no samples"),
        ({"total_lengths": [5, 9]}, r"sample 1 has tokens \[8\] but a total length of 9"),
        ({"tokens": [torch.arange(5), torch.zeros(1, 8)]}, "sample 1 has tokens"),
        ({"tokens": [torch.arange(5), [1] * 8]}, "sample 1 has tokens list"),
        ({"loss_masks": [torch.ones(3), torch.ones(4)]}, "sample 1 has a loss mask of shape"),
        ({"loss_masks": [torch.ones(3), torch.full((5,), 2)]}, "sample 1 has a loss mask"),
        ({"loss_masks": None}, "no list of loss_masks"),
        ({"advantages": [torch.ones(3)]}, "1 of advantages but 2 samples"),
        ({"response_lengths": [3, -1]}, "sample 1 has -1 response tokens"),
    ],
)
def test_data_that_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample_rows({**rollout_data([5, 8], [3, 5]), **changed}, max_length=8)


def test_a_sample_over_the_limit_is_named() -> None:
    with pytest.raises(ValueError, match=r"sample 1 has 5 response tokens of 8, and at most 7"):
        sample_rows(rollout_data([5, 8], [3, 5]), max_length=7)


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_field_that_one_sample_lacks_is_refused_whoever_lacks_it(lacking: int) -> None:
    rows = sample_rows(rollout_data([5, 8], [3, 5]), max_length=8)
    del rows[lacking]["rewards"]
    with pytest.raises(ValueError, match=f"sample {1 - lacking} has rewards and sample {lacking}"):
        combine(rows)
    with pytest.raises(ValueError, match="no samples"):
        combine([])


def routes(length: int, first: int) -> numpy.ndarray:
    """Layer 0 dense and left unfilled, layer 1 with ids that count up from `first`."""
    table = numpy.full((length - 1, 2, 2), -1, dtype=numpy.int32)
    table[:, 1, 0] = [(first + row) % 4 for row in range(length - 1)]
    table[:, 1, 1] = (table[:, 1, 0] + 1) % 4
    return table


def test_every_document_has_its_own_final_row_of_replay() -> None:
    data = rollout_data([5, 8], [3, 5], rollout_routed_experts=[routes(5, 2), routes(8, 3)])
    ((row,),) = packed_steps(data, options(16, 2), ALONE, max_length=8)
    (table,) = replay_tables(row, experts=4, moe_layers=[1]).values()
    assert table.shape == (1, 13, 2)
    assert table.dtype == torch.int64
    assert table[0, 4].tolist() == table[0, 12].tolist() == [0, 1]
    assert table[0, 5].tolist() == [3, 0]
    assert table[0, :4].tolist() == [[2, 3], [3, 0], [0, 1], [1, 2]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "no routes but 2 documents"),
        ([routes(5, 2), None], "sample 1 has no routes"),
        ([routes(5, 2), routes(9, 3)], "per sample"),
        ([routes(5, 2), numpy.where(routes(8, 3) == 2, 4, routes(8, 3))], "sample 1: row 2 of layer 1.*expert 4"),
        ([routes(5, 2), numpy.where(routes(8, 3) == 2, -1, routes(8, 3))], "sample 1: row 2 of layer 1.*expert -1"),
    ],
)
def test_routes_that_cannot_be_replayed_are_refused_by_sample(given: Any, message: str) -> None:
    more = {} if given is None else {"rollout_routed_experts": given}
    ((row,),) = packed_steps(rollout_data([5, 8], [3, 5], **more), options(16, 2), ALONE, max_length=8)
    with pytest.raises(ValueError, match=message):
        replay_tables(row, experts=4, moe_layers=[1])


def test_a_layer_that_was_not_recorded_is_refused() -> None:
    data = rollout_data([5, 8], [3, 5], rollout_routed_experts=[routes(5, 2), routes(8, 3)])
    ((row,),) = packed_steps(data, options(16, 2), ALONE, max_length=8)
    with pytest.raises(ValueError, match="layer 2 routes but routes of 2 layers"):
        replay_tables(row, experts=4, moe_layers=[1, 2])

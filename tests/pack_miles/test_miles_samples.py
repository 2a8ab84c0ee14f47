"""MILES' samples, hand-made, as rows, rollouts and what a plan needs."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from pack_core import Sample
from pack_miles import RolloutRow, read_rows, write_rows
from pack_miles.errors import InputError
from pack_miles.miles.samples import read_debug_rollouts, to_rollout, to_row, to_sample
from support.miles_collections import HandMade

ROUTES = numpy.array([[[-1, -1], [0, 3]], [[-1, -1], [3, 1]], [[-1, -1], [2, 0]]], dtype=numpy.int32)


def made(**changed: Any) -> HandMade:
    fields: dict[str, Any] = {
        "index": 5,
        "group_index": 1,
        "tokens": [10, 11, 12, 13],
        "response_length": 2,
        "reward": 0.5,
        "loss_mask": [1, 0],
        "weight_versions": ["3", "4"],
        "rollout_log_probs": [-0.5, -1.5],
        "rollout_routed_experts": ROUTES,
    }
    return HandMade(**{**fields, **changed})


def test_a_sample_is_its_row() -> None:
    assert to_row(made()) == RolloutRow(
        tokens=[10, 11, 12, 13],
        response_length=2,
        loss_mask=[1, 0],
        rollout_log_probs=[-0.5, -1.5],
        rollout_routed_experts=[[[-1, -1], [0, 3]], [[-1, -1], [3, 1]], [[-1, -1], [2, 0]]],
        reward=0.5,
        index=5,
        group_index=1,
        weight_versions=["3", "4"],
    )
    assert to_row(vars(made())) == to_row(made())
    assert to_sample(made()) == Sample(5, 4, 1)


def test_a_sample_is_its_rollout() -> None:
    rollout = to_rollout(made())
    assert (rollout.id, rollout.group, rollout.reward, rollout.weight_versions) == (5, 1, 0.5, ("3", "4"))
    assert rollout.tokens.tolist() == [10, 11, 12, 13]
    assert rollout.loss_mask.tolist() == [True, False]
    assert rollout.rollout_log_probs.tolist() == [-0.5, -1.5]
    assert torch.equal(rollout.routes, torch.from_numpy(ROUTES))


def test_what_a_sample_leaves_out_stays_out() -> None:
    bare = HandMade(index=0, group_index=None, tokens=[1, 2], response_length=1, reward=None)
    row = to_row(bare)
    assert (row.loss_mask, row.rollout_log_probs, row.rollout_routed_experts) == (None, None, None)
    assert (row.reward, row.group_index, row.weight_versions) == (None, None, None)
    assert to_rollout(bare).loss_mask.tolist() == [True]


def test_a_removed_sample_is_masked_from_end_to_end() -> None:
    assert to_row(made(remove_sample=True)).loss_mask == [0, 0]
    assert to_rollout(made(remove_sample=True)).active_tokens == 0


def test_one_of_several_rewards_is_chosen_by_key() -> None:
    sample = made(reward={"right": 1, "short": 0.25})
    assert to_row(sample, reward_key="short").reward == 0.25
    with pytest.raises(ValueError, match="sample 5 has the rewards 'right', 'short', and reward_key is None"):
        to_row(sample)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"index": None}, "place 9 has no index"),
        ({"index": "q1"}, "place 9 has index 'q1'"),
        ({"group_index": -1}, "sample 5 has group_index -1"),
        ({"tokens": []}, "sample 5 has no tokens"),
        ({"tokens": "text"}, "sample 5 has tokens that is a str"),
        ({"tokens": [1, 2.5, 3, 4]}, "sample 5.*2.5"),
        ({"tokens": [1, -2, 3, 4]}, r"sample 5 has tokens\[1\] = -2"),
        ({"response_length": 4}, "sample 5 has response_length 4"),
        ({"response_length": None}, "sample 5 has no response_length"),
        ({"loss_mask": [1]}, "sample 5 has 1 value of loss_mask"),
        ({"loss_mask": [1, 2]}, r"sample 5 has loss_mask\[1\] = 2"),
        ({"rollout_log_probs": [-1.0]}, "sample 5 has 1 value of rollout_log_probs"),
        ({"rollout_log_probs": [-1.0, float("nan")]}, "sample 5.*finite"),
        ({"rollout_log_probs": [-1.0, "a"]}, "sample 5 has a field of another type"),
        ({"reward": float("inf")}, "sample 5 has reward inf"),
        ({"reward": "good"}, "sample 5 has reward 'good'"),
        ({"rollout_routed_experts": ROUTES[1:]}, "sample 5 has routes of 2 tokens but needs 3"),
        ({"rollout_routed_experts": numpy.where(ROUTES == 2, -1, ROUTES)}, "row 2, layer 1: the row is partly missing"),
    ],
)
def test_what_is_wrong_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_row(made(**changed), 9)


def test_columns_of_dense_layers_may_hold_anything() -> None:
    routes = ROUTES.copy()
    routes[1, 0] = [7, -9]
    with pytest.raises(ValueError, match="row 1, layer 0"):
        to_row(made(rollout_routed_experts=routes))
    assert to_row(made(rollout_routed_experts=routes), dense_layers=[0]).rollout_routed_experts == routes.tolist()


def as_saved(sample: HandMade) -> dict[str, Any]:
    return {**vars(sample), "status": "completed", "metadata": {}, "spec_info": {"spec_verify_ct": 0}}


def test_a_saved_rollout_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "7.pt"
    torch.save({"rollout_id": 7, "metadata": {}, "samples": [as_saved(made()), as_saved(made(index=6))]}, path)
    assert read_debug_rollouts(path) == [to_row(made()), to_row(made(index=6))]


@pytest.mark.parametrize("name", ["7.jsonl", "7.jsonl.gz"])
def test_lines_of_samples_are_read_back(tmp_path: Path, name: str) -> None:
    rows = [as_saved(made(index=index, rollout_routed_experts=ROUTES.tolist(), reward={"a": 1.0})) for index in (5, 6)]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    read = read_debug_rollouts(tmp_path / name, reward_key="a")
    assert read == [to_row(made(index=index, reward=1.0)) for index in (5, 6)]


def test_what_was_read_can_be_written_as_a_rollouts_file(tmp_path: Path) -> None:
    torch.save({"rollout_id": 7, "samples": [as_saved(made())]}, tmp_path / "7.pt")
    rows = read_debug_rollouts(tmp_path / "7.pt")
    write_rows(tmp_path / "rows.jsonl.gz", rows)
    assert list(read_rows(tmp_path / "rows.jsonl.gz")) == rows


class Custom:
    """What a user's own metadata may hold."""


def test_a_saved_rollout_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"samples": [{**as_saved(made()), "metadata": {"mine": Custom()}}]}, tmp_path / "7.pt")
    with pytest.raises(InputError, match=r"7\.pt: holds more than plain values.*Custom"):
        read_debug_rollouts(tmp_path / "7.pt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no samples"),
        (b"{\n", r"7\.jsonl:1: not valid JSON"),
        (b"[1]\n", r"7\.jsonl:1: the line holds no object"),
        (b'{"index": 5, "tokens": [1, 2], "response_length": 2}\n', "sample 5 has response_length 2"),
        (b"PK\x03\x04 torn", "damaged"),
        (b"\x1f\x8b torn", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "7.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_debug_rollouts(tmp_path / "7.jsonl")


def test_a_saved_file_without_samples_is_refused(tmp_path: Path) -> None:
    torch.save({"rollout_id": 7}, tmp_path / "7.pt")
    with pytest.raises(InputError, match="no list of samples"):
        read_debug_rollouts(tmp_path / "7.pt")
    with pytest.raises(InputError, match="no such file"):
        read_debug_rollouts(tmp_path / "8.pt")

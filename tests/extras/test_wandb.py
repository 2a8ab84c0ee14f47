"""A run followed by the real client of W&B, offline: what it stores is read back from its file."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.miles_runs import events

#: Every metric of a run that plans expert load, under the name it has in W&B.
NAMES = """
    train/step train/step_seconds train/policy_objective train/grad_norm train/model_tokens train/active_response_tokens
    train/completed_steps train/rollout_id train/reward_mean
    train/packing/packs_per_rank train/packing/samples_per_pack train/packing/tokens_per_pack
    train/packing/rank0_peak_allocated_bytes train/packing/expert_dispatch_skew_mean
    train/packing/expert_dispatch_skew_max train/packing/fill_fraction train/packing/largest_pack
    train/packing/attention_token_work train/packing/attention_pair_work train/packing/critical_work_proxy
    train/packing/planning_seconds train/packing/score_seconds train/packing/train_seconds
"""


def stored(file: Path) -> list[Any]:
    """Return the records of W&B's own file: a header, then blocks of 32 KiB of checksum, length, type and data."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, records, parts = file.read_bytes(), 7, [], []
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts.append(data[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            record = Record()
            record.ParseFromString(b"".join(parts))
            records.append(record)
            parts = []
    return records


def history(records: list[Any]) -> list[dict[str, Any]]:
    return [
        {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


def test_every_update_is_stored_under_its_names_and_on_its_axis(followed: Path) -> None:
    (file,) = followed.glob("wandb/offline-run-*/run-*.wandb")
    records = stored(file)
    found = history(records)
    assert [row["train/step"] for row in found] == [0, 1, 2, 3]
    for row in found:
        assert {name for name in row if not name.startswith("_")} == set(NAMES.split())
    axes = {
        record.metric.name or record.metric.glob_name: record.metric for record in records if record.HasField("metric")
    }
    assert axes["train/*"].step_metric == "train/step"
    assert "train/step" in axes


def test_what_is_stored_is_what_the_events_say(followed: Path) -> None:
    (file,) = followed.glob("wandb/offline-run-*/run-*.wandb")
    for row in history(stored(file)):
        step = row["train/step"] + 1
        own = [
            next(
                event
                for event in events(followed, rank, "packing")
                if event["step"] == step and event["pass"] == "training"
            )
            for rank in range(4)
        ]
        packs = sum(event["packs"] for event in own)
        tokens = sum(event["model_tokens"] for event in own)
        assert row["train/packing/packs_per_rank"] == packs / 4
        assert row["train/packing/tokens_per_pack"] == pytest.approx(tokens / packs)
        assert row["train/packing/fill_fraction"] == pytest.approx(tokens / (packs * 64))
        assert row["train/packing/largest_pack"] == max(event["max_pack_tokens"] for event in own)
        (balance,) = [event for event in events(followed, 0, "expert_balance") if event["step"] == step]
        assert row["train/packing/expert_dispatch_skew_mean"] == balance["skew_mean"]
        assert row["train/packing/expert_dispatch_skew_max"] == balance["skew_max"]
        slowest = max(
            event["elapsed_seconds"]
            for rank in range(4)
            for event in events(followed, rank, "optimizer")
            if event["step"] == step
        )
        assert row["train/packing/train_seconds"] == row["train/step_seconds"] == slowest
        assert row["train/packing/rank0_peak_allocated_bytes"] == 0, "a CPU has no such memory"

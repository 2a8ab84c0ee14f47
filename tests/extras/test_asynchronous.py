"""Sampling while training, on a real Ray: a worker is killed, a run is resumed, and without lag nothing differs."""

import gzip
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from support.miles_config import write_toml
from support.miles_ranks import alive, children
from support.miles_runs import TINY, command, events, run, started, wait_for, weights

#: Workers that sample up to two collections ahead of two ranks, one optimizer step a collection.
AHEAD: dict[str, Any] = TINY | {
    "miles.fully_async": True,
    "miles.use_tis": True,
    "miles.global_batch_size": 16,
    "miles.num_rollout": 24,
    "core.max_policy_lag": 2,
    "run.engine": "ray",
    "run.rollout_workers": 2,
    "run.save_rollouts": True,
}

#: Two optimizer steps a collection and a lag of one: workers may not be ahead at all.
LEVEL = AHEAD | {
    "miles.global_batch_size": 8,
    "core.max_policy_lag": 1,
    "run.rollout_workers": 1,
    "model.dtype": "float64",
}


def workers_of(pid: int) -> list[int]:
    """Return the processes of the rollout workers."""
    found = [child for child in children(pid) if alive(child)]
    return sorted(c for c in found if Path(f"/proc/{c}/cmdline").read_bytes().startswith(b"ray::RolloutWorker"))


def rows(root: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the rows of every collection, read by json alone."""
    files = sorted((root / "rollouts").glob("*.jsonl.gz"))
    return {int(file.name[:6]): [json.loads(line) for line in gzip.open(file)] for file in files}


def collections(root: Path) -> int:
    file = root / "training_contract_rank0.jsonl"
    return file.read_bytes().count(b'"rollout_groups"') if file.exists() else 0


def test_a_killed_worker_loses_no_group_and_doubles_none_and_no_sample_is_too_old(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with started(command("train", str(write_toml(tmp_path, AHEAD)))) as process:
        victim = wait_for(lambda: workers_of(process.pid)[1:], "the workers")[0]
        wait_for(lambda: collections(out) >= 2, "the first collections")
        os.kill(victim, signal.SIGSTOP)  # it answers nothing, so that the group it is given next waits for it
        seen = -1
        while seen != (seen := collections(out)):
            time.sleep(3.0)
        assert seen < 24, "the run waits for the group"
        os.kill(victim, signal.SIGKILL)
        told, wrong = process.communicate(timeout=60)
        assert process.returncode == 0, wrong
    assert (
        "rollout workers: 97 prompt groups handed out, 96 answered (each once), 1 of them handed out again after "
        in told
    )
    assert "1 lost worker, 0 late answers discarded" in told
    audited = run("audit", str(out))
    assert audited.returncode == 0, audited.stdout

    brought = events(out, 0, "rollout_groups")
    origins = [origin for event in brought for origin in event["groups"]]
    assert [origin["group_index"] for origin in origins] == list(range(96))
    (twice,) = [origin for origin in origins if origin["attempts"] > 1]
    assert twice["attempts"] == 2
    assert brought[-1]["counts"] == {
        "issued": 97,
        "completed": 96,
        "reissued": 1,
        "lost": 1,
        "discarded": 0,
        "out": 0,
        "workers": 3,
        "lost_workers": 1,
    }

    collected = rows(out)
    assert [row["index"] for rollout_id in range(24) for row in collected[rollout_id]] == list(range(24 * 16))
    ages: Counter[int] = Counter()
    for rollout_id, own in collected.items():
        said = {origin["group_index"]: origin["version"] for origin in brought[rollout_id]["groups"]}
        for row in own:
            assert row["weight_versions"] == [str(said[row["group_index"]])]
            # One step a collection: collection c is trained after c steps.
            ages[rollout_id - int(row["weight_versions"][0])] += 1
            assert len(row["rollout_log_probs"]) == row["response_length"]
    assert set(ages) <= {0, 1, 2}
    assert ages[1] + ages[2] > 0, "workers ran ahead"
    for update in events(out, 0, "optimizer"):
        assert update["tis_clip_fraction"] is not None
        assert all(0 <= update["step"] - 1 - int(version) <= 2 for version in update["local_behavior_versions"])
    reported = run("report", str(out))
    assert "test, prompt groups: 96 trained, each once; 1 worker lost, 1 handed out again" in reported.stdout


def test_workers_that_may_not_be_ahead_give_the_synchronous_run_across_a_resume(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("apart", "together")}
    for folder in files.values():
        folder.mkdir()
    alike = {"miles.fully_async": False, "run.engine": "spawn", "miles.num_rollout": 4}
    write_toml(files["together"], LEVEL | alike)
    write_toml(files["apart"], LEVEL)
    assert run("train", str(files["together"] / "run.toml")).returncode == 0
    for count, resume in (("2", "false"), ("4", "true")):
        flags = ("--miles.num_rollout", count, "--run.resume", resume)
        told = run("train", str(files["apart"] / "run.toml"), *flags)
        assert told.returncode == 0, told.stderr
        assert "8 prompt groups handed out, 8 answered (each once), 0 of them" in told.stdout
    one, other = rows(files["apart"] / "out"), rows(files["together"] / "out")
    assert set(one) == set(other) == {0, 1, 2, 3}
    for rollout_id, own in one.items():
        for row, like in zip(own, other[rollout_id], strict=True):
            for field in ("tokens", "reward", "index", "group_index", "weight_versions", "rollout_routed_experts"):
                assert row[field] == like[field], (rollout_id, field)
    # A worker samples one group a row, a rank several: only the last bits of a matrix product may differ.
    for ours, theirs in zip(weights(files["apart"] / "out"), weights(files["together"] / "out"), strict=True):
        assert ours.keys() == theirs.keys()
        for name, values in ours.items():
            limit = 1e-9 * torch.clamp(theirs[name].abs(), min=1.0)
            assert ((values - theirs[name]).abs() <= limit).all(), name
    audited = run("audit", str(files["apart"] / "out"))
    assert audited.returncode == 0, audited.stdout

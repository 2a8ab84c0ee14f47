"""Whole runs of OLMo-core models as a user starts them: run files, models' files, and what a run leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from support.miles_config import write_toml
from support.miles_runs import command, environment, events, weights

#: Two collections of two optimizer steps; two ranks, which take seconds, most of them to import OLMo-core.
CORE: dict[str, Any] = {
    "model.format": "olmo_core",
    "model.source": "model.json",
    "model.dtype": "float64",
    "output.root": "out",
    "data.task": "sort",
    "core.sequence_packing": True,
    "core.packing_max_tokens": 48,
    "core.max_sequence_length": 32,
    "core.attention_backend": "segment",
    "core.activation_checkpointing": False,
    "core.max_policy_lag": 1,
    "miles.rollout_batch_size": 4,
    "miles.n_samples_per_prompt": 4,
    "miles.global_batch_size": 8,
    "miles.num_rollout": 2,
    "miles.rollout_max_response_len": 10,
    "miles.lr": 1e-3,
    "run.ranks": 2,
    "run.timeout_seconds": 60.0,
}

#: One sample a row, on Core's own attention, which is told of no documents.
APART: dict[str, Any] = {
    "core.sequence_packing": False,
    "core.packing_max_tokens": None,
    "core.attention_backend": "torch",
}

#: One rank with every expert, one sample a row.
ALONE: dict[str, Any] = {"run.ranks": 1, "core.expert_parallel_size": 1, **APART}

#: Seconds after which a run under test is taken for hung.
LIMIT = 150.0

#: `pack-miles` with stand-ins for what runs on a GPU only.
WITH_LEAVES = [sys.executable, str(Path(__file__).with_name("olmo_train.py"))]


def write_run(folder: Path, model: Any, **changes: Any) -> Path:
    """Write a run file and the configuration of its model, and return the former; `run__ranks` is `run.ranks`."""
    folder.mkdir(exist_ok=True)
    (folder / "model.json").write_text(json.dumps(model.as_config_dict()))
    return write_toml(folder, CORE | {place.replace("__", "."): value for place, value in changes.items()})


def pack_miles(*arguments: str, leaves: bool = False) -> subprocess.CompletedProcess[str]:
    """Run pack-miles to its end and return what it said; `leaves` puts the stand-ins in on every rank."""
    line = [*WITH_LEAVES, *arguments] if leaves else command(*arguments)
    return subprocess.run(
        line, capture_output=True, text=True, timeout=LIMIT, env=environment(**with_tests()), check=False
    )


def with_tests() -> dict[str, str]:
    """Return the variable that lets a process find `support`; the ranks it starts inherit it."""
    return {"PYTHONPATH": os.pathsep.join(path for path in (str(Path(__file__).parents[1]), *sys.path) if path)}


def train(folder: Path, model: Any, *, leaves: bool = False, **changes: Any) -> Path:
    """Train to the end and return the folder of the run."""
    told = pack_miles("train", str(write_run(folder, model, **changes)), "--debug", leaves=leaves)
    assert told.returncode == 0, told.stderr
    return folder / "out"


def joined(root: Path) -> dict[str, torch.Tensor]:
    """Return the whole weights of a run, routed experts of the first replica's ranks one after another."""
    ranks = weights(root)
    replica = ranks[: events(root, 0, "run_started")[0]["expert_parallel_size"]]
    return {
        name: torch.cat([rank[name] for rank in replica]) if ".routed_experts." in name else value
        for name, value in ranks[0].items()
    }


def assert_same_run(first: Path, second: Path) -> None:
    """Compare two runs of other rows or ranks: rewards exactly, whole weights to 1e-6 · max(1, |x|).

    OLMo-core computes its norms in float32 whatever the weights are, and AdamW scales small gradients up; a fault of
    rows or ranks is seen in steps of the learning rate, a thousand times as large.
    """
    for name in ("reward_mean", "response_tokens"):
        assert [e[name] for e in events(first, 0, "rollout")] == [e[name] for e in events(second, 0, "rollout")]
    ones, others = joined(first), joined(second)
    assert ones.keys() == others.keys()
    for name, one in ones.items():
        assert one.dtype in (torch.float64, torch.int64), name
        assert float(((one - others[name]).abs() / one.abs().clamp(min=1)).max()) <= 1e-6, name


def assert_same_bits(first: Path, second: Path) -> None:
    """Compare the newest checkpoints of two runs, rank by rank."""
    for one, other in zip(weights(first), weights(second), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)

"""Whole training runs as a user starts them, and what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

#: A run of two ranks and two optimizer steps a collection that takes seconds.
TINY: dict[str, Any] = {
    "output.root": "out",
    "data.task": "sort",
    "model.hidden_size": 16,
    "model.intermediate_size": 16,
    "model.moe_intermediate_size": 8,
    "model.n_routed_experts": 4,
    "model.num_attention_heads": 2,
    "core.sequence_packing": True,
    "core.packing_max_tokens": 64,
    "core.max_sequence_length": 32,
    "core.expert_parallel_size": 2,
    "core.attention_backend": "segment",
    "core.activation_checkpointing": False,
    "core.max_policy_lag": 1,
    "miles.rollout_batch_size": 4,
    "miles.n_samples_per_prompt": 4,
    "miles.global_batch_size": 8,
    "miles.num_rollout": 3,
    "miles.rollout_max_response_len": 14,
    "miles.use_rollout_routing_replay": True,
    "miles.lr": 1e-3,
    "run.ranks": 2,
    "run.timeout_seconds": 30.0,
}

#: Seconds after which a run under test is taken for hung.
LIMIT = 90.0


def command(*arguments: str) -> list[str]:
    """Return the command line of pack-miles in this interpreter."""
    return [sys.executable, "-m", "pack_miles", *arguments]


def environment(**more: str) -> dict[str, str]:
    """Return this environment on one thread a process and without any launcher's marks."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | more


def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run pack-miles to its end and return what it said; `more` are variables of its environment."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=LIMIT, env=environment(**more), check=False
    )


@contextmanager
def started(arguments: list[str], **more: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process in a session of its own and end all of it, by id, when the test is done with it."""
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**more),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(condition: Callable[[], Any], what: str, seconds: float = LIMIT) -> Any:
    """Wait until a condition gives something true, and return it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise TimeoutError(f"{what} did not happen within {seconds:g} s")


def events(root: Path, rank: int = 0, name: str | None = None) -> list[dict[str, Any]]:
    """Return a rank's events, read by json alone; of one name when given."""
    lines = (root / f"training_contract_rank{rank}.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [event for event in found if name in (None, event["event"])]


def weights(root: Path) -> list[dict[str, torch.Tensor]]:
    """Return every rank's parameters in the newest checkpoint."""
    newest = sorted((root / "checkpoints").glob("collection_*[0-9]"))[-1]
    parts = sorted(newest.glob("rank*.pt"))
    return [torch.load(part, weights_only=True)["model"] for part in parts]


def moments(root: Path) -> list[dict[int, dict[str, torch.Tensor]]]:
    """Return every rank's optimizer state in the newest checkpoint."""
    newest = sorted((root / "checkpoints").glob("collection_*[0-9]"))[-1]
    parts = sorted(newest.glob("rank*.pt"))
    return [torch.load(part, weights_only=True)["optimizer"]["state"] for part in parts]
